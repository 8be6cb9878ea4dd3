"""How many files this process and its children may open.

Each connection is one, and shells allow 1,024 by default, though the system allows a process to ask for more.
"""

from __future__ import annotations

import resource

from baton.launch.limits import OptionError

_WANTED = 1 << 16
"""More than that many connections one process does not serve."""
_LEAST = 160
"""Of which a server with one instance takes about a third for itself."""


def raise_descriptor_limit() -> int:
    """Takes what the system allows, for the children as well; returns it.  Raises `OptionError` if that is
    too little to serve anything."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(hard, _WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    if soft == resource.RLIM_INFINITY:
        return _WANTED
    if soft < _LEAST:
        raise OptionError(
            f"only {soft} open files are allowed, and a server needs at least {_LEAST}; raise the limit "
            "(ulimit -n, LimitNOFILE of systemd)"
        )
    return soft
