"""A trail as spans: what the request was doing at each moment, from its arrival to its end, without gaps.

Theory.  Each note begins a span, and ends the one before it: so whatever is lost or late, the spans of a
sequence add up to the time that its request took.

| span | begins with |
| --- | --- |
| `read` | the arrival: its body is read, its prompt becomes tokens |
| `wait` | no instance can take it |
| `queue` | it was sent to an instance, or waits there again after a preemption |
| `prefill` | it was admitted, and its prompt (after a preemption or a loss: what it has) is computed |
| `handover` | P has its first token and gives it to D, whose fetches end in this time |
| `decode` | its tokens are generated: after the prefill, or seated at D |
| `lost` | its instance is gone, until it is sent again |
| `finish` | the instance has ended it: the rest of the answer is made and sent |

Notes of an engine are put on the gateway's clock (`clocks.py`), in an order that can be (`placing.py`).  If
the engine that decodes was killed its notes are missing, and `decode` begins when the first token came to the
gateway.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from baton.observe.events.placing import offsets
from baton.observe.events.story import Story
from baton.observe.events.trail import Trail
from baton.protocol.notes import Note

GATEWAY = "gateway"
ORDER = ("read", "wait", "queue", "prefill", "handover", "decode", "lost", "finish")

_BEGINS = {
    "sent": "queue",
    "parked": "wait",
    "lost": "lost",
    "moved": "lost",
    "admitted": "prefill",
    "prefilled": "decode",
    "preempted": "queue",
    "handed": "handover",
    "returned": "queue",
    "recompute": "queue",
    "ended": "finish",
}


class Span(NamedTuple):
    name: str
    where: str
    """An instance, or `GATEWAY`."""
    begin: float
    end: float
    """On the gateway's clock."""
    id: int
    """Under which the instance knew it: another one for each attempt."""
    slot: int = -1


class Event(NamedTuple):
    """A note on the gateway's clock."""

    at: float
    where: str
    id: int
    note: Note


def events(trail: Trail) -> list[Event]:
    """Everything that is known of a sequence, in order of time."""
    found = [Event(note.at, GATEWAY, _id_of(note), note) for note in trail.entries]
    for told, offset in zip(trail.told, offsets(trail.told), strict=True):
        found += [Event(note.at - offset, told.instance, told.id, note) for note in told.notes]
    found.sort(key=_at)
    return found


def _at(event: Event) -> float:
    return event.at


def _id_of(note: Note) -> int:
    return note.a if note.what in ("sent", "heard", "refused", "lost", "moved") else 0


def spans(story: Story, trail: Trail | None, now: float) -> list[Span]:
    """`trail` None: of one that was never sent.  `now`: the end of what has not ended."""
    end = now if story.ended is None else story.ended
    cuts = [Span("read", GATEWAY, story.arrived, end, 0)]
    tellers = set() if trail is None else {(told.id, told.instance) for told in trail.told}
    over: dict[int, float] = {}
    for event in [] if trail is None else events(trail):
        if event.at > over.get(event.id, math.inf):
            continue  # (an instance that the request was taken from ends it there as well)
        if event.note.what in ("lost", "moved"):
            over[event.id] = event.at
        cut = _cut(event, cuts[-1], tellers)
        if cut is not None:
            if cut.name == "handover" and cuts[-1].name == "decode" and cuts[-1].id == cut.id:
                cut = cut._replace(begin=cuts.pop().begin)  # (P sends none of its tokens before)
            cuts.append(cut)
    return _joined(cuts, story.arrived, end)


def _cut(event: Event, last: Span, tellers: set[tuple[int, str]]) -> Span | None:
    """The span that a note begins; None: none."""
    at, where, id, note = event
    name, slot = _BEGINS.get(note.what), -1
    if note.what == "heard":
        if (id, note.text) in tellers:
            return None  # it says so itself
        return Span("decode", note.text, at, at, id)
    if name is None:
        return None
    if note.what == "sent":
        where = note.text.partition(">")[0]
    elif note.what == "admitted":
        slot = note.a
        # D got everything but the last token's KV.
        name = "decode" if note.b > 0 and note.b >= note.c - 1 else "prefill"
    elif note.what == "prefilled":
        slot = note.c
        if last.name == "handover" and last.id == id and last.where == where:
            return None
    elif note.what == "ended" and note.text in ("handed_over", "lost"):
        return None
    elif note.what in ("lost", "moved", "parked"):
        where = GATEWAY
    return Span(name, where, at, at, id, slot)


def _joined(cuts: Sequence[Span], begin: float, end: float) -> list[Span]:
    """Each until the next one begins, within [begin, end]."""
    joined: list[Span] = []
    for cut, after in zip(cuts, [*cuts[1:], None], strict=True):
        first = min(max(cut.begin, begin), end)
        last = end if after is None else min(max(after.begin, begin), end)
        same = joined and joined[-1][:2] == cut[:2] and joined[-1].id == cut.id
        if same and joined[-1].slot in (cut.slot, -1):
            joined[-1] = joined[-1]._replace(end=last, slot=cut.slot)
        elif last > first or cut.name != "finish":
            joined.append(cut._replace(begin=first, end=last))
    return joined


def sums(found: Iterable[Span]) -> dict[str, float]:
    """Seconds by name, of those that there are, in `ORDER`."""
    totals: dict[str, float] = {}
    for span in found:
        totals[span.name] = totals.get(span.name, 0.0) + span.end - span.begin
    return {name: totals[name] for name in ORDER if name in totals}
