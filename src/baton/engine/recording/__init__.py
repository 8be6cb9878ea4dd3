"""Records on disk what the core reads and decides (`recorder`, `tape`), and replays it (`replay`)."""
