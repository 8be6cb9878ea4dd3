"""Drafters that run a model: a draft model, or a layer of the model itself.

They know the model as a protocol. `draft_kv` and `draft_text` say which blocks of its pool hold which text,
`how_many` when drafts are worth their time.
"""
