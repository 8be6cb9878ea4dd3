"""A request as a stream of text.

`generation` is all of its sequences, `sequence` one, `generator` starts them; `gathering` reads many requests
at once, `costs` bounds what one may ask, `pausing` says what becomes of them while the instances stand still.
"""
