"""Recordings: what the core read and decided, on disk (`recorder`, `tape`), and once more (`replay`)."""
