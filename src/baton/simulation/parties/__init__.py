"""The processes of a virtual cluster: the production state machines, each behind a shell without I/O."""
