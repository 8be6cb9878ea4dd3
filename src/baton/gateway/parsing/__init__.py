"""What a model wrote, taken apart: reasoning, text, and calls of tools.  Pure: no I/O, no HTTP, no tokens.

`formats` says as data how models frame these, `choice` finds the format of a model, `parser` reads a text by
it while it comes.  The result does not depend on how the text is cut into pieces: whatever is given is
decided by the characters so far alone, and what is not decided yet is held back.
"""
