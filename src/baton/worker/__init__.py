"""A worker: one process a tensor-parallel rank, which owns its slots and its token loop.

`slots/` decides (no I/O), `loop.py` is the shell around it, `wiring.py` says what connects the
worker to its engine and to the other ranks, `main.py` starts the process.
"""
