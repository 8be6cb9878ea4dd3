"""Between the gateway and a helper: a head of fixed size, then so many bytes.  One job, one answer.

The first thing that a helper says is its process id.
"""

from __future__ import annotations

import struct

HELLO = struct.Struct("<I")
"""The helper's process id."""
JOB = struct.Struct("<BI")
"""Number of the job in `reading.jobs.JOBS`, bytes of the body."""
ANSWER = struct.Struct("<BI")
"""Whether the helper ends now, bytes of the answer."""
GOES_ON, ENDS = 0, 1

PROMPT, PATIENT, SHARING = b"p", b"w", b"s"
"""Asks the parent of the helpers for one: when it gives way, and how far (`child.py`)."""
