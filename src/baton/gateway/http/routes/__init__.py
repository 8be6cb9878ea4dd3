"""The routes, one file for each group; `rights.py` says who may use which."""
