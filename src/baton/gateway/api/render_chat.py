"""The shapes of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from baton.gateway.api.formats import (
    NO_USAGE,
    Part,
    StreamUsage,
    TokenNames,
    chat_logprobs,
    encode,
    prompt_logprobs,
    usage,
)
from baton.gateway.generation.generation import Completion, Generation, Update
from baton.gateway.http.responses import now

_PLAIN = b'},"logprobs":null,"finish_reason":null,"stop_reason":null,"token_ids":null}]}\n\n'
_PLAIN_WITH_USAGE = _PLAIN[:-3] + NO_USAGE + _PLAIN[-3:]
_MESSAGE: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "refusal": None,
    "annotations": None,
    "audio": None,
    "function_call": None,
    "tool_calls": [],
    "reasoning": None,
    "reasoning_content": None,
}
"""Clients look at these keys without asking whether they are there, so all are, as vLLM sends them."""


@dataclass(slots=True, frozen=True)
class ChatOptions:
    """What of the request concerns the answer's shape."""

    model: str
    top_logprobs: int | None
    """None: no log-probabilities."""
    prompt_logprobs: int | None
    """None: no log-probabilities of the prompt."""
    token_ids: bool
    include_usage: bool
    continuous_usage: bool


class ChatRenderer:
    """A `Renderer`."""

    __slots__ = ("_generation", "_head", "_names", "_openings", "_options", "_plain", "_usage")

    def __init__(self, generation: Generation, options: ChatOptions, names: TokenNames) -> None:
        self._generation = generation
        self._options = options
        self._names = names
        self._head = {
            "id": f"chatcmpl-{generation.request_id}",
            "object": "chat.completion.chunk",
            "created": now(),
            "model": options.model,
        }
        self._usage = StreamUsage(generation, self._head, options.include_usage, options.continuous_usage)
        opening = encode(self._head)[:-1]
        self._openings = tuple(
            b"data: " + opening + b',"choices":[{"index":%d,"delta":' % index
            for index in range(len(generation.sequences))
        )
        self._plain: bytes | None = None
        """What follows the text in a chunk that brings nothing but text; None if each is different."""
        if options.top_logprobs is None and not (options.token_ids or self._usage.changes):
            self._plain = _PLAIN_WITH_USAGE if options.include_usage else _PLAIN

    def whole(self, completions: list[Completion]) -> Iterator[Part]:
        head = {**self._head, "object": "chat.completion"}
        yield 0, encode(head)[:-1] + b',"service_tier":null,"system_fingerprint":null,"choices":['
        for completion in completions:
            if completion.index:
                yield 0, b","
            yield from self._choice(completion)
        yield 0, b'],"usage":' + encode(usage(self._generation)) + b',"prompt_logprobs":'
        sequence = self._generation.sequences[0]
        if self._options.prompt_logprobs is not None:
            items = sequence.prompt_logprobs or [None] * len(sequence.prompt)
            yield from prompt_logprobs(items, self._names, self._options.prompt_logprobs)
        else:
            yield 0, b"null"
        prompt = encode(list(sequence.prompt)) if self._options.token_ids else b"null"
        yield 0, b',"prompt_token_ids":' + prompt + b',"kv_transfer_params":null}'

    def begin(self) -> bytes:
        """Every choice begins by saying who speaks, before any token is counted."""
        prompt = b"null"
        if self._options.token_ids:
            prompt = encode(list(self._generation.sequences[0].prompt))
        rest = (
            b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null,"token_ids":null}]'
            + b',"prompt_token_ids":'
            + prompt
            + self._usage.in_chunk()
            + b"}\n\n"
        )
        return b"".join(opening + rest for opening in self._openings)

    def chunk(self, update: Update) -> bytes:
        if self._plain is not None and update.finish_reason is None:
            if not update.text:
                return b""
            return self._openings[update.index] + b'{"content":' + encode(update.text) + self._plain
        return b"".join([data for _, data in self.parts(update)])

    def parts(self, update: Update) -> Iterator[Part]:
        options, index = self._options, update.index
        self._usage.add(len(update.token_ids))
        wants_tokens = options.top_logprobs is not None or options.token_ids
        if not (update.text or update.finish_reason or (update.token_ids and wants_tokens)):
            return
        content = b'{"content":' + encode(update.text) + b"}" if update.text else b"{}"
        yield 1, self._openings[index] + content + b',"logprobs":'
        if options.top_logprobs is not None and update.token_ids:
            yield from chat_logprobs(update.logprobs, self._names, options.top_logprobs)
        else:
            yield 0, b"null"
        yield (
            0,
            b"".join(
                (
                    b',"finish_reason":',
                    encode(update.finish_reason),
                    b',"stop_reason":',
                    encode(update.stop_reason),
                    b',"token_ids":',
                    encode(update.token_ids) if options.token_ids else b"null",
                    b"}]",
                    self._usage.in_chunk(),
                    b"}\n\n",
                )
            ),
        )

    def end(self) -> bytes:
        return self._usage.at_end()

    def _choice(self, completion: Completion) -> Iterator[Part]:
        options = self._options
        message = encode({**_MESSAGE, "content": completion.text})
        yield 1, b'{"index":%d,"message":' % completion.index + message + b',"logprobs":'
        if options.top_logprobs is not None:
            yield from chat_logprobs(completion.logprobs, self._names, options.top_logprobs)
        else:
            yield 0, b"null"
        ends = {
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "token_ids": completion.token_ids if options.token_ids else None,
        }
        yield 0, b"," + encode(ends)[1:]
