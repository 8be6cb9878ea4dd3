"""A device that runs behind the host: its queue of work and its events, how numbers get there, and how its
pages get to other processes.

Imports the executor's seam, configuration and memory, nothing that computes.
"""
