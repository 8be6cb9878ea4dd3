"""A request as a stream of text: `generation` of all its sequences, `sequence` for one, `gathering` for many
requests at once, `costs` for their bounds, `pausing` for what happens to them when the instances stand still.
"""
