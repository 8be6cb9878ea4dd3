"""The shapes of /v1/completions."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from baton.gateway.formats import (
    NO_USAGE,
    CompletionLogprobs,
    StreamUsage,
    TokenNames,
    encode,
    prompt_logprobs,
    usage,
)
from baton.gateway.generation import Completion, Generation, Update
from baton.gateway.prompts import Prompt
from baton.gateway.responses import now

_PLAIN = b',"logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'
_PLAIN_WITH_USAGE = _PLAIN[:-3] + NO_USAGE + _PLAIN[-3:]


@dataclass(slots=True, frozen=True)
class CompletionOptions:
    """What of the request concerns the answer's shape."""

    model: str
    n: int
    echo: bool
    logprobs: bool
    """`logprobs` was given."""
    prompt_logprobs: bool
    """vLLM's field was given."""
    token_ids: bool
    include_usage: bool
    continuous_usage: bool


class CompletionRenderer:
    """A `Renderer`."""

    __slots__ = (
        "_begun",
        "_generation",
        "_head",
        "_names",
        "_offsets",
        "_openings",
        "_options",
        "_plain",
        "_prompts",
        "_usage",
    )

    def __init__(
        self, generation: Generation, prompts: list[Prompt], options: CompletionOptions, names: TokenNames
    ) -> None:
        self._generation = generation
        self._prompts = prompts
        self._options = options
        self._names = names
        self._offsets = [0] * len(generation.sequences)
        """Characters of each choice that its log-probabilities have covered."""
        self._begun = [False] * len(generation.sequences)
        self._head = {
            "id": f"cmpl-{generation.request_id}",
            "object": "text_completion",
            "created": now(),
            "model": options.model,
        }
        self._usage = StreamUsage(generation, self._head, options.include_usage, options.continuous_usage)
        opening = encode(self._head)[:-1]
        self._openings = tuple(
            b"data: " + opening + b',"choices":[{"index":%d,"text":' % index
            for index in range(len(generation.sequences))
        )
        self._plain: bytes | None = None
        """What follows the text in a chunk that brings nothing but text; None if each is different."""
        if not (options.echo or options.logprobs or options.token_ids or self._usage.changes):
            self._plain = _PLAIN_WITH_USAGE if options.include_usage else _PLAIN

    def whole(self, completions: list[Completion]) -> dict[str, Any]:
        return {
            **self._head,
            "choices": [self._choice(completion) for completion in completions],
            "usage": usage(self._generation),
        }

    def begin(self) -> bytes:
        return b""

    def chunk(self, update: Update) -> bytes:
        if self._plain is not None and update.finish_reason is None:
            return self._openings[update.index] + encode(update.text) + self._plain if update.text else b""
        options, index = self._options, update.index
        text, logprobs, extra = update.text, b"null", b""
        first = not self._begun[index]
        if not (
            text or update.finish_reason or (update.token_ids and (options.logprobs or options.token_ids))
        ):
            return b""
        self._begun[index] = True
        if first and options.echo:
            text = self._prompt_text(index) + text
        if options.logprobs:
            logprobs = encode(self._logprobs(index, update, with_prompt=first and options.echo))
        if options.token_ids:
            extra = b',"token_ids":' + encode(update.token_ids)
            if first:
                extra += b',"prompt_token_ids":' + encode(list(self._generation.sequences[index].prompt))
        return b"".join(
            (
                self._openings[index],
                encode(text),
                b',"logprobs":',
                logprobs,
                b',"finish_reason":',
                encode(update.finish_reason),
                b',"stop_reason":',
                encode(update.stop_reason),
                extra,
                b"}]",
                self._usage.in_chunk(),
                b"}\n\n",
            )
        )

    def end(self) -> bytes:
        return self._usage.at_end()

    def _choice(self, completion: Completion) -> dict[str, Any]:
        options, index = self._options, completion.index
        sequence = self._generation.sequences[index]
        choice: dict[str, Any] = {
            "index": index,
            "text": (self._prompt_text(index) if options.echo else "") + completion.text,
            "logprobs": None,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if options.logprobs:
            choice["logprobs"] = self._logprobs(index, completion, with_prompt=options.echo)
        if options.prompt_logprobs:
            items = sequence.prompt_logprobs or [None] * len(sequence.prompt)
            choice["prompt_logprobs"] = prompt_logprobs(items, self._names)
        if options.token_ids:
            choice["token_ids"] = completion.token_ids
            choice["prompt_token_ids"] = list(sequence.prompt)
        return choice

    def _prompt_text(self, index: int) -> str:
        prompt = self._prompts[index // self._options.n]
        return self._names.tokenizer.decode(prompt.ids) if prompt.text is None else prompt.text

    def _logprobs(self, index: int, new: Update | Completion, *, with_prompt: bool) -> dict[str, Any]:
        logprobs = CompletionLogprobs()
        if with_prompt:
            sequence = self._generation.sequences[index]
            items = sequence.prompt_logprobs or [None] * len(sequence.prompt)
            self._offsets[index] = logprobs.add(
                zip(sequence.prompt, items, strict=True), self._names, self._offsets[index]
            )
        self._offsets[index] = logprobs.add(
            zip(new.token_ids, new.logprobs, strict=True), self._names, self._offsets[index]
        )
        return asdict(logprobs)
