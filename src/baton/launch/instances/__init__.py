"""The instances of a server: who starts them again, the keeper of their weights' images, what probes see.

`processes/` has the processes that one consists of, `joining/` how one takes part in another server.
"""
