"""Attacks on a server, for `benchmarks/attacks.py`: each a function of (host, port, seconds).

An attack sends what it sends over and over until its seconds are over, in a process of its own, and returns.
It expects nothing of the answers: a refusal is as good as any.  A module of this package that has attacks
names them in its `ATTACKS`, and stands in `MODULES`.  Where what is asked needs cores, whoever does it, the
module's `CONTROLS` names the control that needs them for the like without an attack.  `python -m _attacks`
runs one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

Attack = Callable[[str, int, float], None]

MODULES = ("costs", "http", "agents", "controls")


def attacks() -> dict[str, Attack]:
    """All that there are, by name."""
    found: dict[str, Attack] = {}
    for module in MODULES:
        found.update(importlib.import_module(f"{__name__}.{module}").ATTACKS)
    return found


def controls() -> dict[str, str]:
    """Which control an attack compares to, by their names."""
    found: dict[str, str] = {}
    for module in MODULES:
        found.update(getattr(importlib.import_module(f"{__name__}.{module}"), "CONTROLS", {}))
    return found
