"""Runs one attack, in a process of its own that imports little: NAME HOST PORT SECONDS.

Says `ready`, and begins when a line comes.  It takes what the server leaves of the cores: an attacker
computes elsewhere.
"""

from __future__ import annotations

import os
import sys

from _attacks import attacks

_LOWEST = 19

name, host, port, seconds = sys.argv[1:]
attack = attacks()[name]
os.nice(_LOWEST)
print("ready", flush=True)
sys.stdin.readline()
attack(host, int(port), float(seconds))
