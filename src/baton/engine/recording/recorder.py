"""Recording and replaying: everything that the engine core reads, and what it decided, from the first moment.

Theory.  The core is a state machine without I/O: the same configuration and the same calls with the same
arguments give the same decisions.  So `RecordingCore` notes each call that comes from outside (`Event`)
before it is made, and with each `flush` what came of it: the command batch as it is, and digests of what
goes to the gateways and to other engines.  One flush is one frame (`tape.py`).  `replay` makes the same calls
on a fresh core and compares.

What is recorded contains the prompts and the answers as token ids.  The directory is private to its owner.

Bounds.  All recordings under one directory together take at most `record_max_bytes`; a recording that reaches
it ends there, says so in the log and in its last frame, and the engine goes on without.  Several instances
record into one directory, so each looks anew at what is there whenever it has used a 64th of what was left
(with n of them the directory is over its limit by n/64 of that at most, and by what is not on disk yet).
A recording never drops its beginning, because a replay must start there.

An exception from the core (a defect) is part of the record in that the calls around it are: the replay meets
it at the same place, and goes on as the engine did.
"""

from __future__ import annotations

import contextlib
import logging
import platform
import time
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import msgspec

from baton.engine.core import EngineCore, Outgoing
from baton.engine.recording import tape
from baton.protocol.codec import Codec
from baton.protocol.config import InstanceConfig
from baton.protocol.messages.commands import CommandBatch
from baton.protocol.messages.handover import PeerMessage
from baton.protocol.messages.reports import Report
from baton.protocol.messages.requests import FromEngine, Target, ToEngine
from baton.version import __version__

log = logging.getLogger(__name__)

DIGEST_BYTES = 16
_END_BYTES = 256
_LOOKS = 64
"""Room that is kept for the last frame."""


class Header(msgspec.Struct, tag="header", array_like=True, frozen=True):
    """The first frame: what the core was made with, and by which software."""

    baton: str
    python: str
    started: float
    """Seconds since the epoch when the engine's clock showed `now`: relates recordings' clocks."""
    config: InstanceConfig
    incarnation: str
    workers: list[int]
    now: float
    peer_endpoint: str
    secret: bytes = b""


class Message(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """`on_message`."""

    now: float
    gateway: bytes
    message: ToEngine


class Reported(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """`on_report`."""

    now: float
    rank: int
    report: Report


class Clock(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """`on_clock` at or after a deadline; before it nothing depends on it."""

    now: float


class GatewayLost(msgspec.Struct, tag=4, array_like=True, frozen=True):
    gateway: bytes


class Violated(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """`violation`: something came that is no message."""

    sender: str
    what: str


class Refusals(msgspec.Struct, tag=13, array_like=True, frozen=True):
    """`refused`: so many by now who have no part in the cluster."""

    where: str
    count: int


class Failed(msgspec.Struct, tag=6, array_like=True, frozen=True):
    """`fail`, called by the loop."""

    reason: str


class ShutDown(msgspec.Struct, tag=7, array_like=True, frozen=True):
    pass


class Flushed(msgspec.Struct, tag=8, array_like=True, frozen=True):
    """`flush`, and what it returned."""

    now: float
    batch: CommandBatch | None
    digest: bytes
    """Of the messages to gateways, see `digest_of`; empty if there were none."""
    peers: bytes
    """The same of those to other engines."""


class FlushRaised(msgspec.Struct, tag=10, array_like=True, frozen=True):
    """`flush` ended with an exception, which the loop takes for a defect."""

    now: float


class PeerSaid(msgspec.Struct, tag=11, array_like=True, frozen=True):
    """`on_peer`."""

    now: float
    peer: str
    message: PeerMessage


class PeerLost(msgspec.Struct, tag=12, array_like=True, frozen=True):
    now: float
    peer: str
    dead: bool


class Ended(msgspec.Struct, tag=9, array_like=True, frozen=True):
    """The recording ends here, and why."""

    reason: str


Event = (
    Message
    | Reported
    | PeerSaid
    | Clock
    | GatewayLost
    | PeerLost
    | Violated
    | Refusals
    | Failed
    | ShutDown
    | Flushed
    | FlushRaised
    | Ended
)

HEADER: Codec[Header] = Codec(Header)
EVENTS: Codec[list[Event]] = Codec(list[Event])
_encode = msgspec.msgpack.Encoder().encode


def digest_of(messages: Sequence[tuple[bytes, FromEngine]] | Sequence[tuple[Target, PeerMessage]]) -> bytes:
    """BLAKE2b, 128 bits, of all messages of a flush with their receivers, as bytes in order."""
    return blake2b(_encode(messages), digest_size=DIGEST_BYTES).digest() if messages else b""


class RecordingCore(EngineCore):
    """An engine core that writes down what is done with it.

    `close` must be called at the end.  Raises `OSError` if the directory cannot be used.
    """

    def __init__(
        self,
        config: InstanceConfig,
        *,
        incarnation: str,
        workers: Sequence[int],
        now: float,
        peer_endpoint: str = "",
        secret: bytes = b"",
    ) -> None:
        super().__init__(
            config,
            incarnation=incarnation,
            workers=workers,
            now=now,
            peer_endpoint=peer_endpoint,
            secret=secret,
        )
        root = Path(config.record or ".")
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory = root / f"{time.strftime('%Y%m%dT%H%M%S')}-{incarnation}"
        self._directory = directory
        self._written = 0
        """Bytes of this recording, on disk or on their way."""
        self._measure()
        directory.mkdir(mode=0o700)
        self._tape = tape.TapeWriter(directory)
        self._recording = True
        self._events: list[Event] = []
        self._inside = False
        """The core itself calls one of its methods: that is not an event."""
        header = Header(
            __version__,
            platform.python_version(),
            _wall_time(now),
            config,
            incarnation,
            self.workers,
            now,
            peer_endpoint,
            secret,
        )
        self._write(HEADER.encode(header))
        if self._recording:
            log.info("recording into %s, at most %d MiB more", directory, self._room >> 20)

    # -- what comes from outside

    def on_message(self, gateway: bytes, message: ToEngine, now: float) -> None:
        self._enter(Message(now, gateway, message))
        try:
            super().on_message(gateway, message, now)
        finally:
            self._inside = False

    def on_report(self, rank: int, report: Report, now: float) -> None:
        self._enter(Reported(now, rank, report))
        try:
            super().on_report(rank, report, now)
        finally:
            self._inside = False

    def on_peer(self, peer: str, message: PeerMessage, now: float) -> None:
        self._enter(PeerSaid(now, peer, message))
        try:
            super().on_peer(peer, message, now)
        finally:
            self._inside = False

    def peer_lost(self, peer: str, now: float, dead: bool = False) -> None:
        self._enter(PeerLost(now, peer, dead))
        try:
            super().peer_lost(peer, now, dead=dead)
        finally:
            self._inside = False

    def on_clock(self, now: float) -> None:
        deadline = self.next_deadline()
        if deadline is None or now < deadline:
            return
        self._enter(Clock(now))
        try:
            super().on_clock(now)
        finally:
            self._inside = False

    def gateway_lost(self, identity: bytes) -> None:
        self._note(GatewayLost(identity))
        super().gateway_lost(identity)

    def violation(self, sender: str, what: str) -> None:
        self._note(Violated(sender, what))
        super().violation(sender, what)

    def refused(self, where: str, count: int) -> None:
        self._note(Refusals(where, count))
        super().refused(where, count)

    def fail(self, message: str) -> None:
        self._note(Failed(message))
        super().fail(message)

    def shut_down(self) -> None:
        self._note(ShutDown())
        super().shut_down()

    def flush(self, now: float) -> Outgoing:
        self._inside = True
        try:
            outgoing = super().flush(now)
        except Exception:
            if self._recording:
                self._events.append(FlushRaised(now))
            raise
        finally:
            self._inside = False
        if self._recording:
            gateways, peers = digest_of(outgoing.gateways), digest_of(outgoing.peers)
            self._events.append(Flushed(now, outgoing.batch, gateways, peers))
            self._write(_encode(self._events))
            self._events = []
        return outgoing

    def close(self) -> None:
        """Ends the recording; waits a bounded time for the disk."""
        if self._recording:
            self._recording = False
            self._tape.write(_encode([*self._events, Ended("the engine left")]))
        self._tape.close()

    # -- inside

    def _enter(self, event: Event) -> None:
        self._inside = True
        if self._recording:
            self._events.append(event)

    def _note(self, event: Event) -> None:
        if self._recording and not self._inside:
            self._events.append(event)

    def _write(self, content: bytes) -> None:
        size = len(content) + 8
        self._written += size
        self._room -= size
        self._unmeasured -= size
        if self._unmeasured < 0:
            self._measure()
        if self._room < _END_BYTES:
            self._recording = False
            limit = self.config.record_max_bytes
            log.warning(
                "recording stops: %s holds its %d MiB (--record-max-bytes); the engine goes on",
                self.config.record,
                limit >> 20,
            )
            self._tape.write(_encode([Ended(f"the limit of {limit} bytes was reached")]))
        elif not self._tape.write(content):
            self._recording = False

    def _measure(self) -> None:
        """How much more this recording may write, and after how much of it to look again."""
        others = _size_of(self._directory.parent, but=self._directory)
        self._room = self.config.record_max_bytes - others - self._written
        self._unmeasured = max(self._room // _LOOKS, _END_BYTES)


def create_core(
    config: InstanceConfig,
    *,
    incarnation: str,
    workers: Sequence[int],
    now: float,
    peer_endpoint: str = "",
    secret: bytes = b"",
) -> EngineCore:
    """The engine core of an instance: one that records if the configuration says so.

    A directory that cannot be written to is an error in the log, and the engine runs without recording.
    """
    if config.record is not None:
        try:
            return RecordingCore(
                config,
                incarnation=incarnation,
                workers=workers,
                now=now,
                peer_endpoint=peer_endpoint,
                secret=secret,
            )
        except OSError as error:
            log.error("recording is off: --record %s: %s", config.record, error.strerror or error)
    return EngineCore(
        config,
        incarnation=incarnation,
        workers=workers,
        now=now,
        peer_endpoint=peer_endpoint,
        secret=secret,
    )


def _wall_time(now: float) -> float:
    """Seconds since the epoch when `time.monotonic` showed `now`, by the quickest of a few looks at both."""
    looks = ((time.monotonic(), time.time(), time.monotonic()) for _ in range(5))
    return min((after - before, wall - before + now) for before, wall, after in looks)[1]


def _size_of(directory: Path, but: Path) -> int:
    """Bytes of all recordings in a directory, but for one."""
    total = 0
    for path in directory.glob(f"*/*{tape.SUFFIX}"):
        if path.parent != but:
            with contextlib.suppress(FileNotFoundError):  # somebody tidies up
                total += path.stat().st_size
    return total
