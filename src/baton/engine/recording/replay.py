"""Replaying a recording: the same calls on a fresh core, and whether it decides the same, byte for byte.

A recording is compared flush by flush: the command batch as bytes, the messages to gateways by their digest.
The first flush that differs ends the replay, because everything after it follows from it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import msgspec

from baton.engine.core import EngineCore
from baton.engine.recording.recorder import (
    EVENTS,
    HEADER,
    Clock,
    Ended,
    Event,
    Failed,
    Flushed,
    FlushRaised,
    GatewayLost,
    Header,
    Message,
    PeerLost,
    PeerSaid,
    Refusals,
    Reported,
    ShutDown,
    Violated,
    digest_of,
)
from baton.engine.recording.tape import DamagedRecording, TapeReader
from baton.protocol.codec import Codec, MalformedMessage, unpack_int32, unpack_int64
from baton.protocol.messages.commands import CommandBatch, Preempt
from baton.protocol.messages.handover import PeerMessage
from baton.protocol.messages.reports import StepReport
from baton.protocol.messages.requests import FromEngine, Outputs

log = logging.getLogger(__name__)

_BATCH: Codec[CommandBatch | None] = Codec(CommandBatch | None)


@dataclass
class Difference:
    """The first decision that is not the recorded one."""

    frame: int
    """Counts from 1; the header is frame 1."""
    event: int
    now: float
    recorded: str
    replayed: str


@dataclass
class Replay:
    """What a replay saw."""

    header: Header
    counts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    """From the first to the last moment of the recording."""
    digest: str = ""
    """Of all decisions so far: equal for equal recordings and equal decisions."""
    ended: str | None = None
    """Why the recording ends, in its own words; None: it does not say."""
    cut_off: int = 0
    """Bytes of an unfinished frame at its end."""
    damage: str | None = None
    """It could be read up to there only."""
    difference: Difference | None = None

    @property
    def identical(self) -> bool:
        return self.difference is None and self.damage is None


class Watch(Protocol):
    """Looks on while a recording is replayed."""

    def began(self, header: Header) -> None: ...

    def reads(self, event: Event) -> None:
        """The engine is about to."""

    def sends(self, messages: Sequence[tuple[bytes, FromEngine]]) -> None:
        """To gateways, by their identities."""


def find_recordings(path: Path) -> list[Path]:
    """The recordings in a directory, oldest first, or itself.  Raises `DamagedRecording` if there is none.

    An engine that is killed right after its start leaves an empty one, which is left out beside others.
    """
    if any(path.glob("*.tape")):
        return [path]
    found = sorted({segment.parent for segment in path.glob("*/*.tape")})
    if not found:
        raise DamagedRecording(f"{path}: there is no recording here")
    return [directory for directory in found if not _is_empty(directory)] or found


def _is_empty(directory: Path) -> bool:
    try:
        return next(iter(TapeReader(directory)), None) is None
    except DamagedRecording:
        return False  # (what is wrong with it is said when it is read)


def replay(directory: Path, watch: Watch | None = None) -> Replay:
    """Replays one recording.

    Raises `DamagedRecording` if not even its beginning can be read; damage further on is in the result.
    """
    reader = TapeReader(directory)
    frames = iter(reader)
    content = next(frames, None)
    if content is None:
        raise DamagedRecording(f"{directory}: the recording is empty")
    try:
        header = HEADER.decode(content)
    except MalformedMessage as error:
        raise DamagedRecording(f"{directory}: the header cannot be read: {error}") from None
    player = _Player(header, watch)
    result = player.result
    number = 1
    try:
        for number, content in enumerate(frames, start=2):
            player.play(number, EVENTS.decode(content))
            if result.difference is not None:
                break
    except DamagedRecording as error:
        result.damage = str(error)
    except MalformedMessage as error:
        result.damage = f"{directory}: frame {number} cannot be read: {error}"
    result.cut_off = reader.cut_off
    result.digest = player.digest.hexdigest()
    return result


class _Player:
    """Makes the calls, and compares."""

    def __init__(self, header: Header, watch: Watch | None = None) -> None:
        self._watch = watch
        if watch is not None:
            watch.began(header)
        config = msgspec.structs.replace(header.config, record=None)
        self.result = Replay(header)
        self.digest = blake2b(digest_size=16)
        self._core = EngineCore(
            config,
            incarnation=header.incarnation,
            workers=header.workers,
            now=header.now,
            peer_endpoint=header.peer_endpoint,
            secret=header.secret,
        )
        self._first = header.now

    def play(self, frame: int, events: list[Event]) -> None:
        for number, event in enumerate(events, start=1):
            if isinstance(event, Flushed):
                self._flush(frame, number, event)
            elif isinstance(event, Ended):
                self.result.ended = event.reason
            else:
                self._count(event)
                if self._watch is not None:
                    self._watch.reads(event)
                try:
                    self._call(event)
                except Exception as error:  # as the loop does, which then says what follows
                    log.warning("frame %d, event %d: a defect in the engine: %r", frame, number, error)
                    self.result.counts["defects"] += 1

    def _call(self, event: Event) -> None:
        core = self._core
        match event:
            case Message():
                core.on_message(event.gateway, event.message, event.now)
            case Reported():
                core.on_report(event.rank, event.report, event.now)
            case PeerSaid():
                core.on_peer(event.peer, event.message, event.now)
            case PeerLost():
                core.peer_lost(event.peer, event.now, dead=event.dead)
            case Clock():
                core.on_clock(event.now)
            case GatewayLost():
                core.gateway_lost(event.gateway)
            case Violated():
                core.violation(event.sender, event.what)
            case Refusals():
                core.refused(event.where, event.count)
            case Failed():
                core.fail(event.reason)
            case ShutDown():
                core.shut_down()
            case FlushRaised():
                core.flush(event.now)

    def _count(self, event: Event) -> None:
        counts = self.result.counts
        counts[_NAMES[type(event)]] += 1
        if isinstance(event, Reported) and isinstance(event.report, StepReport):
            counts["tokens"] += len(event.report.tokens) // 4

    def _flush(self, frame: int, number: int, recorded: Flushed) -> None:
        result = self.result
        batch, messages, peers = self._core.flush(recorded.now)
        if self._watch is not None:
            self._watch.sends(messages)
        result.counts["decisions"] += 1
        for command in batch.commands if batch else ():
            result.counts["commands"] += 1
            result.counts["preemptions"] += isinstance(command, Preempt)
        result.seconds = recorded.now - self._first
        mine, theirs = _BATCH.encode(batch), _BATCH.encode(recorded.batch)
        digests = digest_of(messages), digest_of(peers)
        if mine == theirs and digests == (recorded.digest, recorded.peers):
            for part in (mine, *digests):
                self.digest.update(part)
            return
        parts = []
        if mine != theirs:
            parts.append((describe(recorded.batch), describe(batch)))
        for name, sent, digest, kept in (
            ("messages", messages, digests[0], recorded.digest),
            ("messages to engines", peers, digests[1], recorded.peers),
        ):
            if digest != kept:
                there = f"{name} with digest {kept.hex()}" if kept else f"no {name}"
                here = "; ".join(describe(message) for _, message in sent)
                parts.append((there, here or f"no {name}"))
        recorded_text, replayed_text = ("\n".join(column) for column in zip(*parts, strict=True))
        result.difference = Difference(frame, number, recorded.now, recorded_text, replayed_text)


_NAMES: dict[type, str] = {
    Message: "messages",
    Reported: "reports",
    Clock: "deadlines",
    PeerSaid: "messages of engines",
    GatewayLost: "gateways lost",
    PeerLost: "engines lost",
    Violated: "malformed messages",
    Refusals: "refusals",
    Failed: "failures",
    ShutDown: "shutdowns",
    FlushRaised: "decisions that raised",
}
_PACKED = {"tokens": unpack_int32, "blocks": unpack_int32, "pages": unpack_int32}


def describe(thing: CommandBatch | FromEngine | PeerMessage | None) -> str:
    """A batch of commands or a message, decoded, on one line."""
    if thing is None:
        return "no commands"
    if isinstance(thing, CommandBatch):
        return f"batch {thing.sequence}: " + "; ".join(_fields(command) for command in thing.commands)
    if isinstance(thing, Outputs):
        pairs = zip(unpack_int64(thing.ids), unpack_int32(thing.tokens), strict=True)
        parts = [f"request {number}: token {token}" for number, token in pairs]
        return "Outputs(" + "; ".join([*parts, *map(_fields, thing.finished)]) + ")"
    return _fields(thing)


def _fields(struct: Any) -> str:
    """A struct with its packed arrays as lists."""
    parts = []
    for name in struct.__struct_fields__:
        value = getattr(struct, name)
        parts.append(f"{name}={list(_PACKED[name](value)) if name in _PACKED else value!r}")
    return f"{type(struct).__name__}({', '.join(parts)})"


def replay_all(path: Path) -> Iterator[tuple[Path, Replay]]:
    """Every recording under a path, one after the other.  Raises `DamagedRecording`."""
    for directory in find_recordings(path):
        yield directory, replay(directory)
