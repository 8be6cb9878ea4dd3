"""What the renderers of both endpoints have in common: the head of an answer, how the event of a choice
begins, and how one ends that brings nothing but text.

A renderer is made once a request and called for nearly every token, so what all events of a stream have in
common is encoded here, beforehand.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from baton.gateway.errors import ApiError
from baton.gateway.generation.generation import Completion, Generation, Update
from baton.gateway.generation.progress import Progress
from baton.gateway.generation.sequence import Sequence
from baton.gateway.rendering.formats import (
    DONE,
    NO_USAGE,
    Part,
    StreamUsage,
    TokenNames,
    encode,
    event,
    prompt_logprobs,
)
from baton.gateway.rendering.routes import encoded_routes

_END = b"}\n\n"
_CHUNK_S = 54.0
"""Less than a minute: signs come within a tenth of their interval."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Shape:
    """What of a request concerns the answer's shape, at either endpoint."""

    model: str
    prompt_logprobs: int | None
    """vLLM's field: so many alternatives.  None: no log-probabilities of the prompt."""
    token_ids: bool
    routed_experts: bool
    include_usage: bool
    continuous_usage: bool
    timings: bool = False


class ChunkRenderer:
    """The part of a `Renderer` that does not depend on the endpoint."""

    __slots__ = ("_generation", "_head", "_names", "_openings", "_plain", "_shape", "_silent_s", "_usage")

    def __init__(
        self,
        generation: Generation,
        names: TokenNames,
        shape: Shape,
        *,
        prefix: str,
        kind: str,
        member: bytes,
        plain: bytes | None,
    ) -> None:
        """`prefix`: of the answer's id.  `kind`: the `object` of an event.  `member`: of a choice, after its
        index.  `plain`: all that follows the text in an event that brings nothing but text, if no usage is
        told; None: each event is different."""
        self._generation = generation
        self._silent_s = 0.0
        """How long the silence was when its last chunk was sent."""
        self._names = names
        self._shape = shape
        self._head = {
            "id": f"{prefix}-{generation.request_id}",
            "object": kind,
            "created": int(time.time()),
            "model": shape.model,
        }
        self._usage = StreamUsage(
            generation, self._head, shape.include_usage, shape.continuous_usage, shape.timings
        )
        opening = b"data: " + encode(self._head)[:-1] + b',"choices":[{"index":'
        self._openings = tuple(
            opening + b'%d,"%s":' % (index, member) for index in range(len(generation.sequences))
        )
        if plain is not None and shape.include_usage:
            plain = plain[: -len(_END)] + NO_USAGE + _END
        self._plain = None if self._usage.changes else plain

    def end(self) -> bytes:
        """After all choices have ended: usage and timings, if they are wanted, and the end mark."""
        return self._usage.at_end() + DONE

    def failure(self, error: ApiError) -> bytes:
        return event(encode(error.body()))

    def sign_of_life(self, silent_s: float) -> bytes:
        """A comment: for most clients of these APIs any bytes count, and a choice would be taken for a token.

        Some count chunks: Qwen Code 0.24 gives a stream up that brought none for 240 s.  Who asked for usage
        must expect chunks without choices, and gets one a minute."""
        if silent_s < self._silent_s:  # (something came in between)
            self._silent_s = 0.0
        if self._shape.include_usage and silent_s - self._silent_s >= _CHUNK_S:
            self._silent_s = silent_s
            return event(encode({**self._head, "choices": [], "usage": None}))
        return b": keep-alive\n\n"

    def progress(self, progress: Progress) -> bytes:
        """llama.cpp's member, in a chunk without choices."""
        return event(encode({**self._head, "choices": [], "prompt_progress": progress._asdict()}))

    def _event_end(self, update: Update, more: bytes = b"", reason: bytes | None = None) -> bytes:
        """What follows a choice's log-probabilities; `more`: members of the choice after the usual ones,
        `reason`: of the end, if it is not the update's."""
        return b"".join(
            (
                b',"finish_reason":',
                encode(update.finish_reason) if reason is None else reason,
                b',"stop_reason":',
                encode(update.stop_reason),
                b',"token_ids":',
                encode(update.token_ids) if self._shape.token_ids else b"null",
                more,
                b"}]",
                self._usage.in_chunk(),
                _END,
            )
        )

    def _ends(self, completion: Completion) -> dict[str, Any]:
        """The same of a choice that is told as a whole."""
        return {
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "token_ids": completion.token_ids if self._shape.token_ids else None,
        }

    def _prompt_logprobs(self, sequence: Sequence) -> Iterator[Part]:
        """vLLM's extension, or null."""
        if self._shape.prompt_logprobs is None:
            yield 0, b"null"
        else:
            items = sequence.prompt_logprobs or [None] * len(sequence.prompt)
            yield from prompt_logprobs(items, self._names, self._shape.prompt_logprobs)

    def _routes(self, completion: Completion) -> Iterator[Part]:
        """A member with the experts that the tokens of a choice went to, if that was asked for."""
        if self._shape.routed_experts:
            yield from encoded_routes(self._generation, completion.index)

    def _prompt_ids(self, sequence: Sequence) -> bytes:
        """Of the prompt, or null."""
        return encode(list(sequence.prompt)) if self._shape.token_ids else b"null"
