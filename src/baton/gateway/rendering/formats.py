"""OpenAI's response shapes that both endpoints share: log-probabilities, usage, server-sent events."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import msgspec

from baton.gateway.generation.ending import timings_of
from baton.gateway.generation.generation import Generation
from baton.gateway.text.tokenizer import Tokenizer
from baton.protocol.params.sampling import LISTED_LOGPROBS, TokenLogprobs

_LOWEST = -9999.0
"""Instead of minus infinity, which JSON cannot say."""

encode = msgspec.json.encode
_T = TypeVar("_T")

DONE = b"data: [DONE]\n\n"
NO_USAGE = b',"usage":null'
"""Of a chunk, where the counts come at the end."""


Part = tuple[int, bytes]
"""Of an answer, and how much work it was: one for each name of a token that was looked up."""
TURN = 256
"""Work between two looks at other requests: about a millisecond."""


async def in_turns(parts: Iterable[Part]) -> bytes:
    """All of it.  Whenever it was much work, others have a turn."""
    pieces: list[bytes] = []
    work = 0
    for weight, data in parts:
        pieces.append(data)
        work += weight
        if work >= TURN:
            work = 0
            await asyncio.sleep(0)
    return b"".join(pieces)


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def usage(generation: Generation) -> dict[str, Any]:
    """Token counts so far."""
    counts = _usage(generation.num_prompt, generation.num_generated, generation.num_cached)
    if generation.has_reasoning:
        counts["completion_tokens_details"] = {"reasoning_tokens": generation.num_reasoning}
    return counts


def _usage(prompt: int, generated: int, cached: int | None) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + generated,
        "completion_tokens": generated,
        "prompt_tokens_details": None if cached is None else {"cached_tokens": cached},
    }


def timings_member(generation: Generation, wanted: bool) -> bytes:
    """The last member of an answer, with its leading comma; empty if it is not wanted."""
    return b',"timings":' + encode(timings_of(generation)) if wanted else b""


@dataclass(slots=True)
class StreamUsage:
    """`stream_options`: where a stream tells its token counts, and at its end where its time went.

    With `continuous` each chunk tells the tokens of the chunks up to itself, of all choices together; the
    renderer says what each chunk brings (`add`).
    """

    generation: Generation
    head: dict[str, Any]
    """What every chunk begins with."""
    include: bool
    continuous: bool
    timings: bool
    _prompt: int = 0
    _generated: int = 0

    def __post_init__(self) -> None:
        self._prompt = self.generation.num_prompt if self.continuous else 0

    def add(self, tokens: int) -> None:
        """The chunk that is rendered now brings so many."""
        self._generated += tokens

    @property
    def changes(self) -> bool:
        """Each chunk has another count."""
        return self.continuous

    def in_chunk(self) -> bytes:
        """The member of a chunk with choices, with its leading comma; empty if usage is not wanted."""
        if self.continuous:
            return b',"usage":' + encode(_usage(self._prompt, self._generated, self.generation.num_cached))
        return NO_USAGE if self.include else b""

    def at_end(self) -> bytes:
        """The event after all choices have ended; empty if neither usage nor timings are wanted."""
        if not (self.include or self.timings):
            return b""
        last = {**self.head, "choices": []} | ({"usage": usage(self.generation)} if self.include else {})
        return event(encode(last)[:-1] + timings_member(self.generation, self.timings) + b"}")


@dataclass(slots=True, frozen=True)
class TokenNames:
    """How tokens are named in log-probabilities."""

    tokenizer: Tokenizer
    as_ids: bool
    """'token_id:17' instead of the text, which may be a part of a character."""

    def __call__(self, token: int) -> str:
        return f"token_id:{token}" if self.as_ids else self.tokenizer.token_text(token)


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LOWEST


class CompletionLogprobs:
    """The `logprobs` object of /v1/completions, as JSON: four aligned lists, which grow slice by slice."""

    __slots__ = ("_names", "_num_top", "_offsets", "_tokens", "_tops", "_values")

    def __init__(self, names: TokenNames, num_top: int) -> None:
        """With at most `num_top` alternatives each."""
        self._names = names
        self._num_top = num_top
        self._tokens: list[bytes] = []
        self._values: list[bytes] = []
        self._tops: list[bytes] = []
        self._offsets: list[bytes] = []

    def add(
        self, items: Iterable[tuple[int, TokenLogprobs | None]], offsets: Iterator[int]
    ) -> Iterator[Part]:
        """Takes (token, its log-probabilities) pairs: empty parts, for the work."""
        if self._num_top > LISTED_LOGPROBS:
            yield from self._take_many(items, offsets)
            return
        pairs, size = iter(items), slice_size(self._num_top)
        while some := list(islice(pairs, size)):
            self._take(some, list(islice(offsets, len(some))))
            yield len(some) * (self._num_top + 1), b""

    def encoded(self) -> bytes:
        return b"".join(
            (
                b'{"tokens":[',
                b",".join(self._tokens),
                b'],"token_logprobs":[',
                b",".join(self._values),
                b'],"top_logprobs":[',
                b",".join(self._tops),
                b'],"text_offset":[',
                b",".join(self._offsets),
                b"]}",
            )
        )

    def _take_many(
        self, items: Iterable[tuple[int, TokenLogprobs | None]], offsets: Iterator[int]
    ) -> Iterator[Part]:
        for token, logprobs in items:
            name = self._names(token)
            self._tokens.append(encode(name))
            self._values.append(encode(None if logprobs is None else finite(logprobs.logprob)))
            self._offsets.append(encode(next(offsets)))
            if logprobs is None:
                self._tops.append(b"null")
                yield 1, b""
                continue
            pieces: list[bytes] = []
            yield from _by_name_of_many(logprobs, self._names, self._num_top, name, pieces)
            self._tops.append(b"".join(pieces))

    def _take(self, items: list[tuple[int, TokenLogprobs | None]], offsets: list[int]) -> None:
        names, num_top = self._names, self._num_top
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        for token, logprobs in items:
            name = names(token)
            tokens.append(name)
            if logprobs is None:
                values.append(None)
                tops.append(None)
                continue
            values.append(finite(logprobs.logprob))
            top: dict[str, float] = {}
            for other, value in logprobs.top[:num_top]:
                top.setdefault(names(other), finite(value))
            top.setdefault(name, finite(logprobs.logprob))
            tops.append(top)
        self._tokens.append(encode(tokens)[1:-1])
        self._values.append(encode(values)[1:-1])
        self._tops.append(encode(tops)[1:-1])
        self._offsets.append(encode(offsets)[1:-1])


def slice_size(num_top: int) -> int:
    """Positions of log-probabilities that are a turn's work."""
    return max(1, TURN // (num_top + 1))


def chat_logprobs(items: Sequence[TokenLogprobs], names: TokenNames, num_top: int) -> Iterator[Part]:
    """The `logprobs` object of /v1/chat/completions, as JSON."""

    yield 0, b'{"content":'
    if num_top > LISTED_LOGPROBS:
        yield from _many(items, lambda item: _entry_of_many(item, names, num_top))
    else:
        yield from _listed(
            (num_top + 1, [logprobs_entry(item, names, num_top) for item in some])
            for some in _slices(items, num_top)
        )
    yield 0, b',"refusal":null}'


def _entry(token: int, logprob: float, names: TokenNames) -> dict[str, Any]:
    data = names.tokenizer.token_bytes(token)
    return {"token": names(token), "logprob": finite(logprob), "bytes": list(data)}


def logprobs_entry(item: TokenLogprobs, names: TokenNames, num_top: int) -> dict[str, Any]:
    """Of one token, in chats and responses."""
    tops = [_entry(token, logprob, names) for token, logprob in item.top[:num_top]]
    return {**_entry(item.token, item.logprob, names), "top_logprobs": tops}


def prompt_logprobs(items: Sequence[TokenLogprobs | None], names: TokenNames, num_top: int) -> Iterator[Part]:
    """vLLM's extension, as JSON: for each prompt token after the first, by id, `num_top` and the token
    itself."""

    def full(item: TokenLogprobs | None) -> dict[str, dict[str, Any]] | None:
        if item is None:
            return None
        entries = _by_id(item, names, 0, num_top)
        entries[str(item.token)] = _ranked(item.token, item.logprob, item.rank, names)
        return entries

    if num_top > LISTED_LOGPROBS:
        yield from _many(items, lambda item: _by_id_of_many(item, names, num_top))
        return
    yield from _listed((num_top + 1, [full(item) for item in some]) for some in _slices(items, num_top))


def _ranked(token: int, logprob: float, rank: int, names: TokenNames) -> dict[str, Any]:
    return {
        "logprob": finite(logprob),
        "rank": rank,
        "decoded_token": names.tokenizer.token_text(token),
    }


def _by_id(item: TokenLogprobs, names: TokenNames, first: int, stop: int) -> dict[str, dict[str, Any]]:
    return {
        str(token): _ranked(token, logprob, item.rank if token == item.token else rank, names)
        for rank, (token, logprob) in enumerate(item.best(first, stop), first + 1)
    }


# -- of more tokens than a turn's work: an entry is written in pieces


def _many(
    items: Sequence[TokenLogprobs | None], entry: Callable[[TokenLogprobs], Iterator[Part]]
) -> Iterator[Part]:
    """One JSON list."""
    yield 0, b"["
    for number, item in enumerate(items):
        if number:
            yield 0, b","
        if item is None:
            yield 1, b"null"
        else:
            yield from entry(item)
    yield 0, b"]"


def _ranges(item: TokenLogprobs, num_top: int) -> Iterator[tuple[int, int]]:
    end = min(item.count, num_top)
    return ((first, min(first + TURN, end)) for first in range(0, end, TURN))


def _entry_of_many(item: TokenLogprobs, names: TokenNames, num_top: int) -> Iterator[Part]:
    yield 1, encode(_entry(item.token, item.logprob, names))[:-1] + b',"top_logprobs":['
    for first, stop in _ranges(item, num_top):
        tops = [_entry(token, logprob, names) for token, logprob in item.best(first, stop)]
        yield len(tops), (b"," if first else b"") + encode(tops)[1:-1]
    yield 0, b"]}"


def _by_id_of_many(item: TokenLogprobs, names: TokenNames, num_top: int) -> Iterator[Part]:
    opening, itself = b"{", False
    for first, stop in _ranges(item, num_top):
        entries = _by_id(item, names, first, stop)
        itself = itself or str(item.token) in entries
        yield len(entries), opening + encode(entries)[1:-1]
        opening = b","
    if not itself:
        own = {str(item.token): _ranked(item.token, item.logprob, item.rank, names)}
        yield 1, opening + encode(own)[1:-1]
        opening = b","
    yield 0, b"}" if opening == b"," else b"{}"


def _by_name_of_many(
    item: TokenLogprobs, names: TokenNames, num_top: int, name: str, into: list[bytes]
) -> Iterator[Part]:
    """As JSON into the list; empty parts, for the work."""
    given: set[str] = set()
    for first, stop in _ranges(item, num_top):
        top: dict[str, float] = {}
        for other, value in item.best(first, stop):
            called = names(other)
            if called not in given:
                given.add(called)
                top[called] = finite(value)
        into.append((b"," if len(given) > len(top) else b"{") + encode(top)[1:-1] if top else b"")
        yield stop - first, b""
    if name not in given:
        into.append((b"," if given else b"{") + encode({name: finite(item.logprob)})[1:-1])
    into.append(b"}")


def _slices(items: Sequence[_T], num_top: int) -> Iterator[Sequence[_T]]:
    size = slice_size(num_top)
    return (items[first : first + size] for first in range(0, len(items), size))


def _listed(slices: Iterable[tuple[int, list[Any]]]) -> Iterator[Part]:
    """One JSON list of what is in all of them; with each comes the work for one item."""
    opening = b"["
    for weight, some in slices:
        yield weight * len(some), opening + encode(some)[1:-1]
        opening = b","
    yield 0, b"[]" if opening == b"[" else b"]"
