"""A process that gives way is nice, with long slices."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

_CHILD = """
import ctypes, json, os, struct
from baton.ipc import giving_way

giving_way.give_way(3)
attributes = ctypes.create_string_buffer(giving_way._ATTRIBUTES.size)
number = {"x86_64": 315, "aarch64": 275}[os.uname().machine]
ctypes.CDLL(None).syscall(number, 0, attributes, len(attributes), 0)
slice_ns = giving_way._ATTRIBUTES.unpack(attributes.raw)[5]
print(json.dumps([os.getpriority(os.PRIO_PROCESS, 0), os.getsid(0), slice_ns]))
"""


@pytest.mark.skipif(os.uname().machine not in ("x86_64", "aarch64"), reason="the number of a system call")
def test_what_gives_way_is_nice_in_its_session_and_anything_interrupts_it():
    output = subprocess.run([sys.executable, "-c", _CHILD], stdout=subprocess.PIPE, check=True).stdout
    nice, session, slice_ns = json.loads(output)
    assert nice == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 3)
    assert session == os.getsid(0), "nice counts inside of a session"
    major, minor = map(int, re.findall("[0-9]+", os.uname().release)[:2])
    if (major, minor) >= (6, 12) and os.sched_getscheduler(0) in (os.SCHED_OTHER, os.SCHED_BATCH):
        assert slice_ns == 100_000_000
