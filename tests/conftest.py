"""Settings of all tests: none of them may fail because the machine is slow or pauses."""

from __future__ import annotations

import signal
from collections import Counter
from functools import partial

import pytest
from hypothesis import HealthCheck, settings

GENEROUS_S = 60.0
"""So long may pass, on a machine that is busy with other things, until what happens at once has happened.

Tests that would hang for ever, or for much longer, without what they test may say so with this.  Where the
question is which of two things ended a wait, and one of them is a shorter deadline, look at what ended it
instead: an error's text, a counter, what was called.
"""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job ignores Ctrl-C, and so would all programs that the tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("steady", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where several processes share the files, those with slow tests come first: none of them is left at the
    end, when the other processes have nothing to do.  These processes tell tests apart by their names, and
    would run only one of those that share a name."""
    if not hasattr(config, "workerinput"):
        return
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    counts = Counter(item.nodeid for item in items)
    for item in items:
        if counts[item.nodeid] > 1:
            why = f"{counts[item.nodeid]} tests have this name: add the file to ALONE in the Makefile"
            item.runtest = partial(pytest.fail, why)  # type: ignore[attr-defined]
