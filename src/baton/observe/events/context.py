"""Whose trace a request belongs to: the headers of W3C's Trace Context, taken and passed on.

A client that traces sends `traceparent` (and `tracestate`): its trace, and the span in which it asks.  The
request's own span becomes a child of that one, and the answer's header `traceresponse` says which it is, so
that a client without a trace of its own finds it as well.  <https://www.w3.org/TR/trace-context/>
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?\Z", re.DOTALL)
_MAX_STATE = 512
"""Characters of a `tracestate` that everybody passes on; a longer one is left out, as the standard says."""


class Caller(NamedTuple):
    """The span in which a client asks."""

    trace_id: int
    span_id: int
    sampled: bool
    state: str = ""


def caller_of(traceparent: str | None, tracestate: str | None = None) -> Caller | None:
    """None: there is none, or it is not what the standard says, and then counts as none."""
    found = _PARENT.match(traceparent or "")
    if found is None or found[1] == "ff" or (found[1] == "00" and found[5]):
        return None
    trace_id, span_id = int(found[2], 16), int(found[3], 16)
    if not trace_id or not span_id:
        return None
    state = tracestate or ""
    return Caller(trace_id, span_id, bool(int(found[4], 16) & 1), state if len(state) <= _MAX_STATE else "")


@dataclass(slots=True, frozen=True)
class Trace:
    """Of a request that is traced: the identity of its own span, the root of what this server tells."""

    trace_id: int
    span_id: int
    caller: Caller | None
    """None: it begins a trace."""
    operation: str
    """`gen_ai.operation.name`."""
    id_prefix: str | None
    """Before the request's id, in the answer's; None: that has another one."""
    stream: bool
    state: str = ""
    """`tracestate`, as the sampler left it."""

    @property
    def response(self) -> str:
        """The header `traceresponse`."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-01"
