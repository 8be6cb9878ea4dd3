"""The slots, and what a step makes of them: no I/O and no clock, so every rank decides the same.

`slots` takes commands and composes batches (`late_slots`: one step ahead of the tokens), `composition`
chooses the prompts of a step, `batches` puts it together, `commit` takes in what it gave.
"""
