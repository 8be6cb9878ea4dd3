"""The shapes of /v1/chat/completions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from baton.gateway.formats import (
    NO_USAGE,
    StreamUsage,
    TokenNames,
    chat_logprobs,
    encode,
    prompt_logprobs,
    usage,
)
from baton.gateway.generation import Completion, Generation, Update
from baton.gateway.responses import now

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

    def whole(self, completions: list[Completion]) -> dict[str, Any]:
        body: dict[str, Any] = {
            **self._head,
            "object": "chat.completion",
            "service_tier": None,
            "system_fingerprint": None,
            "choices": [self._choice(completion) for completion in completions],
            "usage": usage(self._generation),
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            "kv_transfer_params": None,
        }
        sequence = self._generation.sequences[0]
        if self._options.prompt_logprobs is not None:
            items = sequence.prompt_logprobs or [None] * len(sequence.prompt)
            body["prompt_logprobs"] = prompt_logprobs(items, self._names, self._options.prompt_logprobs)
        if self._options.token_ids:
            body["prompt_token_ids"] = list(sequence.prompt)
        return body

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
        options, index = self._options, update.index
        self._usage.add(len(update.token_ids))
        wants_tokens = options.top_logprobs is not None or options.token_ids
        if not (update.text or update.finish_reason or (update.token_ids and wants_tokens)):
            return b""
        logprobs, token_ids = b"null", b"null"
        if options.top_logprobs is not None and update.token_ids:
            logprobs = encode(chat_logprobs(update.logprobs, self._names, options.top_logprobs))
        if options.token_ids:
            token_ids = encode(update.token_ids)
        return b"".join(
            (
                self._openings[index],
                b'{"content":' + encode(update.text) + b"}" if update.text else b"{}",
                b',"logprobs":',
                logprobs,
                b',"finish_reason":',
                encode(update.finish_reason),
                b',"stop_reason":',
                encode(update.stop_reason),
                b',"token_ids":',
                token_ids,
                b"}]",
                self._usage.in_chunk(),
                b"}\n\n",
            )
        )

    def end(self) -> bytes:
        return self._usage.at_end()

    def _choice(self, completion: Completion) -> dict[str, Any]:
        options = self._options
        choice: dict[str, Any] = {
            "index": completion.index,
            "message": {**_MESSAGE, "content": completion.text},
            "logprobs": None,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "token_ids": completion.token_ids if options.token_ids else None,
        }
        if options.top_logprobs is not None:
            choice["logprobs"] = chat_logprobs(completion.logprobs, self._names, options.top_logprobs)
        return choice
