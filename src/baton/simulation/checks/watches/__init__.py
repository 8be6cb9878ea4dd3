"""Who watches the rules: one file for each part of the cluster, or for each promise; `scheduling/` has those
of who is served first."""
