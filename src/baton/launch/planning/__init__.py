"""From flags to what the processes of a server need, of one host or several: configurations, secrets, files.

`plan` resolves what depends on the checkpoint and the machine, `cluster_options` says which instances there
are, `node_options` which hosts one has.  Whatever cannot be served is an `OptionError`.
"""
