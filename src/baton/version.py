"""The version, apart from the package's `__init__`, so that no part imports the whole to know it."""

__version__ = "0.1.0"
