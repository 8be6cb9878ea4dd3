"""A cluster on a cost model: what load it bears within an SLO, with which instances.

`load` is what comes: a day, or a trace (`trace`); `machine` one instance, whose steps take what a
`CostModel` says; `cluster` the whole, with the routing (`gateway/cluster/routing.py`) and the decisions
(`gateway/arranging`) of production; `goodput` what came of it; `planning` how many instances a trace needs;
`plot` draws.

Unlike the simulator of protocols (`simulation/world.py`) nothing goes wrong here and no message travels, so
hours of load take seconds.
"""
