"""Processes of one machine: forking them, hearing of their end, and how many cores they may compute on."""
