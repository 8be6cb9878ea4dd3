"""The shapes of /v1/messages: a message of blocks, and its events."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from baton.gateway.anthropic.shapes import error_body
from baton.gateway.anthropic.signatures import sign
from baton.gateway.api.calls import call_id
from baton.gateway.errors import ApiError
from baton.gateway.generation.ending import timings_of
from baton.gateway.generation.generation import Completion, Generation, Update
from baton.gateway.generation.progress import Progress
from baton.gateway.parsing.deltas import Call, Content, Delta, Parsed, Reasoning, Said
from baton.gateway.rendering.formats import Part, encode
from baton.gateway.rendering.inputs import object_in

_END = b"}}\n\n"
_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


@dataclass(slots=True, frozen=True, kw_only=True)
class MessageOptions:
    model: str
    max_tokens: int
    """As it was asked for."""
    thinking: bool = True
    """Blocks of what the model thought are wanted ..."""
    omitted: bool = False
    """... but not their text.  (Never without `thinking`.)"""
    short_ids: bool = False
    """Calls' ids have nine letters and digits, as the model's template wants them."""
    timings: bool = False
    """It says where its time went."""


class MessageRenderer:
    """A `Renderer` of one sequence."""

    __slots__ = (
        "_call",
        "_delta",
        "_generation",
        "_hidden",
        "_index",
        "_kind",
        "_options",
        "_reason",
        "_sequence",
    )

    def __init__(self, generation: Generation, options: MessageOptions) -> None:
        self._generation = generation
        self._options = options
        self._kind = ""
        """Of the block that is open: `text`, `thinking`, `tool_use`."""
        self._index = -1
        """Of the last block that was begun."""
        self._delta = b""
        """An event that brings more of the open block, as far as its text."""
        self._hidden: list[str] = []
        """Of a thinking block, what is not shown of it."""
        self._call: tuple[str, str | None] | None = None
        """Name and id of the last call, until something else comes."""
        self._reason: str | None = None
        self._sequence: str | None = None

    # -- whole

    def whole(self, completions: list[Completion]) -> Iterator[Part]:
        (completion,) = completions
        reason, sequence = self._end_of(completion)
        blocks = self._blocks(completion)
        yield len(blocks), encode(self._message(blocks, reason, sequence) | self._timings())

    def _message(
        self, blocks: list[dict[str, Any]], reason: str | None, sequence: str | None
    ) -> dict[str, Any]:
        return {
            "id": f"msg_{self._generation.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._options.model,
            "content": blocks,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": self._usage(),
        }

    def _blocks(self, completion: Completion) -> list[dict[str, Any]]:
        parsed = completion.parsed
        if parsed is None:
            parsed = Parsed([Said(False, [completion.text])])
        blocks: list[dict[str, Any]] = []
        parted = False
        """A call came last."""
        for part in parsed.parts:
            if not isinstance(part, Said):
                parted = True
                input = object_in("".join(part.arguments))
                if input is not None:  # (else it was cut off: half of a call is none)
                    blocks.append(
                        {"type": "tool_use", "id": self._id(part.id), "name": part.name, "input": input}
                    )
                continue
            text = "".join(part.pieces)
            if not text:
                continue
            after, parted = parted, parted and part.reasoning and not self._options.thinking
            if part.reasoning:
                if self._options.omitted:
                    blocks.append({"type": "thinking", "thinking": "", "signature": sign(text)})
                elif self._options.thinking:
                    blocks.append({"type": "thinking", "thinking": text, "signature": sign()})
            elif (
                blocks and blocks[-1]["type"] == "text" and not after
            ):  # (what was thought in between is not wanted)
                blocks[-1]["text"] += text
            else:
                blocks.append({"type": "text", "text": text})
        return blocks

    def _end_of(self, end: Completion | Update) -> tuple[str, str | None]:
        """(`stop_reason`, `stop_sequence`)."""
        if end.finish_reason == "length":
            full = self._generation.num_generated < self._options.max_tokens
            return "model_context_window_exceeded" if full else "max_tokens", None
        if end.finish_reason == "abort":
            return "pause_turn", None  # (the client may send it back to have it continued)
        if isinstance(end.stop_reason, str):
            return "stop_sequence", end.stop_reason
        return "tool_use" if end.called else "end_turn", None

    def _usage(self) -> dict[str, Any]:
        """Tokens so far; cached ones of the prompt are told apart, as far as they are known."""
        generation = self._generation
        cached = generation.num_cached
        if cached is None:
            request = generation.sequences[0].request
            cached = 0 if request is None else min(request.num_cached, generation.num_prompt)
        counts: dict[str, Any] = {
            "input_tokens": generation.num_prompt - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": generation.num_generated,
        }
        if generation.has_reasoning:
            counts["output_tokens_details"] = {"thinking_tokens": generation.num_reasoning}
        return counts

    def _timings(self) -> dict[str, Any]:
        return {"timings": timings_of(self._generation)} if self._options.timings else {}

    # -- events

    def begin(self) -> bytes:
        message = self._message([], None, None)
        message["usage"]["output_tokens"] = 0
        message["usage"].pop("output_tokens_details", None)
        return _event("message_start", message=message)

    def chunk(self, update: Update) -> bytes:
        if update.finish_reason is not None:
            self._reason, self._sequence = self._end_of(update)
        if update.deltas is not None:
            return b"".join([self._more(delta) for delta in update.deltas])
        return self._text(update.text) if update.text else b""

    def parts(self, update: Update) -> Iterator[Part]:
        yield 1, self.chunk(update)

    def end(self) -> bytes:
        delta = {"stop_reason": self._reason, "stop_sequence": self._sequence}
        end = _event("message_delta", delta=delta, usage=self._usage(), **self._timings())
        return self._close() + end + _STOP

    def failure(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + encode(error_body(error, self._generation.request_id)) + b"\n\n"

    def sign_of_life(self, silent_s: float) -> bytes:
        return _event("ping")

    def progress(self, progress: Progress) -> bytes:
        """A ping that says more: clients that do not look at it take it for any other."""
        return _event("ping", prompt_progress=progress._asdict())

    def _more(self, delta: Delta) -> bytes:
        match delta:
            case Content(text):
                return self._text(text) if text else b""
            case Reasoning(text):
                return self._thoughts(text) if text else b""
            case Call(_, name, arguments, id):
                closed = b""
                if name is not None:
                    closed, self._call = self._close(), (name, id)
                return closed + self._arguments(arguments) if arguments else closed

    def _arguments(self, text: str) -> bytes:
        """A block begins with the first of them: without any it would say `{}`."""
        begun = b""
        if self._kind != "tool_use" and self._call is not None:
            name, id = self._call
            block: dict[str, Any] = {"type": "tool_use", "id": self._id(id), "name": name, "input": {}}
            begun = self._begin_block(block, "input_json_delta", "partial_json")
        return begun + self._delta + encode(text) + _END

    def _text(self, text: str) -> bytes:
        if self._kind == "text":
            return self._delta + encode(text) + _END
        block = {"type": "text", "text": ""}
        return self._begin_block(block, "text_delta", "text") + self._delta + encode(text) + _END

    def _thoughts(self, text: str) -> bytes:
        options = self._options
        if not options.thinking:
            return b""
        begun = b""
        if self._kind != "thinking":
            block = {"type": "thinking", "thinking": "", "signature": ""}
            begun = self._begin_block(block, "thinking_delta", "thinking")
        if options.omitted:
            self._hidden.append(text)
            return begun
        return begun + self._delta + encode(text) + _END

    def _begin_block(self, block: dict[str, Any], delta: str, member: str) -> bytes:
        """Ends the block before it."""
        closed = self._close()
        self._index += 1
        self._kind = block["type"]
        if self._kind != "tool_use":
            self._call = None
        self._delta = (
            f'event: content_block_delta\ndata: {{"type":"content_block_delta","index":{self._index},'
            f'"delta":{{"type":"{delta}","{member}":'
        ).encode()
        return closed + _event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> bytes:
        """The end of the open block."""
        if not self._kind:
            return b""
        signed = b""
        if self._kind == "thinking":
            signature = sign("".join(self._hidden) if self._options.omitted else None)
            delta = {"type": "signature_delta", "signature": signature}
            signed = _event("content_block_delta", index=self._index, delta=delta)
            self._hidden.clear()
        self._kind = ""
        return signed + _event("content_block_stop", index=self._index)

    def _id(self, own: str | None) -> str:
        return call_id(own, short=self._options.short_ids, prefix="toolu_")


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: ".encode() + encode({"type": kind, **fields}) + b"\n\n"
