"""What goes wrong: `kinds` inside of instances and between processes, `cluster_kinds` between instances."""
