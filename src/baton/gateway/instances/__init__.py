"""The shell around `cluster`: sockets, timers and futures.

`client` is the gateway's side of all instances, `connection` of one, `channel` its socket, `inbox` between
the engine's messages and who waits for them; `orders` and `weights` ask something of all instances;
`endpoints` says where the server may connect to, `limits` what instances hold and read, `patience` how long
an answer is waited for, `conditions` who waits for what.
"""
