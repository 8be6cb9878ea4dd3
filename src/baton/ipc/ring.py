"""A broadcast ring: one writer, N readers, byte records in shared memory, in order, none lost.

Theory.  Positions count bytes since the beginning and never wrap; `position % capacity` is the place.
One word says how far the writer has *published*, one word per reader how far it has read (its *cursor*).
Space is free when every reader has passed it, so a slow reader keeps space occupied but never blocks the
writer, which has a queue of its own: `append` always succeeds at once, and `flush` moves what fits.

A record is cut into fragments of at most a quarter of the ring.  A fragment is one header word and its
bytes, padded to a multiple of 8:

    bits 0-30 length | bit 31 more fragments follow | bits 32-63 crc32, seeded by the fragment's number

The position is published after the bytes, so a writer that dies in between leaves nothing visible.  Python
has no memory fences: on a CPU with weak ordering a reader could see the new position before the bytes.
Then the checksum is wrong, and the reader takes the fragment as *not there yet* and looks again, until a
deadline makes it `RingCorrupted`.  The seed tells a fragment from the one that lay there a lap ago.  Readers
copy the bytes out and check the copy before they move their cursor.

Waking.  The writer rings its readers' doorbells after every publishing, unless its caller says that a record
need not wake anybody (`ring=False`): that one is read with the next one that does, or when the reader looks
for another reason, and the caller makes sure that one of these happens.  A writer that runs out of space
sets the `waiting` word, and a reader that frees space while it is set rings the writer.  Two CPUs may each
miss the other's store there, so the owner of a writer also calls `flush` again after a few milliseconds, but
only while `pending` is true.
"""

from __future__ import annotations

import os
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from baton.ipc.doorbell import Doorbell
from baton.ipc.memory import SharedMemory, create_memory

MIN_CAPACITY = 64
RETRY_S = 0.005
"""While `RingWriter.pending`: flush again at least so often."""

_MAGIC = 0x4241544F4E524731
_CACHE_LINE = 8
"""Words.  What different processes write lies in different cache lines."""
_MAGIC_WORD, _CAPACITY_WORD, _READERS_WORD = 0, 1, 2
PUBLISHED_WORD = 1 * _CACHE_LINE
_WAITING_WORD = 2 * _CACHE_LINE
_CURSOR_WORD = 3 * _CACHE_LINE
_HEADER = 8
_MORE = 1 << 31
_LENGTH = _MORE - 1


class RingCorrupted(RuntimeError):
    """A published fragment did not become readable in time: another process wrote into the ring."""


def create_ring(capacity: int, readers: int) -> int:
    """Makes a ring for records in `capacity` bytes (rounded up to 64) and returns its memfd."""
    if capacity < 1 or readers < 1:
        raise ValueError(f"a ring needs room and readers, not {capacity} bytes and {readers} readers")
    capacity = -(-capacity // MIN_CAPACITY) * MIN_CAPACITY
    fd = create_memory("baton-ring", _data_start(readers) + capacity)
    memory = SharedMemory(fd)
    memory.words[_CAPACITY_WORD] = capacity
    memory.words[_READERS_WORD] = readers
    memory.words[_MAGIC_WORD] = _MAGIC
    memory.close()
    return fd


def _data_start(readers: int) -> int:
    return 8 * (_CURSOR_WORD + _CACHE_LINE * readers)


class _Ring:
    """What both ends know: where things lie."""

    def __init__(self, fd: int) -> None:
        if os.fstat(fd).st_size < _data_start(1):
            raise ValueError(f"descriptor {fd} is not a ring")
        self._memory = SharedMemory(fd)
        self.words = self._memory.words
        if self.words[_MAGIC_WORD] != _MAGIC:
            self._memory.close()
            raise ValueError(f"descriptor {fd} is not a ring")
        self.capacity: int = self.words[_CAPACITY_WORD]
        self.readers: int = self.words[_READERS_WORD]
        self._data_word = _data_start(self.readers) // 8
        self._data = self._memory.bytes[_data_start(self.readers) :]
        self._max_fragment = self.capacity // 4 - _HEADER

    def close(self) -> None:
        """Unmaps the memory; safe to call twice.  The descriptor stays the caller's."""
        self._data.release()
        self._memory.close()


class RingWriter(_Ring):
    """The one writer of a ring.

    `doorbells` are those of the readers that sleep on this ring.
    """

    def __init__(self, fd: int, doorbells: Sequence[Doorbell] = ()) -> None:
        super().__init__(fd)
        if self.words[PUBLISHED_WORD] != 0:
            raise ValueError("this ring has had a writer already; make a new ring")
        self._doorbells = tuple(doorbells)
        self._cursor_words = [_CURSOR_WORD + _CACHE_LINE * i for i in range(self.readers)]
        self._queue: deque[bytes] = deque()
        self._offset = 0  # of the queue's first record, what is in the ring already
        self._position = 0
        self._fragments = 0
        self._limit = self.capacity  # a position that may be written up to, as last computed
        self.bytes_queued = 0

    @property
    def pending(self) -> bool:
        """Something waits for space: call `flush` when rung, and again after `RETRY_S` at most."""
        return bool(self._queue)

    def append(self, record: bytes) -> None:
        """Queues a record of any size.  Never blocks, never drops; `flush` makes it visible."""
        self._queue.append(record)
        self.bytes_queued += len(record)

    def flush(self, ring: bool = True) -> bool:
        """Moves the queue into the ring as far as there is space, publishes and rings.

        Returns whether all of it went.  Never blocks.  `ring` False: rings only if something has to wait.
        """
        before = self._position
        while self._queue and self._write_first():
            pass
        if self._position != before:
            self.words[PUBLISHED_WORD] = self._position
        if self._queue or (ring and self._position != before):
            self.ring()
        if not self._queue:
            if self.words[_WAITING_WORD]:
                self.words[_WAITING_WORD] = 0
            return True
        if not self.words[_WAITING_WORD]:
            self.words[_WAITING_WORD] = 1
            return self.flush()  # a reader may have freed space before it could see the word
        return False

    def write(self, record: bytes, ring: bool = True) -> bool:
        """`append` and `flush`."""
        self.append(record)
        return self.flush(ring)

    def ring(self) -> None:
        """Wakes the readers, for what was published without."""
        for doorbell in self._doorbells:
            doorbell.ring()

    def _write_first(self) -> bool:
        """Writes the next fragment of the first queued record.  False: no space for it."""
        record = self._queue[0]
        length = min(len(record) - self._offset, self._max_fragment)
        end = self._offset + length
        size = _HEADER + (length + 7 & ~7)
        if self._position + size > self._limit:
            slowest = min((self.words[word] for word in self._cursor_words), default=self._position)
            self._limit = slowest + self.capacity
            if self._position + size > self._limit:
                return False
        more = end < len(record)
        self._write_fragment(record if length == len(record) else record[self._offset : end], more)
        self._position += size
        self._fragments += 1
        self.bytes_queued -= length
        if more:
            self._offset = end
        else:
            self._offset = 0
            self._queue.popleft()
        return True

    def _write_fragment(self, data: bytes, more: bool) -> None:
        """Puts one fragment at the current position, unpublished."""
        length = len(data)
        place = self._position % self.capacity
        start = place + _HEADER
        first = min(length, max(self.capacity - start, 0))
        if first:
            self._data[start : start + first] = data[:first]
        if first < length:
            rest = start + first - self.capacity
            self._data[rest : rest + length - first] = data[first:]
        word = length | (_MORE if more else 0)
        self.words[self._data_word + (place >> 3)] = word | _checksum(data, word, self._fragments) << 32


class RingReader(_Ring):
    """Reader number `index` of a ring: it gets every record, in order, at its own pace.

    `writer_doorbell` is rung when this reader frees space that the writer waits for.  One process, one
    life: a reader cannot take over another one's cursor.
    """

    def __init__(
        self,
        fd: int,
        index: int,
        writer_doorbell: Doorbell | None = None,
        *,
        deadline_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(fd)
        if not 0 <= index < self.readers:
            self.close()
            raise ValueError(f"reader {index} of a ring with {self.readers} readers")
        self._cursor_word = _CURSOR_WORD + _CACHE_LINE * index
        if self.words[self._cursor_word] != 0:
            self.close()
            raise ValueError(f"reader {index} of this ring has been used already; make a new ring")
        self._writer_doorbell = writer_doorbell
        self._deadline_s = deadline_s
        self._clock = clock
        self._torn_since: float | None = None
        self._fragments = 0
        self._parts: list[bytes] = []
        self.cursor = 0
        """How far this reader has read.  `reader.words[PUBLISHED_WORD] != reader.cursor` is `has_news`
        for a loop that cannot afford the call."""

    def has_news(self) -> bool:
        """Whether the writer has published more than was read.  One load and one compare."""
        return self.words[PUBLISHED_WORD] != self.cursor

    @property
    def partial(self) -> bool:
        """The beginning of a record was read and the rest of it is not published yet."""
        return bool(self._parts)

    def read(self) -> bytes | None:
        """The next record, or None if there is none that is complete (yet).

        None while `has_news()` says that bytes are published but not visible yet: look again soon.  Raises
        `RingCorrupted` if that lasts longer than the deadline.
        """
        record: bytes | None = None
        start = self.cursor
        while record is None and (published := self.words[PUBLISHED_WORD]) != self.cursor:
            fragment = self._read_fragment(published - self.cursor)
            if fragment is None:
                break
            data, more = fragment
            if more:
                self._parts.append(data)
            elif self._parts:
                self._parts.append(data)
                record = b"".join(self._parts)
                self._parts.clear()
            else:
                record = data
        if self.cursor != start and self.words[_WAITING_WORD] and self._writer_doorbell is not None:
            self._writer_doorbell.ring()
        return record

    def records(self) -> Iterator[bytes]:
        """All records that are complete now or become so while iterating."""
        while (record := self.read()) is not None:
            yield record

    def _read_fragment(self, available: int) -> tuple[bytes, bool] | None:
        """Copies one fragment out, checks the copy and frees its space.  None: not visible yet."""
        place = self.cursor % self.capacity
        header = self.words[self._data_word + (place >> 3)]
        word = header & 0xFFFFFFFF
        length = word & _LENGTH
        size = _HEADER + (length + 7 & ~7)
        if size > available:
            self._torn()
            return None
        start = place + _HEADER
        first = min(length, max(self.capacity - start, 0))
        data = bytes(self._data[start : start + first])
        if first < length:
            rest = start + first - self.capacity
            data += bytes(self._data[rest : rest + length - first])
        if _checksum(data, word, self._fragments) != header >> 32:
            self._torn()
            return None
        self._torn_since = None
        self._fragments += 1
        self.cursor += size
        self.words[self._cursor_word] = self.cursor
        return data, bool(word & _MORE)

    def _torn(self) -> None:
        """Notes that the next fragment is not visible yet; raises if that lasts too long."""
        now = self._clock()
        if self._torn_since is None:
            self._torn_since = now
        elif now - self._torn_since > self._deadline_s:
            raise RingCorrupted(
                f"fragment {self._fragments} at position {self.cursor} did not match its checksum for "
                f"{now - self._torn_since:.1f} s; the ring's memory was overwritten"
            )


def _checksum(data: bytes, word: int, number: int) -> int:
    """crc32 over the data, seeded with the fragment's number, its length and whether more follows."""
    return zlib.crc32(data, (number * 0x9E3779B1 ^ word * 0x85EBCA6B) & 0xFFFFFFFF)
