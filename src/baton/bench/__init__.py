"""What `baton bench` measures: an engine without a server (`throughput`), and a server over HTTP (`serve`).

Nothing that serves imports this package.  The names and definitions of the metrics are vLLM's, so that
results can be compared; `metrics.py` says each in a sentence.
"""
