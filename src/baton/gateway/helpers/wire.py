"""Between the gateway and a helper: a head of fixed size, then so many bytes.  One job, one answer."""

from __future__ import annotations

import struct

JOB = struct.Struct("<BI")
"""Number of the job in `reading.JOBS`, bytes of the body."""
ANSWER = struct.Struct("<BI")
"""Whether the helper ends now, bytes of the answer."""
GOES_ON, ENDS = 0, 1
