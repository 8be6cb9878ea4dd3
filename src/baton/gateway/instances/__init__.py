"""The shell around `cluster`: sockets, timers and futures.

`client` is the gateway's side of all instances, `connection` of one, `channel` its socket; `orders`,
`pausing` and `weights` ask something of all instances; `endpoints` says where the server may connect to.
"""
