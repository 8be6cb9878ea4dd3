"""From token ids to text while they arrive, and stop strings in it.  No I/O, no HTTP, no tokenizer state.

A token is not a piece of text: a character may be spread over several tokens, and some decoders put a
space before a word but not at the start of the text.  Three ways lead from ids to text:

* `ByteDetokenizer`, when each token stands for fixed bytes (byte-level BPE): look the bytes up, feed them to
  an incremental UTF-8 decoder.  Exact, and O(1) per token.
* `FallbackDetokenizer`, when tokens are texts, and some of them single bytes (SentencePiece with byte
  fallback).  Bytes in a row are text only if all of them together are UTF-8; so they wait for the next text.
* `WindowDetokenizer`, for every other decoder: decode a short window of ids before and after the new
  ones, and give the difference.  The window moves on whenever text came out, so the cost per token does
  not grow with the length of the text.

Neither gives U+FFFD for a character that may still be completed; `finish` gives it at the end.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

_REPLACEMENT = "\ufffd"
_MAX_HELD_TOKENS = 16
"""After so many tokens that never ended with a character, what is complete among them is given."""
_MAX_RUN = 256
"""Bytes in a row that wait for each other."""
CONTEXT_TOKENS = 8
"""Prompt tokens that the first generated one is decoded together with."""


class Detokenizer(Protocol):
    """Streaming text of one sequence."""

    def push(self, ids: Sequence[int]) -> str:
        """The text that these further tokens complete; maybe empty."""

    def finish(self) -> str:
        """What was held back; the sequence is over."""


class ByteDetokenizer:
    """For tokenizers whose tokens are bytes.

    `token_bytes(id)` gives a token's bytes, empty for those not to be shown.
    """

    __slots__ = ("_rest", "_token_bytes")

    def __init__(self, token_bytes: Callable[[int], bytes], context: Sequence[int] = ()) -> None:
        self._token_bytes = token_bytes
        self._rest = b""
        """The beginning of a character."""
        self.push(context[-CONTEXT_TOKENS:])

    def push(self, ids: Sequence[int]) -> str:
        if len(ids) == 1:
            data = self._rest + self._token_bytes(ids[0])
            if data.isascii():
                self._rest = b""
                return data.decode("ascii")
            return self._decode(data)
        return self._decode(self._rest + b"".join(map(self._token_bytes, ids)))

    def finish(self) -> str:
        return self._decode(self._rest, True)

    def _decode(self, data: bytes, final: bool = False) -> str:
        text, used = codecs.utf_8_decode(data, "replace", final)
        self._rest = data[used:]
        return text


class FallbackDetokenizer:
    """For tokenizers with byte fallback: what the `tokenizers` library decodes, piece by piece.

    `pieces(id)` gives a token's text ("" for those not to be shown), or the byte that it stands for, an int.
    Bytes in a row that are not UTF-8 as a whole give one U+FFFD each.  `strip_first_space`: the decoder drops
    one space at the start of a text, which is here if there is no context before it.
    """

    __slots__ = ("_broken", "_pieces", "_run", "_strip")

    def __init__(
        self,
        pieces: Callable[[int], str | int],
        context: Sequence[int] = (),
        *,
        strip_first_space: bool = False,
    ) -> None:
        self._pieces = pieces
        self._run = bytearray()
        """The bytes in a row that came last, while they may still be UTF-8."""
        self._broken = False
        """They are not, and every further one is a U+FFFD."""
        self._strip = False
        self.push(context[-CONTEXT_TOKENS:])
        self._take_characters()
        self._strip = strip_first_space and not context

    def push(self, ids: Sequence[int]) -> str:
        pieces = self._pieces
        if len(ids) == 1 and not (self._run or self._broken or self._strip):
            piece = pieces(ids[0])
            if isinstance(piece, str):
                return piece
        given: list[str] = []
        for token in ids:
            piece = pieces(token)
            if isinstance(piece, int):
                given.append(self._byte(piece))
            elif piece:
                given += (self._end_run(), piece)
        return self._stripped("".join(given))

    def finish(self) -> str:
        return self._stripped(self._end_run())

    def _byte(self, value: int) -> str:
        if self._broken:
            return _REPLACEMENT
        self._run.append(value)
        try:
            codecs.utf_8_decode(self._run, "strict", False)
        except UnicodeDecodeError:
            self._broken = True
            return self._lost()
        return self._take_characters() if len(self._run) > _MAX_RUN else ""

    def _end_run(self) -> str:
        self._broken = False
        if not self._run:
            return ""
        try:
            text = self._run.decode()
        except UnicodeDecodeError:
            return self._lost()
        self._run.clear()
        return text

    def _take_characters(self) -> str:
        """Those that are complete in the run, which may be more than is right if it turns out to be none."""
        text, used = codecs.utf_8_decode(self._run, "strict", False)
        del self._run[:used]
        return text

    def _lost(self) -> str:
        text = _REPLACEMENT * len(self._run)
        self._run.clear()
        return text

    def _stripped(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class WindowDetokenizer:
    """For any decoder: `decode(ids)` gives the text of a list of ids, `hidden` are left out of it."""

    __slots__ = ("_decode", "_held", "_hidden", "_ids", "_read", "_seen")

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        context: Sequence[int] = (),
        *,
        hidden: Collection[int] = (),
    ) -> None:
        self._decode = decode
        self._hidden = hidden
        self._ids = [token for token in context[-CONTEXT_TOKENS:] if token not in hidden]
        """The window: what has been given last, then what has not."""
        self._read = len(self._ids)
        """So many ids of the window have been given, as the text `_seen`."""
        self._seen = decode(self._ids) if self._ids else ""
        self._held = 0

    def push(self, ids: Sequence[int]) -> str:
        new = [token for token in ids if token not in self._hidden]
        if not new:
            return ""
        self._ids += new
        self._held += len(new)
        text = self._decode(self._ids)
        if not text.endswith(_REPLACEMENT):
            given = text[len(self._seen) :]
            rest = self._ids[self._read :]
            seen = self._decode(rest)
            if seen:  # else the window would lose what tells a decoder that this is no start of a text
                self._ids, self._seen = rest, seen
            else:
                self._seen = text
            self._read, self._held = len(self._ids), 0
            return given
        if self._held <= _MAX_HELD_TOKENS:
            return ""
        given = _without_tail(text)[len(self._seen) :]
        self._ids = self._ids[-CONTEXT_TOKENS:]
        self._seen = _without_tail(self._decode(self._ids))
        self._read, self._held = len(self._ids), 0
        return given

    def finish(self) -> str:
        return self._decode(self._ids)[len(self._seen) :] if self._ids else ""


def _without_tail(text: str) -> str:
    """Without the U+FFFD at the end that may stand for a character yet to be completed."""
    bare = text.rstrip(_REPLACEMENT)
    return text[: max(len(bare), len(text) - 3)]


class StopTables:
    """The stop strings of a request: what its sequences share.

    `tables[i][k]` is the length of the longest proper suffix of the first k + 1 characters of stop string i
    that is a prefix too.  A table is made as far as a text has matched, so a string that never begins to
    match costs nothing, whatever its length.
    """

    __slots__ = ("firsts", "stops", "tables")

    def __init__(self, stops: Sequence[str]) -> None:
        # Longest first, so that the first match at a character is the longest.
        self.stops = sorted(stops, key=len, reverse=True)
        self.tables: list[list[int]] = [[0] for _ in self.stops]
        self.firsts = frozenset(stop[0] for stop in stops)

    def extend(self, number: int, size: int) -> None:
        """Makes the table of a stop string as long as this."""
        table, stop = self.tables[number], self.stops[number]
        count = table[-1]
        for i in range(len(table), size):
            while count and stop[i] != stop[count]:
                count = table[count - 1]
            count += stop[i] == stop[count]
            table.append(count)


class StopStrings:
    """Finds the first stop string to be completed, however the text is cut into pieces.

    Text that may be the beginning of a stop string is held back until that is decided.  The match is
    defined character by character (the string that is complete first wins; among several complete at
    once the longest), so the result does not depend on the pieces.  Cost: one table step for each
    character and stop string (Knuth, Morris and Pratt's automaton); none for text in which none can begin.
    """

    __slots__ = ("_held", "_include", "_matched", "_shared")

    def __init__(self, shared: StopTables, *, include: bool = False) -> None:
        """`include`: the stop string is part of the text."""
        self._shared = shared
        self._matched = [0] * len(shared.stops)
        """How many characters of each stop string the text so far ends with."""
        self._held = ""
        self._include = include

    def push(self, text: str) -> tuple[str, str | None]:
        """(text to give, the stop string that was found or None).  After a find the rest is dropped."""
        shared, matched = self._shared, self._matched
        if not self._held and shared.firsts.isdisjoint(text):
            return text, None
        stops, tables = shared.stops, shared.tables
        buffer = self._held + text
        for position, character in enumerate(text, len(self._held) + 1):
            for i, stop in enumerate(stops):
                count = matched[i]
                if count > len(tables[i]):
                    shared.extend(i, count)
                while count and stop[count] != character:
                    count = tables[i][count - 1]
                if stop[count] == character:
                    count += 1
                    if count == len(stop):
                        self._held = ""
                        return buffer[: position if self._include else position - count], stop
                matched[i] = count
        cut = len(buffer) - max(matched, default=0)
        self._held = buffer[cut:]
        return buffer[:cut], None

    def skip(self, text: str) -> str:
        """Gives text in which stop strings do not count, and forgets partial matches."""
        given, self._held = self._held + text, ""
        self._matched = [0] * len(self._matched)
        return given

    def finish(self) -> str:
        """What was held back; the text is over."""
        return self.skip("")
