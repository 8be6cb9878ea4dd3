"""Who watches the rules: one file for each part of the cluster, or for each promise."""
