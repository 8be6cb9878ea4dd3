"""An executor without a model: its answers follow from what it reads back of its pool, so wrong blocks show.

`executor` is the device, `late` the same one step behind the host; `pool`, `hashes`, `grammar` and `results`
are what it holds and answers.
"""
