"""How pages come from another pool: a file for each transport, and the two ends of a page connection."""
