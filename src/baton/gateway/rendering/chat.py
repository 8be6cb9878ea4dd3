"""The shapes of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from baton.gateway.generation.generation import Completion, Generation, Update
from baton.gateway.rendering.chunks import ChunkRenderer, Shape
from baton.gateway.rendering.formats import Part, TokenNames, chat_logprobs, encode, usage

_PLAIN = b'},"logprobs":null,"finish_reason":null,"stop_reason":null,"token_ids":null}]}\n\n'
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


@dataclass(slots=True, frozen=True, kw_only=True)
class ChatOptions(Shape):
    top_logprobs: int | None
    """None: no log-probabilities."""


class ChatRenderer(ChunkRenderer):
    """A `Renderer`."""

    __slots__ = ("_top_logprobs",)

    def __init__(self, generation: Generation, options: ChatOptions, names: TokenNames) -> None:
        self._top_logprobs = options.top_logprobs
        super().__init__(
            generation,
            names,
            options,
            prefix="chatcmpl",
            kind="chat.completion.chunk",
            member=b"delta",
            plain=_PLAIN if options.top_logprobs is None and not options.token_ids else None,
        )

    def whole(self, completions: list[Completion]) -> Iterator[Part]:
        head = {**self._head, "object": "chat.completion"}
        yield 0, encode(head)[:-1] + b',"service_tier":null,"system_fingerprint":null,"choices":['
        for completion in completions:
            if completion.index:
                yield 0, b","
            yield from self._choice(completion)
        yield 0, b'],"usage":' + encode(usage(self._generation)) + b',"prompt_logprobs":'
        sequence = self._generation.sequences[0]
        yield from self._prompt_logprobs(sequence)
        yield 0, b',"prompt_token_ids":' + self._prompt_ids(sequence) + b',"kv_transfer_params":null}'

    def begin(self) -> bytes:
        """Every choice begins by saying who speaks, before any token is counted."""
        rest = (
            b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null,"token_ids":null}]'
            + b',"prompt_token_ids":'
            + self._prompt_ids(self._generation.sequences[0])
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
        top_logprobs = self._top_logprobs
        self._usage.add(len(update.token_ids))
        wants_tokens = top_logprobs is not None or self._shape.token_ids
        if not (update.text or update.finish_reason or (update.token_ids and wants_tokens)):
            return
        content = b'{"content":' + encode(update.text) + b"}" if update.text else b"{}"
        yield 1, self._openings[update.index] + content + b',"logprobs":'
        if top_logprobs is not None and update.token_ids:
            yield from chat_logprobs(update.logprobs, self._names, top_logprobs)
        else:
            yield 0, b"null"
        yield 0, self._event_end(update)

    def _choice(self, completion: Completion) -> Iterator[Part]:
        top_logprobs = self._top_logprobs
        message = encode({**_MESSAGE, "content": completion.text})
        yield 1, b'{"index":%d,"message":' % completion.index + message + b',"logprobs":'
        if top_logprobs is not None:
            yield from chat_logprobs(completion.logprobs, self._names, top_logprobs)
        else:
            yield 0, b"null"
        yield 0, b"," + encode(self._ends(completion))[1:]
