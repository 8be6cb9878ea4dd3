"""The shapes of /v1/completions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from baton.gateway.generation.generation import Completion, Generation, Update
from baton.gateway.reading.prompts import Prompt
from baton.gateway.rendering.chunks import ChunkRenderer, Shape
from baton.gateway.rendering.formats import (
    CompletionLogprobs,
    Part,
    TokenNames,
    encode,
    timings_member,
    usage,
)
from baton.gateway.rendering.offsets import TextOffsets

_NO_TOKENS = b',"token_ids":null,"prompt_token_ids":null'
_PLAIN = b',"logprobs":null,"finish_reason":null,"stop_reason":null' + _NO_TOKENS + b"}]}\n\n"


@dataclass(slots=True, frozen=True, kw_only=True)
class CompletionOptions(Shape):
    n: int
    echo: bool
    logprobs: int | None
    """So many alternatives; with `echo` of the prompt's tokens too."""
    skip_special_tokens: bool


class CompletionRenderer(ChunkRenderer):
    """A `Renderer`."""

    __slots__ = ("_begun", "_offsets", "_options", "_prompt_texts", "_prompts")

    def __init__(
        self, generation: Generation, prompts: list[Prompt], options: CompletionOptions, names: TokenNames
    ) -> None:
        alike = not (options.echo or options.logprobs is not None or options.token_ids)
        super().__init__(
            generation,
            names,
            options,
            prefix="cmpl",
            kind="text_completion",
            member=b"text",
            plain=_PLAIN if alike else None,
        )
        self._prompts = prompts
        self._options = options
        self._offsets: dict[int, TextOffsets] = {}
        """Of each choice, if log-probabilities are wanted."""
        self._prompt_texts: dict[int, str] = {}
        """Of prompts that were given as ids and are echoed."""
        self._begun = [False] * len(generation.sequences)

    def whole(self, completions: list[Completion]) -> Iterator[Part]:
        yield 0, encode(self._head)[:-1] + b',"service_tier":null,"system_fingerprint":null,"choices":['
        for completion in completions:
            if completion.index:
                yield 0, b","
            yield from self._choice(completion)
        yield 0, b'],"usage":' + encode(usage(self._generation)) + b',"kv_transfer_params":null'
        yield 0, timings_member(self._generation, self._shape.timings) + b"}"

    def begin(self) -> bytes:
        return b""

    def chunk(self, update: Update) -> bytes:
        if self._plain is not None and update.finish_reason is None:
            return self._openings[update.index] + encode(update.text) + self._plain if update.text else b""
        return b"".join([data for _, data in self.parts(update)])

    def parts(self, update: Update) -> Iterator[Part]:
        options, index = self._options, update.index
        text, prompt_ids = update.text, b"null"
        first = not self._begun[index]
        wants_tokens = options.logprobs is not None or options.token_ids
        places: list[int] = []
        if options.logprobs is not None:
            update, places = self._told(update)
        self._usage.add(len(update.token_ids))
        if not (text or update.finish_reason or (update.token_ids and wants_tokens)):
            return
        self._begun[index] = True
        if first and options.echo:
            text = self._prompt_text(index) + text
        if first:
            prompt_ids = self._prompt_ids(self._generation.sequences[index])
        yield 1, self._openings[index] + encode(text) + b',"logprobs":'
        if options.logprobs is not None:
            yield from self._logprobs(index, update, iter(places), with_prompt=first and options.echo)
        else:
            yield 0, b"null"
        yield 0, self._event_end(update, b',"prompt_token_ids":' + prompt_ids)

    def _choice(self, completion: Completion) -> Iterator[Part]:
        options, index = self._options, completion.index
        sequence = self._generation.sequences[index]
        text = (self._prompt_text(index) if options.echo else "") + completion.text
        yield 1, b'{"index":%d,"text":' % index + encode(text) + b',"logprobs":'
        if options.logprobs is not None:
            places = self._offsets_of(index).generated(completion.token_ids, completion.text)
            yield from self._logprobs(index, completion, places, with_prompt=options.echo)
        else:
            yield 0, b"null"
        yield 0, b"," + encode(self._ends(completion))[1:-1] + b',"prompt_logprobs":'
        yield from self._prompt_logprobs(sequence)
        yield from self._routes(completion)
        yield 0, b',"prompt_token_ids":' + self._prompt_ids(sequence) + b"}"

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

    def _offsets_of(self, index: int) -> TextOffsets:
        offsets = self._offsets.get(index)
        if offsets is None:
            offsets = self._offsets[index] = TextOffsets(
                self._names.tokenizer,
                self._generation.sequences[index].prompt,
                echoed=len(self._prompt_text(index)) if self._options.echo else 0,
                skip_special_tokens=self._options.skip_special_tokens,
            )
        return offsets

    def _told(self, update: Update) -> tuple[Update, list[int]]:
        """What of it a chunk tells, and where its tokens are."""
        ids, logprobs, places = self._offsets_of(update.index).streamed(
            update.token_ids, update.logprobs, update.text, ended=update.finish_reason is not None
        )
        return replace(update, token_ids=ids, logprobs=logprobs), places

    def _logprobs(
        self, index: int, new: Update | Completion, places: Iterator[int], *, with_prompt: bool
    ) -> Iterator[Part]:
        """Of the prompt, if it is echoed here, and of the tokens in `new`, which are at these places."""
        names = self._names
        logprobs = CompletionLogprobs(names, self._options.logprobs or 0)
        if with_prompt:
            sequence = self._generation.sequences[index]
            items = sequence.prompt_logprobs or [None] * len(sequence.prompt)
            of_prompt = self._offsets_of(index).prompt(
                sequence.prompt, self._prompt_text(index), names.tokenizer
            )
            yield from logprobs.add(zip(sequence.prompt, items, strict=True), of_prompt)
        yield from logprobs.add(zip(new.token_ids, new.logprobs, strict=True), places)
        yield 0, logprobs.encoded()
