"""Records on disk what the core reads and decides (`recorder`, `tape`), and replays it (`replay`), also to
see where the time of its requests went (`stories`)."""
