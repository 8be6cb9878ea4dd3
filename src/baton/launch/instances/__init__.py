"""The processes of instances: how one runs, who starts it again, and how one joins another server."""
