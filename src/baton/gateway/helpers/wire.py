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

PROMPT, PATIENT = b"p", b"w"
"""Asks the parent of the helpers for one: whether it gives way to everything else from the beginning."""
