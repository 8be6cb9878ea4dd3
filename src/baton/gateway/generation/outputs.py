"""What the Python API returns (`LLM`, `AsyncLLM`), in vLLM's shapes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.gateway.api.calls import call_id
from baton.gateway.generation.ending import timings_of
from baton.gateway.generation.generation import Completion, Generation, Update
from baton.gateway.generation.routes import routed_experts
from baton.gateway.parsing.deltas import Call, Content, Parsed, Reasoning
from baton.observe.events.views import Timings
from baton.protocol.params.pooling import unpack_vector
from baton.protocol.params.sampling import TokenLogprobs

if TYPE_CHECKING:
    from baton.gateway.generation.routes import Ids


@dataclass
class ToolCall:
    """A call that the model asks for."""

    index: int
    id: str | None
    name: str | None
    """None, as is `id`, where these are more arguments of a call that began before."""
    arguments: str
    """A JSON object; only its beginning if the answer was cut off, or where more comes."""


@dataclass
class CompletionOutput:
    """One generated sequence."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    """Aligned with `token_ids`; None unless asked for."""
    finish_reason: str | None
    """`stop`, `length`, `tool_calls` or `abort`; None before the end."""
    stop_reason: int | str | None
    """The stop string or the asked-for stop token that ended the text; None for end-of-text or length."""
    content: str | None = None
    """Of a conversation: the answer itself, without what the model thought and called; None: none."""
    reasoning: str | None = None
    """Of a conversation: what the model thought before it, where it is known how it writes that."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    """Of a conversation: the calls, where it is known how the model writes them."""
    routed_experts: Ids | None = None
    """[tokens, mixtures, chosen] uint8 or uint16: the experts, in each layer that has some, of the prompt's
    tokens and of all generated ones but the last; None unless asked for."""

    @property
    def cumulative_logprob(self) -> float | None:
        return None if self.logprobs is None else sum(entry.logprob for entry in self.logprobs)


@dataclass
class RequestOutput:
    """The answer to one prompt."""

    request_id: str
    prompt: str | None
    """None where the prompt was given as token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One for each prompt token, the first None; None unless asked for."""
    num_cached_tokens: int = 0
    finished: bool = field(default=True)
    timings: Timings | None = field(default=None, compare=False)
    """Where its time went, in milliseconds (docs/observability.md); None before the end."""


@dataclass
class EmbeddingOutput:
    embedding: list[float]


@dataclass
class EmbeddingRequestOutput:
    """The vector of one prompt."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    num_cached_tokens: int = 0
    finished: bool = field(default=True)


@dataclass
class ScoringOutput:
    score: float


@dataclass
class ScoringRequestOutput:
    """How well a pair of texts fits."""

    request_id: str
    outputs: ScoringOutput
    finished: bool = field(default=True)


@dataclass
class ClassificationOutput:
    probs: list[float]
    """Of each label."""


@dataclass
class ClassificationRequestOutput:
    """What a model with a head of scores makes of a text."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: ClassificationOutput
    finished: bool = field(default=True)


def classes_of(generation: Generation, probs: list[float]) -> ClassificationRequestOutput:
    (sequence,) = generation.sequences
    return ClassificationRequestOutput(
        generation.request_id, list(sequence.prompt), ClassificationOutput(probs)
    )


def embedding_of(generation: Generation) -> EmbeddingRequestOutput:
    (sequence,) = generation.sequences
    return EmbeddingRequestOutput(
        generation.request_id,
        list(sequence.prompt),
        EmbeddingOutput(unpack_vector(sequence.pooled)),
        generation.num_cached or 0,
    )


def output_of(
    generation: Generation, completions: list[Completion], text: str | None, *, chat: bool, short_ids: bool
) -> RequestOutput:
    """`chat`: it answers a conversation; `short_ids`: see `call_id`."""
    return _request_output(
        generation, text, [_whole(completion, chat, short_ids) for completion in completions], finished=True
    )


class Assembler:
    """Makes `RequestOutput`s of one request's updates, as they come."""

    def __init__(
        self, generation: Generation, text: str | None, *, chat: bool, short_ids: bool, delta: bool
    ) -> None:
        """`delta`: each with what is new alone; else each with all so far."""
        self._generation = generation
        self._text = text
        self._chat = chat
        self._short_ids = short_ids
        self._completions = None if delta else generation.completions()
        self._fresh: dict[int, CompletionOutput] = {}

    def add(self, updates: Iterable[Update]) -> None:
        if self._completions is not None:
            self._generation.gather(updates, self._completions)
            return
        for update in updates:
            fresh = self._fresh.get(update.index)
            if fresh is None:
                fresh = self._fresh[update.index] = CompletionOutput(update.index, "", [], None, None, None)
            self._append(fresh, update)

    def output(self, *, finished: bool) -> RequestOutput:
        """Of the updates so far; with `delta`, of those since the last output."""
        if self._completions is None:
            outputs = [self._fresh[index] for index in sorted(self._fresh)]
            self._fresh = {}
        else:
            outputs = [_whole(completion, self._chat, self._short_ids) for completion in self._completions]
        return _request_output(self._generation, self._text, outputs, finished=finished)

    def _append(self, fresh: CompletionOutput, update: Update) -> None:
        fresh.text += update.text
        fresh.token_ids += update.token_ids
        if update.logprobs:
            fresh.logprobs = [*(fresh.logprobs or ()), *update.logprobs]
        fresh.finish_reason = _reason(update.finish_reason, update.called)
        fresh.stop_reason = update.stop_reason
        if update.deltas is None:
            if self._chat:
                fresh.content = (fresh.content or "") + update.text
            return
        for delta in update.deltas:
            match delta:
                case Content(text):
                    fresh.content = (fresh.content or "") + text
                case Reasoning(text):
                    fresh.reasoning = (fresh.reasoning or "") + text
                case Call(index, None, arguments):
                    last = fresh.tool_calls[-1] if fresh.tool_calls else None
                    if last is not None and last.index == index:
                        last.arguments += arguments
                    else:
                        fresh.tool_calls.append(ToolCall(index, None, None, arguments))
                case Call(index, name, arguments, own):
                    own = call_id(own, short=self._short_ids)
                    fresh.tool_calls.append(ToolCall(index, own, name, arguments))


def _request_output(
    generation: Generation, text: str | None, outputs: list[CompletionOutput], *, finished: bool
) -> RequestOutput:
    first = generation.sequences[0]
    for output in outputs if finished else ():
        output.routed_experts = routed_experts(generation, output.index)
    return RequestOutput(
        request_id=generation.request_id,
        prompt=text,
        prompt_token_ids=list(first.prompt),
        prompt_logprobs=first.prompt_logprobs or None,
        num_cached_tokens=(generation.num_cached or 0) if finished else 0,
        outputs=outputs,
        finished=finished,
        timings=timings_of(generation) if finished else None,
    )


def _whole(completion: Completion, chat: bool, short_ids: bool) -> CompletionOutput:
    text, parsed = completion.text, completion.parsed
    if parsed is None:
        content, reasoning, calls = (text if chat else None), None, list[ToolCall]()
    else:
        content, reasoning, calls = _apart(parsed, short_ids)
    return CompletionOutput(
        index=completion.index,
        text=text,
        token_ids=completion.token_ids.copy(),
        logprobs=completion.logprobs.copy() or None,
        finish_reason=_reason(completion.finish_reason, completion.called),
        stop_reason=completion.stop_reason,
        content=content,
        reasoning=reasoning,
        tool_calls=calls,
    )


def _apart(parsed: Parsed, short_ids: bool) -> tuple[str | None, str | None, list[ToolCall]]:
    """Names calls that have no name yet, so they keep it."""
    for call in parsed.calls:
        call.id = call_id(call.id, short=short_ids)
    calls = [
        ToolCall(index, call.id, call.name, "".join(call.arguments))
        for index, call in enumerate(parsed.calls)
    ]
    content, reasoning = "".join(parsed.content), "".join(parsed.reasoning)
    return content if content or not (calls or reasoning) else None, reasoning or None, calls


def _reason(reason: str | None, called: bool) -> str | None:
    return "tool_calls" if called and reason == "stop" else reason
