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
    prompt, generated, cached = generation.num_prompt, generation.num_generated, generation.num_cached
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + generated,
        "completion_tokens": generated,
        "prompt_tokens_details": None if cached is None else {"cached_tokens": cached},
    }


@dataclass(slots=True, frozen=True)
class StreamUsage:
    """`stream_options`: where a stream tells its token counts."""

    generation: Generation
    head: dict[str, Any]
    """What every chunk begins with."""
    include: bool
    continuous: bool

    @property
    def changes(self) -> bool:
        """Each chunk has another count."""
        return self.continuous

    def in_chunk(self) -> bytes:
        """The member of a chunk with choices, with its leading comma; empty if usage is not wanted."""
        if self.continuous:
            return b',"usage":' + encode(usage(self.generation))
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


@dataclass(slots=True)
class CompletionLogprobs:
    """The `logprobs` object of /v1/completions: four aligned lists."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def add(self, items: Iterable[tuple[int, TokenLogprobs | None]], names: TokenNames, offset: int) -> int:
        """Appends (token, its log-probabilities) pairs; returns the offset after them.

        Offsets count characters of the choice's text.
        """
        for token, logprobs in items:
            name = names(token)
            self.tokens.append(name)
            self.text_offset.append(offset)
            offset += len(name) if not names.as_ids else len(names.tokenizer.token_text(token))
            if logprobs is None:
                self.token_logprobs.append(None)
                self.top_logprobs.append(None)
                continue
            self.token_logprobs.append(finite(logprobs.logprob))
            top: dict[str, float] = {}
            for other, value in logprobs.top:
                top.setdefault(names(other), finite(value))
            top.setdefault(name, finite(logprobs.logprob))
            self.top_logprobs.append(top)
        return offset


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
    items: Sequence[TokenLogprobs | None], names: TokenNames
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's extension: for each prompt token after the first, by token id."""
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
            for rank, (token, logprob) in enumerate(item.top, 1)
        }
        entries[str(item.token)] = {
            "logprob": finite(item.logprob),
            "rank": item.rank,
            "decoded_token": names.tokenizer.token_text(item.token),
        }
        result.append(entries)
    return result
