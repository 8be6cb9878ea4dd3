"""A device that runs behind the host: its queue of work and its events, and how numbers get there.

Imports nothing of Baton but the executor's seam.
"""
