"""What `test_starting.py` has started: says over a descriptor how it finds itself, and ends as it is told.

It runs as `python -m tests.launch.started ARGUMENT`, or forked.  ARGUMENT: a descriptor, then what to do.
"""

import json
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path

from baton.ipc.processes.process import die_with_parent


def found() -> dict[str, object]:
    status = Path("/proc/self/status").read_text().splitlines()
    fds = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            fds[name] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            pass  # that of the listing
    torch = sys.modules.get("torch")
    return {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "session": os.getsid(0),
        "own group": os.getpgid(0) == os.getpid(),
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": fds,
        "inheritable": sorted(int(fd) for fd in fds if os.get_inheritable(int(fd))),
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "mask": next(line for line in status if line.startswith("Umask")),
        "cores": sorted(os.sched_getaffinity(0)),
        "nice": os.nice(0),
        "limits": [resource.getrlimit(which) for which in range(16)],
        "signals": [line for line in status if line.startswith(("SigBlk", "SigIgn", "SigCgt"))],
        "alarm": signal.getitimer(signal.ITIMER_REAL),
        "command": Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").decode().split("\0"),
        "argument": sys.argv[1:],
        "drawn": random.random(),
        "drawn by numpy": None if torch is None else __import__("numpy").random.random(),
        "threads of torch": None if torch is None else torch.get_num_threads(),
        "openmp": None if torch is None else torch.__config__.parallel_info(),
    }


def main(forked: bool = False) -> int:
    descriptor, what = sys.argv[1].split()
    if what.startswith("torch"):
        import torch  # noqa: F401
    if what == "wait":
        die_with_parent(os.getppid())
    os.write(int(descriptor), json.dumps({"forked": forked, **found()}).encode() + b"\n")
    if what == "wait":
        time.sleep(600)
    return int(what) if what.isdigit() else 0


if __name__ == "__main__":
    sys.exit(main())
