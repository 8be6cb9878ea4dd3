"""The shapes of /v1/completions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from baton.gateway.api.formats import (
    NO_USAGE,
    CompletionLogprobs,
    Part,
    StreamUsage,
    TextOffsets,
    TokenNames,
    encode,
    prompt_logprobs,
    usage,
)
from baton.gateway.generation.generation import Completion, Generation, Update
from baton.gateway.http.responses import now
from baton.gateway.text.prompts import Prompt

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
        "_prompt_texts",
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
        self._prompt_texts: dict[int, str] = {}
        """Of prompts that were given as ids and are echoed."""
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

    def whole(self, completions: list[Completion]) -> Iterator[Part]:
        yield 0, encode(self._head)[:-1] + b',"service_tier":null,"system_fingerprint":null,"choices":['
        for completion in completions:
            if completion.index:
                yield 0, b","
            yield from self._choice(completion)
        yield 0, b'],"usage":' + encode(usage(self._generation)) + b',"kv_transfer_params":null}'

    def begin(self) -> bytes:
        return b""

    def chunk(self, update: Update) -> bytes:
        if self._plain is not None and update.finish_reason is None:
            return self._openings[update.index] + encode(update.text) + self._plain if update.text else b""
        return b"".join([data for _, data in self.parts(update)])

    def parts(self, update: Update) -> Iterator[Part]:
        options, index = self._options, update.index
        text, token_ids, prompt_ids = update.text, b"null", b"null"
        first = not self._begun[index]
        wants_tokens = options.logprobs is not None or options.token_ids
        self._usage.add(len(update.token_ids))
        if not (text or update.finish_reason or (update.token_ids and wants_tokens)):
            return
        self._begun[index] = True
        if first and options.echo:
            text = self._prompt_text(index) + text
        if options.token_ids:
            token_ids = encode(update.token_ids)
            if first:
                prompt_ids = encode(list(self._generation.sequences[index].prompt))
        yield 1, self._openings[index] + encode(text) + b',"logprobs":'
        if options.logprobs is not None:
            yield from self._logprobs(index, update, text, with_prompt=first and options.echo)
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
                    token_ids,
                    b',"prompt_token_ids":',
                    prompt_ids,
                    b"}]",
                    self._usage.in_chunk(),
                    b"}\n\n",
                )
            ),
        )

    def end(self) -> bytes:
        return self._usage.at_end()

    def _choice(self, completion: Completion) -> Iterator[Part]:
        options, index = self._options, completion.index
        sequence = self._generation.sequences[index]
        text = (self._prompt_text(index) if options.echo else "") + completion.text
        yield 1, b'{"index":%d,"text":' % index + encode(text) + b',"logprobs":'
        if options.logprobs is not None:
            yield from self._logprobs(index, completion, text, with_prompt=options.echo)
        else:
            yield 0, b"null"
        ends = {
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "token_ids": completion.token_ids if options.token_ids else None,
        }
        yield 0, b"," + encode(ends)[1:-1] + b',"prompt_logprobs":'
        if options.prompt_logprobs is not None:
            items = sequence.prompt_logprobs or [None] * len(sequence.prompt)
            yield from prompt_logprobs(items, self._names, options.prompt_logprobs)
        else:
            yield 0, b"null"
        prompt = encode(list(sequence.prompt)) if options.token_ids else b"null"
        yield 0, b',"prompt_token_ids":' + prompt + b"}"

    def _prompt_text(self, index: int) -> str:
        """As the client gave it; of token ids all, special ones too, as the model sees them."""
        number = index // self._options.n
        prompt = self._prompts[number]
        if prompt.text is not None:
            return prompt.text
        text = self._prompt_texts.get(number)
        if text is None:
            text = self._names.tokenizer.decode(prompt.ids, skip_special_tokens=False)
            self._prompt_texts[number] = text
        return text

    def _logprobs(
        self, index: int, new: Update | Completion, text: str, *, with_prompt: bool
    ) -> Iterator[Part]:
        """Of the prompt, if it is echoed here, and of the tokens in `new`; `text` is what the client gets."""
        names = self._names
        logprobs = CompletionLogprobs(names, self._options.logprobs or 0)
        sequence = self._generation.sequences[index]
        offsets = self._offsets.get(index)
        if offsets is None:
            offsets = self._offsets[index] = TextOffsets(
                names.tokenizer, sequence.prompt, skip_special_tokens=self._options.skip_special_tokens
            )
        if with_prompt:
            items = sequence.prompt_logprobs or [None] * len(sequence.prompt)
            places = offsets.prompt(sequence.prompt, self._prompt_text(index), names.tokenizer)
            yield from logprobs.add(zip(sequence.prompt, items, strict=True), places)
        places = offsets.generated(new.token_ids, text, ended=new.finish_reason is not None)
        yield from logprobs.add(zip(new.token_ids, new.logprobs, strict=True), places)
        yield 0, logprobs.encoded()
