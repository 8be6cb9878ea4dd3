"""The shapes of /v1/completions."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from baton.gateway.formats import (
    NO_USAGE,
    CompletionLogprobs,
    StreamUsage,
    TextOffsets,
    TokenNames,
    encode,
    prompt_logprobs,
    usage,
)
from baton.gateway.generation import Completion, Generation, Update
from baton.gateway.prompts import Prompt
from baton.gateway.responses import now

_NO_TOKENS = b',"token_ids":null,"prompt_token_ids":null'
_PLAIN = b',"logprobs":null,"finish_reason":null,"stop_reason":null' + _NO_TOKENS + b"}]}\n\n"
_PLAIN_WITH_USAGE = _PLAIN[:-3] + NO_USAGE + _PLAIN[-3:]


@dataclass(slots=True, frozen=True)
class CompletionOptions:
    """What of the request concerns the answer's shape."""

    model: str
    n: int
    echo: bool
    logprobs: int | None
    """So many alternatives; with `echo` of the prompt's tokens too."""
    prompt_logprobs: int | None
    """vLLM's field."""
    token_ids: bool
    skip_special_tokens: bool
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
        self._offsets: dict[int, TextOffsets] = {}
        """Of each choice, if log-probabilities are wanted."""
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
        if not (options.echo or options.logprobs is not None or options.token_ids or self._usage.changes):
            self._plain = _PLAIN_WITH_USAGE if options.include_usage else _PLAIN

    def whole(self, completions: list[Completion]) -> dict[str, Any]:
        return {
            **self._head,
            "service_tier": None,
            "system_fingerprint": None,
            "choices": [self._choice(completion) for completion in completions],
            "usage": usage(self._generation),
            "kv_transfer_params": None,
        }

    def begin(self) -> bytes:
        return b""

    def chunk(self, update: Update) -> bytes:
        if self._plain is not None and update.finish_reason is None:
            return self._openings[update.index] + encode(update.text) + self._plain if update.text else b""
        options, index = self._options, update.index
        text, logprobs, token_ids, prompt_ids = update.text, b"null", b"null", b"null"
        first = not self._begun[index]
        wants_tokens = options.logprobs is not None or options.token_ids
        self._usage.add(len(update.token_ids))
        if not (text or update.finish_reason or (update.token_ids and wants_tokens)):
            return b""
        self._begun[index] = True
        if first and options.echo:
            text = self._prompt_text(index) + text
        if options.logprobs is not None:
            logprobs = encode(self._logprobs(index, update, text, with_prompt=first and options.echo))
        if options.token_ids:
            token_ids = encode(update.token_ids)
            if first:
                prompt_ids = encode(list(self._generation.sequences[index].prompt))
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
                b',"token_ids":',
                token_ids,
                b',"prompt_token_ids":',
                prompt_ids,
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
            "token_ids": None,
            "prompt_logprobs": None,
            "prompt_token_ids": None,
        }
        if options.logprobs is not None:
            choice["logprobs"] = self._logprobs(index, completion, choice["text"], with_prompt=options.echo)
        if options.prompt_logprobs is not None:
            items = sequence.prompt_logprobs or [None] * len(sequence.prompt)
            choice["prompt_logprobs"] = prompt_logprobs(items, self._names, options.prompt_logprobs)
        if options.token_ids:
            choice["token_ids"] = completion.token_ids
            choice["prompt_token_ids"] = list(sequence.prompt)
        return choice

    def _prompt_text(self, index: int) -> str:
        """As the client gave it; of token ids all, special ones too, as the model sees them."""
        prompt = self._prompts[index // self._options.n]
        if prompt.text is None:
            return self._names.tokenizer.decode(prompt.ids, skip_special_tokens=False)
        return prompt.text

    def _logprobs(
        self, index: int, new: Update | Completion, text: str, *, with_prompt: bool
    ) -> dict[str, Any]:
        """Of the prompt, if it is echoed here, and of the tokens in `new`; `text` is what the client gets."""
        logprobs, names, num_top = CompletionLogprobs(), self._names, self._options.logprobs or 0
        sequence = self._generation.sequences[index]
        offsets = self._offsets.get(index)
        if offsets is None:
            offsets = self._offsets[index] = TextOffsets(
                names.tokenizer, sequence.prompt, skip_special_tokens=self._options.skip_special_tokens
            )
        if with_prompt:
            items = sequence.prompt_logprobs or [None] * len(sequence.prompt)
            places = offsets.prompt(sequence.prompt, self._prompt_text(index), names.tokenizer)
            logprobs.add(zip(sequence.prompt, items, strict=True), names, places, num_top)
        places = offsets.generated(new.token_ids, text, ended=new.finish_reason is not None)
        logprobs.add(zip(new.token_ids, new.logprobs, strict=True), names, places, num_top)
        return asdict(logprobs)
