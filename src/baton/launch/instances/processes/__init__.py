"""The processes of an instance, and how they start: forked by a server that has imported, or plainly."""
