"""The reader's connections to one page server: questions ahead, answers in order.

Theory.  A fetch is cut into *pieces* of about two megabytes, each a question of its own.  The pieces of all
fetches from one source stand in one line.  A connection (`_Pipe`) takes the next one whenever its window
(`window.py`) is open, so many are on their way at once and the delay of the network is paid once, not once a
fetch.  The answers come in the order of the questions, straight into the blocks that they are for.

One connection is enough where the network is near.  What the kernel buffers for a connection may be less than
bandwidth x delay of a far one, so while all are full and slow another one is opened, up to `MAX_PIPES`.

A fetch that is dropped takes its pieces out of the line.  What was asked for already comes all the same, in
front of what others have asked for: it is read and thrown away, unless nothing else is wanted from that
connection, which is closed then.  In both cases no byte lands in the blocks from the moment of the drop on.
A connection that breaks or falls silent fails what was asked for on it, and what stands in the line if there
is no other.  One that the server closes before it has answered anything may have had to make room for others:
then another one is made, as long as the server may be silent.
"""

from __future__ import annotations

import random
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from baton.transfer.base import TransferError
from baton.transfer.tasks import READ, WRITE, Task, Tasks, Wait
from baton.transfer.transports.channel import (
    Channel,
    Encryption,
    Place,
    PlainChannel,
    connect,
    is_quiet,
    receive_bytes,
)
from baton.transfer.transports.page_stream import (
    ANSWER,
    MAGIC,
    MAX_MESSAGE,
    OK,
    TURN_BYTES,
    Closed,
    Step,
    Vectors,
)
from baton.transfer.transports.window import Question, Window

MAX_PIPES = 8
IDLE_S = 30.0
_SCRATCH_BYTES = 256 << 10
_SERVERS_BYTES = 16 << 10
"""Of a server's handshake, far above what it takes."""
_FOREVER_S = 3600.0


@dataclass(eq=False, slots=True)
class Order:
    """A copy that is under way."""

    task: Task | None
    """Who is woken when it is over."""
    left: int = 0
    """Pieces that have not come."""
    error: Exception | None = None
    dropped: bool = False

    @property
    def over(self) -> bool:
        return self.dropped or self.error is not None or not self.left


@dataclass(eq=False, slots=True)
class Piece:
    """A question, and where its answer goes."""

    order: Order
    request: bytes
    size: int
    places: Iterator[memoryview]
    check: Callable[[bytes], None] | None = None
    """Compares the checksums that follow, if they were asked for; raises `TransferError`."""
    check_bytes: int = 0
    question: Question | None = None


class Pipes:
    """All connections to one page server, and the line in front of them.  Used by one thread."""

    def __init__(
        self, place: Place, tasks: Tasks, silence_s: float, encryption: Encryption | None = None
    ) -> None:
        """`encryption`: of a place with a fingerprint."""
        self.place = place
        self.encryption = encryption
        self.tasks = tasks
        self.silence_s = silence_s
        self.line: deque[Piece] = deque()
        self._pipes: list[_Pipe] = []
        self._sent_away = 0
        self._sent_away_since = 0.0
        """Connections that were closed before anything was heard, one after the other, and since when."""
        self._idle_since = time.monotonic()

    def __len__(self) -> int:
        return len(self._pipes)

    @property
    def asked(self) -> int:
        """Pieces that were asked for and have not come."""
        return sum(len(pipe.asked) for pipe in self._pipes)

    def take(self, pieces: Iterable[Piece]) -> None:
        """Puts the pieces of a fetch at the end of the line."""
        self.line.extend(pieces)
        self.advance()

    def drop(self, order: Order) -> None:
        """Nothing of this is wanted any more."""
        order.dropped = True
        if any(piece.order is order for piece in self.line):
            self.line = deque(piece for piece in self.line if piece.order is not order)
        for pipe in list(self._pipes):
            if pipe.asked and all(piece.order.over for piece in pipe.asked):
                self._close(pipe)
        self.advance()

    def advance(self) -> None:
        """Lets connections ask for what stands in the line; opens one if that helps."""
        for pipe in self._pipes:
            if not self.line:
                return
            if pipe.window.is_open:
                pipe.wake()
        full = all(not pipe.window.is_open for pipe in self._pipes)
        slow = all(pipe.window.is_slow for pipe in self._pipes)
        if self.line and full and slow and len(self._pipes) < MAX_PIPES:
            self._pipes.append(_Pipe(self))

    def ended(self, pipe: _Pipe, error: Exception) -> None:
        """A connection is no more: what was asked for on it fails."""
        self._pipes.remove(pipe)
        lost = list(pipe.asked)
        if self._comes_again(pipe, error):
            self.line.extendleft(reversed(lost))
            self.line = deque(piece for piece in self.line if not piece.order.over)
            if self.line:
                self._pipes.append(_Pipe(self, _pause_s(self._sent_away)))
            return
        if not self._pipes and not pipe.was_idle:
            lost += self.line
        for piece in lost:
            self.fail(piece.order, error)
        self.line = deque(piece for piece in self.line if not piece.order.over)
        self.advance()

    def _comes_again(self, pipe: _Pipe, error: Exception) -> bool:
        """Whether to connect anew: the server may have made room for others while they come faster than it
        looks at them."""
        sent_away = isinstance(error, (Closed, ConnectionResetError, BrokenPipeError))
        if pipe.heard or pipe.was_idle or not sent_away:
            return False
        if not self._sent_away:
            self._sent_away_since = time.monotonic()
        self._sent_away += 1
        return time.monotonic() - self._sent_away_since < self.silence_s

    def hears(self) -> None:
        """The server has answered."""
        self._sent_away = 0

    def fail(self, order: Order, error: Exception) -> None:
        if not order.over:
            order.error = error
            self._wake(order)

    def came(self, piece: Piece) -> None:
        """All of it is here."""
        order = piece.order
        if not order.over:
            order.left -= 1
            if not order.left:
                self._wake(order)
        self._idle_since = time.monotonic()

    def _wake(self, order: Order) -> None:
        if order.task is not None:
            self.tasks.wake(order.task)

    def tick(self) -> bool:
        """Closes connections that nobody used for a while; returns whether there are any."""
        busy = bool(self.line) or any(pipe.asked for pipe in self._pipes)
        if not busy and time.monotonic() - self._idle_since >= IDLE_S:
            self.close()
        return bool(self._pipes)

    def close(self) -> None:
        for pipe in list(self._pipes):
            self._close(pipe)

    def _close(self, pipe: _Pipe) -> None:
        """Nothing of what was asked for there is wanted by anybody."""
        self._pipes.remove(pipe)
        pipe.close()


class _Pipe:
    """One connection, and the task that asks and reads on it."""

    def __init__(self, owner: Pipes, pause_s: float = 0.0) -> None:
        """`pause_s`: before it connects."""
        self.window = Window()
        self.heard = False
        """The server has answered something on it."""
        self._pause_s = pause_s
        self.asked: deque[Piece] = deque()
        """Pieces that were asked for, in the order in which they come."""
        self._owner = owner
        self._tasks = owner.tasks
        self._silence_s = owner.silence_s
        self.was_idle = False
        """It was there, and nothing was asked for."""
        self._unsent = b""
        self._heard_at = time.monotonic()
        self._scratch: memoryview | None = None
        self._channel: Channel
        self._task = self._tasks.start(self._run(), self._ended)

    def wake(self) -> None:
        self._tasks.wake(self._task)

    def close(self) -> None:
        self._tasks.cancel(self._task)

    def _ended(self, _result: Any, error: Exception | None) -> None:
        self._owner.ended(self, error or Closed())

    def _run(self) -> Step:
        place = self._owner.place
        if self._pause_s:
            until = time.monotonic() + self._pause_s
            while (left := until - time.monotonic()) > 0:
                yield Wait(-1, 0, left)
            if not self._owner.line:  # nobody wants anything any more
                self.was_idle = True
                raise Closed
        connection = yield from connect(place, self._silence_s)
        try:
            self._channel = channel = yield from self._open(connection, place.fingerprint)
            answers = self._answers(channel)
            blocked: Wait | None = next(answers)
            while True:
                full = self._ask(connection)
                if blocked is None:
                    yield None
                else:
                    resumed = yield self._wait(connection, full)
                    if resumed is False and self.asked and self._silent_s() >= self._silence_s:
                        raise TransferError(f"it sent nothing for {self._silence_s:.1f} s")
                blocked = answers.send(True)
        finally:
            connection.close()

    def _open(self, connection: socket.socket, fingerprint: str) -> Step:
        encryption = self._owner.encryption
        if encryption is None:
            return PlainChannel(connection)
        return (yield from encryption.open(connection, fingerprint, _Patience(self._silence_s)))

    def _wait(self, connection: socket.socket, full: bool) -> Wait:
        events = READ | WRITE if full else READ
        left = self._silence_s - self._silent_s() if self.asked else _FOREVER_S
        return Wait(connection.fileno(), events, max(left, 0.0))

    def _silent_s(self) -> float:
        return time.monotonic() - self._heard_at

    def _ask(self, connection: socket.socket) -> bool:
        """Asks for what the window has room for.  Returns whether something could not be sent yet."""
        while True:
            if self._unsent:
                try:
                    self._unsent = self._unsent[connection.send(self._unsent) :]
                except BlockingIOError:
                    return True
                continue
            line = self._owner.line
            if not line:
                return False
            if not self.window.is_open:
                self._owner.advance()  # another connection may help
                return False
            piece = line.popleft()
            if piece.order.over:
                continue
            now = time.monotonic()
            if not self.asked:
                self._heard_at = now
            piece.question = self.window.ask(piece.size, now)
            self.asked.append(piece)
            self._unsent = self._channel.wrapped(piece.request)

    def _answers(self, channel: Channel) -> Step:
        """Reads one answer after the other.  Yields None when others should have a turn, a `Wait` when there
        is nothing to read."""
        while True:
            while not self.asked:
                yield Wait(channel.connection.fileno(), READ, _FOREVER_S)
                if not self.asked and not is_quiet(channel.connection):
                    self.was_idle = True
                    raise Closed
            piece = self.asked[0]
            question = piece.question
            assert question is not None
            header = yield from receive_bytes(channel, ANSWER.size, _FOREVER_S)
            self._hear()
            self.heard = True
            self._owner.hears()
            self.window.begins(question, self._heard_at)
            magic, status, size = ANSWER.unpack(header)
            if magic != MAGIC:
                raise TransferError("it does not answer as a page server")
            if status != OK:
                text = yield from receive_bytes(channel, min(size, MAX_MESSAGE), _FOREVER_S)
                error = TransferError(f"refused: {text.decode(errors='replace')}")
                self._owner.fail(piece.order, error)
            elif size != piece.size:
                raise TransferError(f"it sends {size} bytes instead of {piece.size}")
            else:
                yield from self._fill(channel, piece)
                yield from self._compare(channel, piece)
            self.asked.popleft()
            self.window.ends(question, time.monotonic())
            self._owner.came(piece)
            self._owner.advance()

    def _fill(self, channel: Channel, piece: Piece) -> Step:
        """Receives into the blocks, as long as anybody wants that; the rest is thrown away."""
        vectors = Vectors(piece.places)
        left, turn = piece.size, 0
        while left:
            wanted = not piece.order.over
            try:
                window = vectors.window if wanted else [self._rubbish()[:left]]
                count = channel.receive_into(window)
            except BlockingIOError:
                channel.expect(left)
                yield Wait(channel.connection.fileno(), READ, self._silence_s)
                continue
            if count == 0:
                raise Closed
            self._hear()
            if wanted:
                vectors.advance(count)
            left -= count
            turn += count
            if turn >= TURN_BYTES:
                turn = 0
                yield None
        channel.expect(1)

    def _compare(self, channel: Channel, piece: Piece) -> Step:
        if piece.check is None:
            return
        told = yield from receive_bytes(channel, piece.check_bytes, _FOREVER_S)
        self._hear()
        if not piece.order.over:
            yield None
            try:
                piece.check(told)
            except TransferError as error:
                self._owner.fail(piece.order, error)

    def _hear(self) -> None:
        self._heard_at = time.monotonic()

    def _rubbish(self) -> memoryview:
        if self._scratch is None:
            self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        return self._scratch


def _pause_s(times: int) -> float:
    """After so many connections that came to nothing."""
    return min(0.005 * 2.0 ** min(times, 10), 0.2) * random.uniform(0.5, 1.5)


class _Patience:
    """Of a reader with a server that has not proved who it is (`channel.Budget`)."""

    def __init__(self, seconds: float) -> None:
        self.bytes_left = _SERVERS_BYTES
        self._until = time.monotonic() + seconds

    def seconds_left(self) -> float:
        return max(self._until - time.monotonic(), 0.0)
