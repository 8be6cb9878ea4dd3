"""Runs one attack, in a process of its own that imports little: NAME HOST PORT SECONDS.

Says `ready`, and begins when a line comes.
"""

from __future__ import annotations

import sys

from _attacks import attacks

name, host, port, seconds = sys.argv[1:]
attack = attacks()[name]
print("ready", flush=True)
sys.stdin.readline()
attack(host, int(port), float(seconds))
