"""The answers of /v1/responses: one object with items, or the events that it grows by.

Both are made by one `Output` from the same updates, in their order, so what events tell is what the whole
answer says, however tokens come.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.gateway.api.calls import call_id
from baton.gateway.errors import ApiError, BadRequest, Overloaded
from baton.gateway.generation.generation import Completion, Generation, Update
from baton.gateway.generation.progress import Progress
from baton.gateway.parsing.deltas import Content
from baton.gateway.rendering.formats import Part, TokenNames, encode, logprobs_entry, timings_member
from baton.gateway.responses.output import Output, event
from baton.gateway.responses.tools import Names
from baton.protocol.params.sampling import TokenLogprobs

Keep = Callable[[bytes, list[tuple[str, bytes]]], bool]
"""Takes an answer that is complete, as JSON, and its output items.  False: it is not kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesOptions:
    token: str
    """Of the answer's id, after `resp_`."""
    model: str
    said: str
    """Members that repeat the request, as JSON without braces."""
    temperature: float
    top_p: float
    stream: bool
    encrypted: bool = False
    """Reasoning has `encrypted_content`."""
    top_logprobs: int | None = None
    """None: no log-probabilities."""
    short_ids: bool = False
    """As of `ChatOptions`."""
    timings: bool = False
    """It says where its time went."""
    custom: frozenset[str] = frozenset()
    """The model's names of tools that take a text."""
    names: Names = field(default_factory=dict)
    """Of tools in namespaces."""


class ResponsesRenderer:
    """A `Renderer`, of one sequence."""

    __slots__ = (
        "_before",
        "_created",
        "_finish",
        "_generation",
        "_keep",
        "_names",
        "_options",
        "_output",
        "_pending",
    )

    def __init__(
        self, generation: Generation, options: ResponsesOptions, names: TokenNames, keep: Keep | None
    ) -> None:
        self._generation = generation
        self._options = options
        self._names = names
        self._keep = keep
        self._created = int(time.time())
        self._output = Output(
            options.token,
            lambda own: call_id(own, short=options.short_ids),
            tells=options.stream,
            encrypted=options.encrypted,
            custom=options.custom,
            names=options.names,
        )
        self._finish: str | None = None
        """How it ended."""
        self._pending: list[bytes] = []
        """Log-probabilities of tokens of which is not known yet what they say."""
        head = {"model": options.model, "temperature": options.temperature, "top_p": options.top_p}
        self._before = encode(head)[1:-1] + b"," + options.said.encode()

    def begin(self) -> bytes:
        response = b'"response":' + self._response("in_progress", []) + b","
        return b"".join(
            event(kind, response + self._output.number())
            for kind in ("response.created", "response.in_progress")
        )

    def chunk(self, update: Update) -> bytes:
        if self._options.top_logprobs is None:
            if update.finish_reason is not None:
                self._finish = update.finish_reason
            output, deltas = self._output, update.deltas
            if deltas is None:
                return output.text(update.text) if update.text else b""
            if len(deltas) == 1:
                return output.add(deltas[0])
            return b"".join([output.add(delta) for delta in deltas])
        return b"".join([data for _, data in self.parts(update)])

    def parts(self, update: Update) -> Iterator[Part]:
        top = self._options.top_logprobs
        if top is None:
            yield 1, self.chunk(update)
            return
        if update.finish_reason is not None:
            self._finish = update.finish_reason
        if update.deltas is None:
            for logprobs in update.logprobs:
                self._pending.append(self._entry(logprobs, top))
                yield top + 1, b""
            if update.text:
                pending, self._pending = self._pending, []
                yield 1, self._output.text(update.text, pending)
            return
        told = 0
        for logprobs, mark in zip(update.logprobs, update.marks or (), strict=False):
            if mark < 0:
                self._pending = []
                continue
            self._pending.append(self._entry(logprobs, top))
            yield top + 1, b"".join([self._add(delta) for delta in update.deltas[told:mark]])
            told = mark
        yield 1, b"".join([self._add(delta) for delta in update.deltas[told:]])

    def _add(self, delta: Any) -> bytes:
        """The log-probabilities of what is no text are left out."""
        pending, self._pending = self._pending, []
        return self._output.add(delta, pending if isinstance(delta, Content) else ())

    def _entry(self, logprobs: TokenLogprobs, top: int) -> bytes:
        return encode(logprobs_entry(logprobs, self._names, top))

    def end(self) -> bytes:
        status, closing, response = self._finished()
        kind = f"response.{status}"
        return closing + event(kind, b'"response":' + response + b"," + self._output.number())

    def failure(self, error: ApiError) -> bytes:
        closing = self._output.close("incomplete")
        response = self._response("failed", self._output.items, error=_failure(error))
        return closing + event("response.failed", b'"response":' + response + b"," + self._output.number())

    def sign_of_life(self, silent_s: float) -> bytes:
        """An event: clients drop comments before they look at the clock.  Of a kind that all know, with the
        answer as it is so far."""
        return self._in_progress()

    def progress(self, progress: Progress) -> bytes:
        return self._in_progress(b'"prompt_progress":' + encode(progress._asdict()) + b",")

    def _in_progress(self, more: bytes = b"") -> bytes:
        response = b'"response":' + self._response("in_progress", self._output.items) + b"," + more
        return event("response.in_progress", response + self._output.number())

    def whole(self, completions: list[Completion]) -> Iterator[Part]:
        """Of all updates (`chunk`, `parts`) together."""
        yield 1, self._finished()[2]

    def _finished(self) -> tuple[str, bytes, bytes]:
        """(status, the events that close the last item, the answer)."""
        output = self._output
        status, error, reason = "completed", None, None
        if self._finish == "length":
            status, reason = "incomplete", "max_output_tokens"
        elif self._finish == "abort":
            status = "failed"
            error = {"code": "server_error", "message": "the server ended the answer: it was paused"}
        closing = b""
        if not output.items and not output.open:
            closing = output.text("")
        if self._pending and output.open == "message":
            closing += output.text("", self._pending)
        closing += output.close("completed" if status == "completed" else "incomplete")
        response = self._response(status, output.items, reason=reason, error=error)
        if self._keep is not None and error is None and not self._keep(response, output.items):
            self._keep = None
            response = self._response(status, output.items, reason=reason)
        return status, closing, response

    def _response(
        self,
        status: str,
        items: Sequence[tuple[str, bytes]],
        *,
        reason: str | None = None,
        error: dict[str, str] | None = None,
    ) -> bytes:
        ended = status != "in_progress"
        head = {
            "id": f"resp_{self._options.token}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": error,
            "incomplete_details": None if reason is None else {"reason": reason},
            "store": self._keep is not None,
        }
        usage = encode(usage_of(self._generation)) if ended else b"null"
        listed = b",".join([item for _, item in items])
        told = timings_member(self._generation, ended and self._options.timings)
        return b"".join(
            (encode(head)[:-1], b",", self._before, b',"output":[', listed, b'],"usage":', usage, told, b"}")
        )


def usage_of(generation: Generation) -> dict[str, Any]:
    """Its tokens so far."""
    prompt, generated = generation.num_prompt, generation.num_generated
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": generation.num_cached or 0, "cache_write_tokens": 0},
        "output_tokens": generated,
        "output_tokens_details": {"reasoning_tokens": generation.num_reasoning},
        "total_tokens": prompt + generated,
    }


def _failure(error: ApiError) -> dict[str, str]:
    """As OpenAI names it; Codex and others try again by these codes."""
    code = "server_error"
    if isinstance(error, Overloaded):
        code = "rate_limit_exceeded"
    elif isinstance(error, BadRequest):
        code = "invalid_prompt"
    return {"code": code, "message": error.message}
