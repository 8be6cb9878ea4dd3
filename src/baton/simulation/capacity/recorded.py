"""Requests of a real day, from what engines recorded (`baton serve --record DIR`).

The recordings are replayed, and so it is known what each gateway sent, and which tokens it got, whichever
instances they came from: a request has one number at all instances of its gateway.  Their clocks are brought
together by the time at which each recording began.

* A request that no instance answered with a token (refused, lost before its first one, left by its client)
  is none; one that was sent again counts from when it was sent the time that it was answered.
* One that was continued after a loss goes on as the one that it was.
* Tokens that came from a prefix cache are left out of the prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from baton.engine.recording.recorder import Event, Header, Message
from baton.engine.recording.replay import find_recordings, replay
from baton.engine.recording.tape import DamagedRecording
from baton.protocol.messages.requests import FromEngine, Hello, Outputs, Submit
from baton.simulation.capacity.load import Asked

_TOKEN_BYTES = 4

Key = tuple[str, int]
"""A gateway and the number of a request there."""


class Sent(NamedTuple):
    """That a gateway sent a request, or sent it again."""

    at: float
    """Seconds since the epoch."""
    key: Key
    what: tuple[str, bytes]
    """Its name and its prompt; the sequences of one request share them."""
    prompt: int
    generated: int
    """Tokens that its client had already."""


@dataclass
class Seen:
    """In all recordings."""

    sent: list[Sent] = field(default_factory=list)
    tokens: Counter[Key] = field(default_factory=Counter)
    cached: dict[Key, int] = field(default_factory=dict)
    pooled: set[Key] = field(default_factory=set)
    """Answered with a vector."""


def read_recordings(path: Path) -> list[Asked]:
    """Of all recordings in a directory, in any order.  Raises `DamagedRecording`."""
    seen = Seen()
    for directory in find_recordings(path):
        result = replay(directory, _Reader(seen))
        if result.damage is not None:
            raise DamagedRecording(result.damage)
        if result.difference is not None:
            raise DamagedRecording(
                f"{directory}: Baton {result.header.baton}, which recorded it, decided otherwise than this "
                "version; use that one"
            )
    return requests_of(seen)


def requests_of(seen: Seen) -> list[Asked]:
    """What clients asked, by what gateways sent."""
    found: list[Asked] = []
    places: dict[tuple[str, tuple[str, bytes]], list[int]] = {}
    for one in sorted(seen.sent, key=lambda sent: sent.at):
        same = places.setdefault((one.key[0], one.what), [])
        tokens = seen.tokens[one.key]
        if one.generated and same:
            # (of several sequences of a request, the one whose client had so many)
            place = min(same, key=lambda place: abs(found[place].output - one.generated))
            found[place] = found[place]._replace(output=one.generated + tokens)
        elif tokens or one.key in seen.pooled:
            computed = one.prompt - seen.cached.get(one.key, 0)
            same.append(len(found))
            found.append(Asked(one.at, max(computed, 1), max(one.generated + tokens, 1)))
    return found


class _Reader:
    """Watches one replay."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self._ahead = 0.0
        """Of the recording's clock, the time is."""
        self._gateways: dict[bytes, str] = {}

    def began(self, header: Header) -> None:
        self._ahead = header.started - header.now

    def reads(self, event: Event) -> None:
        if not isinstance(event, Message):
            return
        message = event.message
        if isinstance(message, Hello):
            self._gateways[event.gateway] = message.gateway
        elif isinstance(message, Submit):
            sizes = (len(message.prompt) // _TOKEN_BYTES, len(message.generated) // _TOKEN_BYTES)
            key = (self._gateways.get(event.gateway, ""), message.id)
            what = (message.name, message.prompt)
            self._seen.sent.append(Sent(event.now + self._ahead, key, what, *sizes))

    def sends(self, messages: Sequence[tuple[bytes, FromEngine]]) -> None:
        seen = self._seen
        for identity, message in messages:
            if not isinstance(message, Outputs):
                continue
            gateway = self._gateways.get(identity, "")
            for number in memoryview(message.ids).cast("q"):
                seen.tokens[gateway, number] += 1
            for number, count in message.cached:
                seen.cached[gateway, number] = count
            for end in message.finished:
                if end.reason == "pooled":
                    seen.pooled.add((gateway, end.id))
