"""The Python API: `LLM(model).generate(prompts, params)`, without a server.

An `LLM` starts one instance (an engine process and its workers, as `baton serve` does) and talks to it
from a background thread that runs an event loop (`launch/background.py`).  The methods here are ordinary
blocking calls, safe to use from several threads.  Names and results follow vLLM's offline API.

As a library in another program it leaves the root logger alone, does nothing in a child made by fork(),
and may be forgotten instead of closed.
"""

from __future__ import annotations

import itertools
import logging
import sys
import weakref
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from baton.gateway.api.messages import ContentFormat, read_messages
from baton.gateway.errors import BadRequest
from baton.gateway.generation.gathering import Gathering
from baton.gateway.generation.generation import Completion, Generation
from baton.gateway.text.tokenizer import Tokenizer
from baton.launch.arguments import choose_arguments, takes_arguments_of
from baton.launch.background import Background
from baton.launch.options import EngineOptions
from baton.launch.plan import ServerPlan, make_plan
from baton.protocol.pooling import Pooling, unpack_vector
from baton.protocol.sampling import TokenLogprobs
from baton.protocol.sampling_params import NO_TOKENS, SamplingParams, make_params

__all__ = [
    "LLM",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "RequestOutput",
    "SamplingParams",
]

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids (an array of them too), or {"prompt": text} / {"prompt_token_ids": ids}."""
Message = Mapping[str, Any]

log = logging.getLogger(__name__)

_TOGETHER = 32
"""Prompts that are sent together: enough for a step that is worth its while, not so many that the instance
waits long for the first one."""


@dataclass
class CompletionOutput:
    """One generated sequence."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    """Aligned with `token_ids`; None unless asked for."""
    finish_reason: str | None
    """`stop` or `length`."""
    stop_reason: int | str | None
    """The stop string or the asked-for stop token that ended the text; None for end-of-text or length."""

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


class LLM:
    """An instance of a model in processes of its own.  Close it, or use it in a `with` block.

    `model` is a directory or a hub name, None the embedded model.  Keyword arguments have the names of `baton
    serve`'s flags; `docs/flags.md` lists them.  What is not given comes from the environment (`BATON_…`),
    from the file `config`, or is the default.  `log_level` is that of the instance's processes, and of
    this process if it has not configured logging itself.  Raises `ValueError` with one line for a model or an
    argument that cannot be served, `InstanceFailed` if the instance does not start.
    """

    @takes_arguments_of(EngineOptions)
    def __init__(self, model: str | None = None, **given: Any) -> None:
        chosen = choose_arguments({"model": model, **given})
        with chosen.spelled():
            plan = make_plan(chosen.options)
        _log_somewhere(chosen.options.log_level)
        for remark in chosen.remarks:
            log.warning("%s", remark)
        self._begin(plan)

    @classmethod
    def planned(cls, plan: ServerPlan) -> LLM:
        """With what was resolved already: for the command line."""
        llm = cls.__new__(cls)
        llm._begin(plan)
        return llm

    def _begin(self, plan: ServerPlan) -> None:
        self._plan = plan
        self._ids = itertools.count()
        self._background = Background(self._plan)
        self._close = weakref.finalize(self, self._background.stop)
        try:
            self._background.start()
        except BaseException:
            self._close()
            raise

    @property
    def model_name(self) -> str:
        return self._plan.served.name

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest prompt and its answer together."""
        return self._plan.served.max_model_len

    def get_tokenizer(self) -> Tokenizer:
        return self._background.tokenizer

    def default_sampling_params(self, **given: Any) -> SamplingParams:
        """The model's recommended parameters (generation_config.json), changed by what is given."""
        return make_params(self._plan.served.defaults, given)

    def close(self) -> None:
        """Stops the instance.  A second call does nothing."""
        self._close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int = 0,
    ) -> list[RequestOutput]:
        """Completes every prompt; all run as one continuous batch.  `use_tqdm` shows a progress bar.

        One `SamplingParams` for all, or one for each prompt; None takes the model's defaults.
        Raises `ValueError` for a prompt or parameter that cannot be served.
        """
        several = _as_list(prompts)
        texts, ids = zip(*(self._prompt(prompt, i) for i, prompt in enumerate(several)), strict=True)
        return self._run(list(ids), list(texts), sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation, or several, rendered with the model's chat template.

        Raises `ValueError` for messages or parameters that cannot be served, with the field's name.
        """
        rendered = [
            self._render(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables=chat_template_kwargs,
            )
            for conversation in _conversations(messages, self._content_format)
        ]
        ids = [self._background.tokenizer.encode(text, add_special_tokens=False) for text in rendered]
        return self._run(ids, list(rendered), sampling_params, use_tqdm, 0)

    def chat_stream(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Generator[str, None, None]:
        """The answer's text in pieces, as they come.  Closing the generator cancels the request."""
        text = self._render(_messages(messages, self._content_format), add_generation_prompt=True)
        ids = self._background.tokenizer.encode(text, add_special_tokens=False)
        params = (sampling_params or make_params(self._plan.served.defaults, {}, max_tokens=None)).replace(
            n=1
        )
        generation = self._background.call(self._start_one(ids, params))
        try:
            while not generation.done:
                for update in self._background.call(generation.next()):
                    if update.text:
                        yield update.text
        finally:
            self._background.post(generation.close)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        dimensions: int | None = None,
        normalize: bool | None = None,
        priority: int = 0,
    ) -> list[EmbeddingRequestOutput]:
        """The vector of each prompt; all run as one continuous batch.  Needs `runner="pooling"`, or
        `convert="embed"` beside texts, unless the checkpoint is an embedding model.

        `dimensions`: of each vector, the first so many; `normalize` None: as the checkpoint says.  Raises
        `ValueError` for a prompt that cannot be served.
        """
        pooling = self._plan.served.pooling
        most = self._plan.served.dimensions
        if dimensions is not None:
            if dimensions < 1 or (most and dimensions > most):
                raise ValueError(f"dimensions: {dimensions} must be from 1 to {most}")
            pooling = replace(pooling, dimensions=dimensions)
        if normalize is not None:
            pooling = replace(pooling, normalize=normalize)
        ids = [self._prompt(prompt, i)[1] for i, prompt in enumerate(_as_list(prompts))]
        return self._pool(ids, pooling, use_tqdm, priority)

    # -- inside

    def _pool(
        self, prompts: list[list[int]], pooling: Pooling, show_progress: bool, priority: int
    ) -> list[EmbeddingRequestOutput]:
        async def everything() -> list[EmbeddingRequestOutput]:
            started: list[Generation] = []
            try:
                await self._background.ready()
                for first in range(0, len(prompts), _TOGETHER):
                    with self._background.together():
                        started += [
                            self._start(ids, NO_TOKENS, priority, pooling=pooling)
                            for ids in prompts[first : first + _TOGETHER]
                        ]
                with _progress(len(started), show_progress, "Embedding") as advance:
                    await Gathering(started, advance).completions()
                return list(map(_embedding, started))
            finally:
                for generation in started:
                    generation.close()

        return self._background.call(everything())

    def _prompt(self, prompt: Prompt, number: int) -> tuple[str | None, list[int]]:
        where = f"prompts[{number}]"
        if isinstance(prompt, Mapping):
            if prompt.get("prompt_token_ids") is not None:
                return prompt.get("prompt"), _ids(prompt["prompt_token_ids"], f"{where}.prompt_token_ids")
            if not isinstance(prompt.get("prompt"), str):
                raise ValueError(f'{where}: a mapping needs "prompt", a text, or "prompt_token_ids"')
            prompt = prompt["prompt"]
        if isinstance(prompt, str):
            return prompt, self._background.tokenizer.encode(prompt)
        return None, _ids(prompt, where)

    @property
    def _content_format(self) -> ContentFormat:
        asked = self._plan.served.content_format
        return self._background.tokenizer.content_format if asked == "auto" else asked

    def _render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        return self._background.tokenizer.render_chat(messages, **options)

    async def _start_one(self, prompt: list[int], params: SamplingParams) -> Generation:
        await self._background.ready()
        return self._start(prompt, params)

    def _start(
        self,
        prompt: list[int],
        params: SamplingParams,
        priority: int = 0,
        *,
        patient: bool = False,
        pooling: Pooling | None = None,
    ) -> Generation:
        return self._background.generations.start(
            [prompt],
            params,
            request_id=f"llm-{next(self._ids)}",
            priority=priority,
            patient=patient,
            pooling=pooling,
        )

    def _run(
        self,
        prompts: list[list[int]],
        texts: list[str | None],
        params: SamplingParams | Sequence[SamplingParams] | None,
        show_progress: bool,
        priority: int,
    ) -> list[RequestOutput]:
        if params is None:
            params = self.default_sampling_params()
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else _params(params)
        if len(each) != len(prompts):
            raise ValueError(f"sampling_params: {len(each)} for {len(prompts)} prompts; give one or one each")

        async def everything() -> list[RequestOutput]:
            started: list[Generation] = []
            try:
                await self._background.ready()
                todo = list(zip(prompts, each, strict=True))
                for first in range(0, len(todo), _TOGETHER):
                    with self._background.together():
                        for ids, one in todo[first : first + _TOGETHER]:
                            started.append(self._start(ids, one, priority, patient=True))
                with _progress(len(started), show_progress) as advance:
                    each_one = await Gathering(started, advance).completions()
                return list(map(_output, started, each_one, texts))
            finally:
                for generation in started:
                    generation.close()

        return self._background.call(everything())


class _progress:
    """A progress bar over finished requests; `with _progress(n, shown) as advance`."""

    def __init__(self, total: int, shown: bool, name: str = "Generating") -> None:
        self._total, self._shown, self._name = total, shown, name

    def __enter__(self) -> Any:
        if not self._shown:
            return lambda: None
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        )
        self._bar.start()
        task = self._bar.add_task(self._name, total=self._total)
        return lambda: self._bar.advance(task)

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._bar.stop()


def _log_somewhere(level: str) -> None:
    """Warnings of Baton go to stderr if the program has no opinion on logging; else nothing is touched."""
    logger = logging.getLogger("baton")
    if logger.hasHandlers():
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s llm      %(message)s", "%H:%M:%S"))
    logger.addHandler(handler)
    logger.setLevel(level.upper())


def _plain(value: Any) -> Any:
    """Arrays (numpy, torch) as the lists that they stand for."""
    return value.tolist() if hasattr(value, "tolist") else value


def _is_id(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (text, ids or a mapping) counts as a list of one."""
    prompts = _plain(prompts)
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise ValueError(f"prompts: {prompts!r} must be a text, token ids, or a list of such")
    items: list[Any] = [item if type(item) in (list, str) else _plain(item) for item in prompts]
    if not items:
        raise ValueError("prompts: the list is empty; give at least one prompt")
    return [items] if all(map(_is_id, items)) else items


def _ids(value: Any, where: str) -> list[int]:
    value = _plain(value)
    if type(value) is list and set(map(type, value)) <= {int}:
        return value.copy()
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise ValueError(f"{where}: {value!r} must be a text or a list of token ids")
    ids = [_plain(item) for item in value]
    if not all(map(_is_id, ids)):
        wrong = next(item for item in ids if not _is_id(item))
        raise ValueError(f"{where}: {wrong!r} must be a token id, an integer")
    return ids


def _params(params: Any) -> list[SamplingParams]:
    several = list(params) if isinstance(params, Sequence) else [params]
    for one in several:
        if not isinstance(one, SamplingParams):
            raise ValueError(f"sampling_params: {one!r} must be SamplingParams")
    return several


def _conversations(messages: Any, content_format: ContentFormat) -> list[list[dict[str, Any]]]:
    """One conversation, or several, checked."""
    if not isinstance(messages, Sequence) or not messages or not isinstance(messages[0], list | tuple):
        return [_messages(messages, content_format)]
    conversations = []
    for number, conversation in enumerate(messages):
        try:
            conversations.append(_messages(conversation, content_format))
        except BadRequest as error:
            raise ValueError(f"conversation {number}: {error}") from None
    return conversations


def _messages(messages: Any, content_format: ContentFormat) -> list[dict[str, Any]]:
    return read_messages(list(messages) if isinstance(messages, tuple) else messages, content_format)


def _embedding(generation: Generation) -> EmbeddingRequestOutput:
    (sequence,) = generation.sequences
    return EmbeddingRequestOutput(
        generation.request_id,
        list(sequence.prompt),
        EmbeddingOutput(unpack_vector(sequence.pooled)),
        generation.num_cached or 0,
    )


def _output(generation: Generation, completions: list[Completion], text: str | None) -> RequestOutput:
    first = generation.sequences[0]
    return RequestOutput(
        request_id=generation.request_id,
        prompt=text,
        prompt_token_ids=list(first.prompt),
        prompt_logprobs=first.prompt_logprobs or None,
        num_cached_tokens=generation.num_cached or 0,
        outputs=[
            CompletionOutput(
                index=completion.index,
                text=completion.text,
                token_ids=completion.token_ids,
                logprobs=completion.logprobs or None,
                finish_reason=completion.finish_reason,
                stop_reason=completion.stop_reason,
            )
            for completion in completions
        ],
    )
