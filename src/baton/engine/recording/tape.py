"""Recordings on disk: frames in segments, written by a thread so that no disk ever holds the engine up.

Layout.  A recording is a directory of segments `000001.tape`, `000002.tape`, …; each begins with `MAGIC`,
which holds the version of the format.  Then follow frames:

    4 bytes length | 4 bytes crc32 of the content | content

both numbers little-endian.  What a frame contains is not this file's business (`recorder.py`: MessagePack).
A frame never spans two segments.

Writing.  `TapeWriter.write` appends to a list in memory and returns.  The thread sleeps until there is
something, waits up to `WINDOW_S` for more (or until `CHUNK_BYTES` are there), and writes all of it: so a
killed process loses about a second at most, and an idle one is never woken.  If the disk is full, or so slow
that `BACKLOG_BYTES` wait, the writer *stops*: `write` returns False from then on, what is on disk ends with a
whole frame, and one line in the log says why.  The thread's end is never silent: it is either asked for by
`close`, or logged.

Reading.  The last segment may end in the middle of a frame, as it does when a process is killed; that is told
by `TapeReader.cut_off`.  Anything else that does not fit is `DamagedRecording`, with the place.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger(__name__)

VERSION = 2
MAGIC = b"BATONTAPE" + bytes([VERSION]) + b"\r\n"
"""The line end tells a file that was mangled as text."""
SUFFIX = ".tape"
SEGMENT_BYTES = 64 << 20
CHUNK_BYTES = 1 << 20
BACKLOG_BYTES = 64 << 20
MAX_FRAME_BYTES = 256 << 20
WINDOW_S = 0.5
CLOSE_DEADLINE_S = 5.0
_HEAD = struct.Struct("<II")


class DamagedRecording(ValueError):
    """A file that is no recording of this version, or was changed; the message names file and place."""


def segment(directory: Path, number: int) -> Path:
    """The path of segment `number`, from 1."""
    return directory / f"{number:06}{SUFFIX}"


class TapeWriter:
    """Writes the frames of one recording into `directory`, which must exist and hold no segment.

    Raises `OSError` if the first segment cannot be made.
    """

    def __init__(self, directory: Path, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.directory = directory
        self.stopped = False
        """Nothing is written any more: closed, or failed (and logged)."""
        self._segment_bytes = segment_bytes
        self._frames: list[bytes] = []
        self._waiting = 0
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._hurry = threading.Event()
        self._closing = False
        self._number = 1
        self._file = self._open()
        self._size = len(MAGIC)
        self._thread = threading.Thread(target=self._run, name="recording", daemon=True)
        self._thread.start()

    def write(self, content: bytes) -> bool:
        """Appends a frame; returns at once.  False: the writer has stopped."""
        if self.stopped:
            return False
        head = _HEAD.pack(len(content), zlib.crc32(content))
        with self._lock:
            self._frames.append(head)
            self._frames.append(content)
            before = self._waiting
            self._waiting = waiting = before + len(content) + _HEAD.size
        if not before:
            self._news.set()
        if waiting > CHUNK_BYTES:
            self._hurry.set()
            if waiting > BACKLOG_BYTES:
                self._stop(f"the disk is too slow: {waiting >> 20} MiB wait to be written")
                return False
        return True

    def close(self) -> bool:
        """Writes what is left, for `CLOSE_DEADLINE_S` at most.  Returns whether all of it was written."""
        self._closing = True
        self._hurry.set()
        self._news.set()
        self._thread.join(CLOSE_DEADLINE_S)
        if self._thread.is_alive():
            self._stop(f"what was left could not be written within {CLOSE_DEADLINE_S:g} s")
            return False
        complete = not self.stopped
        self.stopped = True
        return complete

    # -- the thread

    def _run(self) -> None:
        try:
            while not self.stopped:
                if not self._closing:
                    self._news.wait()  # until `write` or `close`: there is nothing to do before
                    self._hurry.wait(WINDOW_S)
                closing = self._closing
                self._write_all(self._take())
                if closing:
                    break
        except OSError as error:
            self._stop(f"cannot write to {self.directory}: {error.strerror or error}")
        except Exception:
            self.stopped = True
            log.exception("recording stops: a defect")
        finally:
            os.close(self._file)

    def _take(self) -> list[bytes]:
        with self._lock:
            frames, self._frames = self._frames, []
            self._waiting = 0
            self._news.clear()
            self._hurry.clear()
        return frames

    def _write_all(self, frames: list[bytes]) -> None:
        """Heads and contents in turn."""
        part: list[bytes] = []
        size = 0
        for index in range(0, len(frames), 2):
            length = len(frames[index]) + len(frames[index + 1])
            if self._size + size + length > self._segment_bytes and self._size + size > len(MAGIC):
                self._append(b"".join(part))
                part, size = [], 0
                self._next_segment()
            part += frames[index : index + 2]
            size += length
        self._append(b"".join(part))

    def _append(self, data: bytes) -> None:
        """All of it or nothing.  Raises `OSError`."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(data)

    def _next_segment(self) -> None:
        self._number += 1
        following = self._open()
        os.close(self._file)
        self._file, self._size = following, len(MAGIC)

    def _open(self) -> int:
        path = segment(self.directory, self._number)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_APPEND, 0o600)
        try:
            os.write(file, MAGIC)
        except OSError:
            os.close(file)
            raise
        return file

    def _stop(self, reason: str) -> None:
        if not self.stopped:
            self.stopped = True
            self._news.set()
            self._hurry.set()
            log.error("recording stops: %s", reason)


class TapeReader:
    """Reads the frames of a recording.  Raises `DamagedRecording` if there is none."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.cut_off = 0
        """Bytes of an unfinished frame at the end; known when all frames were read."""
        numbers = sorted(int(path.stem) for path in directory.glob(f"*{SUFFIX}") if path.stem.isdigit())
        if not numbers:
            raise DamagedRecording(f"{directory}: there is no recording (no *{SUFFIX})")
        for expected, number in enumerate(numbers, start=1):
            if number != expected:
                raise DamagedRecording(
                    f"{segment(directory, expected)}: this segment is missing; a replay needs all of them"
                )
        self._last = len(numbers)

    def __iter__(self) -> Iterator[bytes]:
        """The contents in order.  Raises `DamagedRecording`."""
        for number in range(1, self._last + 1):
            yield from self._read(segment(self.directory, number), number == self._last)

    def _read(self, path: Path, last: bool) -> Iterator[bytes]:
        size = path.stat().st_size
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
            if len(magic) < len(MAGIC) and MAGIC.startswith(magic) and last:
                self.cut_off = len(magic)
                return
            if magic != MAGIC:
                raise DamagedRecording(_describe_magic(path, magic))
            place = len(MAGIC)
            while place < size:
                head = file.read(_HEAD.size)
                length, crc = _HEAD.unpack(head) if len(head) == _HEAD.size else (size, 0)
                following = place + _HEAD.size + length
                if following > size:
                    if last and (len(head) < _HEAD.size or length <= MAX_FRAME_BYTES):
                        self.cut_off = size - place
                        return
                    raise DamagedRecording(f"{path}, byte {place}: a frame goes beyond the end of the file")
                content = file.read(length)
                if zlib.crc32(content) != crc:
                    raise DamagedRecording(f"{path}, byte {place}: the checksum of a frame is wrong")
                yield content
                place = following


def _describe_magic(path: Path, magic: bytes) -> str:
    name = MAGIC[:9]
    if magic[:9] == name and len(magic) == len(MAGIC) and magic[10:] == MAGIC[10:]:
        return f"{path}: the format has version {magic[9]}, this Baton reads version {VERSION}"
    return f"{path}: this is no recording of Baton"
