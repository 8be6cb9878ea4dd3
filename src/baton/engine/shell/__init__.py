"""The engine's I/O: the only place of the engine with sockets, rings, processes and a clock.

`loop` is the event loop around `EngineCore`; `peers` the connections to other engines; `sockets` listens;
`command_writer` is the engine's end of the rings to its workers.
"""
