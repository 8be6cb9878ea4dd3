"""OpenAI's response shapes that both endpoints share: log-probabilities, usage, server-sent events."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from baton.gateway.generation import Generation
from baton.gateway.tokenizer import Tokenizer
from baton.protocol.sampling import TokenLogprobs

_LOWEST = -9999.0
"""Instead of minus infinity, which JSON cannot say."""

encode = msgspec.json.encode

DONE = b"data: [DONE]\n\n"
NO_USAGE = b',"usage":null'
"""Of a chunk, where the counts come at the end."""


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def usage(generation: Generation) -> dict[str, Any]:
    """Token counts so far."""
    return _usage(generation.num_prompt, generation.num_generated, generation.num_cached)


def _usage(prompt: int, generated: int, cached: int | None) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + generated,
        "completion_tokens": generated,
        "prompt_tokens_details": None if cached is None else {"cached_tokens": cached},
    }


@dataclass(slots=True)
class StreamUsage:
    """`stream_options`: where a stream tells its token counts.

    With `continuous` each chunk tells the tokens of the chunks up to itself, of all choices together; the
    renderer says what each chunk brings (`add`).
    """

    generation: Generation
    head: dict[str, Any]
    """What every chunk begins with."""
    include: bool
    continuous: bool
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
        """The event after all choices have ended; empty if usage is not wanted."""
        if not self.include:
            return b""
        return event(encode({**self.head, "choices": [], "usage": usage(self.generation)}))


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


class TextOffsets:
    """Where in a choice's text each token begins, in characters: `text_offset` of /v1/completions.

    A token begins where the text of those before it ends, so one that completes no character, or is not
    shown, takes no room.  One for each choice; it is told all tokens, in order.
    """

    __slots__ = ("_detokenizer", "_given", "_length")

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], *, skip_special_tokens: bool) -> None:
        """`prompt`: what comes before the generated tokens."""
        self._detokenizer = tokenizer.detokenizer(prompt, skip_special_tokens=skip_special_tokens)
        self._length = 0
        """Of the text that the tokens so far stand for."""
        self._given = 0
        """Of the text that the client has: less while a stop string may be coming, or after one."""

    def prompt(self, ids: Sequence[int], text: str, tokenizer: Tokenizer) -> list[int]:
        """Those of an echoed prompt, whose text may lack special tokens (a BOS that the tokenizer added)."""
        detokenizer = tokenizer.detokenizer(skip_special_tokens=False)
        offsets: list[int] = []
        offset, end = 0, len(text)
        for token in ids:
            offsets.append(min(offset, end))
            if token in tokenizer.special_ids and not text.startswith(tokenizer.token_text(token), offset):
                continue
            offset += len(detokenizer.push((token,)))
        self._length = end
        return offsets

    def generated(self, ids: Sequence[int], text: str, *, ended: bool) -> list[int]:
        """`text`: what the client gets with these tokens, an echoed prompt included."""
        offsets: list[int] = []
        self._given += len(text)
        for token in ids:
            offsets.append(min(self._length, self._given) if ended else self._length)
            self._length += len(self._detokenizer.push((token,)))
        return offsets


@dataclass(slots=True)
class CompletionLogprobs:
    """The `logprobs` object of /v1/completions: four aligned lists."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def add(
        self,
        items: Iterable[tuple[int, TokenLogprobs | None]],
        names: TokenNames,
        offsets: Iterable[int],
        num_top: int,
    ) -> None:
        """Appends (token, its log-probabilities) pairs, with at most `num_top` alternatives each."""
        self.text_offset += offsets
        for token, logprobs in items:
            name = names(token)
            self.tokens.append(name)
            if logprobs is None:
                self.token_logprobs.append(None)
                self.top_logprobs.append(None)
                continue
            self.token_logprobs.append(finite(logprobs.logprob))
            top: dict[str, float] = {}
            for other, value in logprobs.top[:num_top]:
                top.setdefault(names(other), finite(value))
            top.setdefault(name, finite(logprobs.logprob))
            self.top_logprobs.append(top)


def chat_logprobs(
    items: Sequence[TokenLogprobs], names: TokenNames, num_top: int
) -> dict[str, list[dict[str, Any]] | None]:
    """The `logprobs` object of /v1/chat/completions."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = names.tokenizer.token_bytes(token)
        return {"token": names(token), "logprob": finite(logprob), "bytes": list(data)}

    content = [
        {
            **entry(item.token, item.logprob),
            "top_logprobs": [entry(token, logprob) for token, logprob in item.top[:num_top]],
        }
        for item in items
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(
    items: Sequence[TokenLogprobs | None], names: TokenNames, num_top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's extension: for each prompt token after the first, by id, `num_top` and the token itself."""
    result: list[dict[str, dict[str, Any]] | None] = []
    for item in items:
        if item is None:
            result.append(None)
            continue
        entries = {
            str(token): {
                "logprob": finite(logprob),
                "rank": rank,
                "decoded_token": names.tokenizer.token_text(token),
            }
            for rank, (token, logprob) in enumerate(item.top[:num_top], 1)
        }
        entries[str(item.token)] = {
            "logprob": finite(item.logprob),
            "rank": item.rank,
            "decoded_token": names.tokenizer.token_text(item.token),
        }
        result.append(entries)
    return result
