"""One log format for all processes, on stderr: time, level, who, message."""

from __future__ import annotations

import logging
import sys


def configure_logging(level: str, who: str) -> None:
    """Sets the root logger of this process.  `who` is 'gateway', the name of an instance for its
    engine, with '/' and the rank for a worker, …"""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s %(levelname)-7s {who:<11} %(message)s", datefmt="%H:%M:%S")
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("httpx", "httpcore", "urllib3", "filelock", "torch"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))
