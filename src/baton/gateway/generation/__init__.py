"""A request as a stream of text: `generation` of all its sequences, `sequence` for one, `inbox` between the
engine's messages and who waits for them, `gathering` for many requests at once, `costs` for their bounds.
"""
