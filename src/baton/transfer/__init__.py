"""How KV pages travel between instances: the reader fetches them into its own blocks.

`base` says what a pool is, `layout` which bytes of which rank a reader needs, `grants` who may read which;
`transports/` moves them, `tasks` and `service` run all of a worker's fetches in one thread beside its token
loop.
"""
