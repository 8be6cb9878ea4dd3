"""The shapes of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from baton.gateway.api.calls import call_id
from baton.gateway.api.custom import InputReader, input_of
from baton.gateway.generation.generation import Completion, Generation, Update
from baton.gateway.parsing.deltas import Call, Called, Content, Delta, Reasoning
from baton.gateway.rendering.chunks import ChunkRenderer, Shape
from baton.gateway.rendering.formats import Part, TokenNames, chat_logprobs, encode, timings_member, usage

_PLAIN = b'},"logprobs":null,"finish_reason":null,"stop_reason":null,"token_ids":null}]}\n\n'
_MESSAGE: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "refusal": None,
    "annotations": None,
    "audio": None,
    "function_call": None,
    "reasoning": None,
    "reasoning_content": None,
}
"""Clients look at these keys without asking whether they are there, so all are; `tool_calls` only where
there are some."""


@dataclass(slots=True, frozen=True, kw_only=True)
class ChatOptions(Shape):
    top_logprobs: int | None
    """None: no log-probabilities."""
    include_reasoning: bool = True
    echo: str = ""
    """What each answer begins with."""
    short_ids: bool = False
    """Calls' ids have nine letters and digits, as the model's template wants them."""
    custom: frozenset[str] = frozenset()
    """Names of tools that take a text."""


class ChatRenderer(ChunkRenderer):
    """A `Renderer`."""

    __slots__ = ("_begun", "_inputs", "_options", "_top_logprobs")

    def __init__(self, generation: Generation, options: ChatOptions, names: TokenNames) -> None:
        self._top_logprobs = options.top_logprobs
        self._options = options
        self._inputs: dict[tuple[int, int], InputReader] = {}
        """Of calls of tools that take a text: by choice and call."""
        self._begun = False
        """It has been said who speaks."""
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
        yield 0, b',"prompt_token_ids":' + self._prompt_ids(sequence) + b',"kv_transfer_params":null'
        yield 0, timings_member(self._generation, self._shape.timings) + b"}"

    def begin(self) -> bytes:
        """Nothing: a chunk with choices is taken for the first token, so it comes with that."""
        return b""

    def _opening(self) -> bytes:
        """Every choice begins by saying who speaks, before any token is counted."""
        self._begun = True
        rest = (
            b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
            + b',"prompt_token_ids":'
            + self._prompt_ids(self._generation.sequences[0])
            + self._usage.in_chunk()
            + b"}\n\n"
        )
        if self._options.echo:
            echo = b'{"content":' + encode(self._options.echo) + _PLAIN
            return b"".join(opening + rest + opening + echo for opening in self._openings)
        return b"".join(opening + rest for opening in self._openings)

    def chunk(self, update: Update) -> bytes:
        if self._plain is not None and self._begun and update.finish_reason is None:
            if update.deltas is not None:
                return b"".join(
                    [
                        self._openings[update.index] + data[:-1] + self._plain
                        for data in [self._delta(update.index, delta) for delta in update.deltas]
                        if data
                    ]
                )
            if not update.text:
                return b""
            return self._openings[update.index] + b'{"content":' + encode(update.text) + self._plain
        return b"".join([data for _, data in self.parts(update)])

    def parts(self, update: Update) -> Iterator[Part]:
        top_logprobs = self._top_logprobs
        wants_tokens = top_logprobs is not None or self._shape.token_ids
        if update.deltas is None:
            content = b'{"content":' + encode(update.text) + b"}" if update.text else b"{}"
        else:
            # One event for each thing that is said; the last one tells all else.  (The stream helper of
            # OpenAI's client looks for a call's end only after the event that began it.)
            apart = update.finish_reason is not None and update.deltas[-1:] != []
            deltas = [self._delta(update.index, delta) for delta in update.deltas]
            said = [*filter(None, deltas), *([b"{}"] if apart else ())]
            *before, content = said or [b"{}"]
            if before and not self._begun:
                yield 0, self._opening()
            for data in before:
                yield 1, self._openings[update.index] + data + b',"logprobs":null'
                yield 0, self._event_end(Update(update.index, "", [], [], None, None))
        silent = content == b"{}" and not update.finish_reason and not (update.token_ids and wants_tokens)
        if not (self._begun or silent):
            yield 0, self._opening()
        self._usage.add(len(update.token_ids))
        if silent:
            return
        yield 1, self._openings[update.index] + content + b',"logprobs":'
        if top_logprobs is not None and update.token_ids:
            yield from chat_logprobs(update.logprobs, self._names, top_logprobs)
        else:
            yield 0, b"null"
        if update.called and update.finish_reason == "stop":
            yield 0, self._event_end(update, reason=b'"tool_calls"')
        else:
            yield 0, self._event_end(update)

    def _delta(self, choice: int, delta: Delta) -> bytes:
        """As JSON; empty if it is not wanted."""
        match delta:
            case Content(text):
                return b'{"content":' + encode(text) + b"}"
            case Reasoning(text):
                data = encode(text)
                wanted = self._options.include_reasoning
                return b'{"reasoning":' + data + b',"reasoning_content":' + data + b"}" if wanted else b""
            case Call() if self._options.custom and (call := self._custom(choice, delta)) is not None:
                return b'{"tool_calls":[' + encode(call) + b"]}" if call else b""
            case Call(index, None, arguments):
                call = {"index": index, "function": {"arguments": arguments}}
            case Call(index, name, arguments, id):
                function = {"name": name, "arguments": arguments}
                call = {"index": index, "id": self._id(id), "type": "function", "function": function}
        return b'{"tool_calls":[' + encode(call) + b"]}"

    def _custom(self, choice: int, delta: Call) -> dict[str, Any] | None:
        """Of a call of a tool that takes a text; empty: nothing new.  None: it is none."""
        place = choice, delta.index
        if delta.name is None:
            if (reader := self._inputs.get(place)) is None:
                return None
            text = reader.push(delta.arguments)
            return {"index": delta.index, "custom": {"input": text}} if text else {}
        if delta.name not in self._options.custom:
            return None
        reader = self._inputs[place] = InputReader()
        custom = {"name": delta.name, "input": reader.push(delta.arguments)}
        return {"index": delta.index, "id": self._id(delta.id), "type": "custom", "custom": custom}

    def _id(self, own: str | None) -> str:
        """Of a call; `own`: as the model says it."""
        return call_id(own, short=self._options.short_ids)

    def _choice(self, completion: Completion) -> Iterator[Part]:
        top_logprobs = self._top_logprobs
        message = encode({**_MESSAGE, **self._message(completion)})
        yield 1, b'{"index":%d,"message":' % completion.index + message + b',"logprobs":'
        if top_logprobs is not None:
            yield from chat_logprobs(completion.logprobs, self._names, top_logprobs)
        else:
            yield 0, b"null"
        ends = self._ends(completion)
        if completion.called and completion.finish_reason == "stop":
            ends["finish_reason"] = "tool_calls"
        yield 0, b"," + encode(ends)[1:-1]
        yield from self._routes(completion)
        yield 0, b"}"

    def _call(self, call: Called) -> dict[str, Any]:
        arguments = "".join(call.arguments)
        if call.name in self._options.custom:
            custom = {"name": call.name, "input": input_of(arguments)}
            return {"id": self._id(call.id), "type": "custom", "custom": custom}
        function = {"name": call.name, "arguments": arguments}
        return {"id": self._id(call.id), "type": "function", "function": function}

    def _message(self, completion: Completion) -> dict[str, Any]:
        parsed = completion.parsed
        if parsed is None:
            return {"content": self._options.echo + completion.text}
        content = self._options.echo + "".join(parsed.content)
        reasoning = "".join(parsed.reasoning) if self._options.include_reasoning else ""
        calls = [self._call(call) for call in parsed.calls]
        message: dict[str, Any] = {
            "content": content if content or not (parsed.calls or parsed.reasoning) else None,
            "reasoning": reasoning or None,
            "reasoning_content": reasoning or None,
        }
        return {**message, "tool_calls": calls} if calls else message
