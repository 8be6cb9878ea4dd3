"""Steps that confirm several tokens: who drafts on this rank, with which model, and the runs that come of it.

What is drafted is decided in `baton.drafting`.
"""
