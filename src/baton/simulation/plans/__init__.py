"""What a seed stands for: `plan` its shape, `draw` from a seed, `scenarios` the named kinds."""
