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
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from msgspec.structs import replace

from baton.gateway.api.messages import ContentFormat
from baton.gateway.api.tools import read_tools
from baton.gateway.generation.gathering import Gathering
from baton.gateway.generation.generation import Completion, Generation
from baton.gateway.generation.outputs import (
    ClassificationRequestOutput,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    classes_of,
    embedding_of,
    output_of,
)
from baton.gateway.parsing.choice import choose
from baton.gateway.reading.arguments import (
    Prompt,
    as_list,
    conversations_of,
    messages_of,
    several_params,
    token_ids,
)
from baton.gateway.reading.judging import activated, checked, judging, scorer_of, scores_of
from baton.gateway.reading.pooled import prompts_of
from baton.gateway.reading.structured import CheckedGrammars
from baton.gateway.text.tokenizer import Tokenizer
from baton.launch.arguments import choose_arguments, takes_arguments_of
from baton.launch.background import Background
from baton.launch.options import EngineOptions
from baton.launch.plan import ServerPlan, make_plan
from baton.launch.progress import Progress
from baton.observe.logs import log_somewhere
from baton.protocol.pooling import SCORES, Pooling, unpack_vector
from baton.protocol.sampling_params import NO_TOKENS, SamplingParams, make_params
from baton.protocol.structured_outputs import StructuredOutputs

__all__ = [
    "LLM",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputs",
]

Message = Mapping[str, Any]

log = logging.getLogger(__name__)

_TOGETHER = 32
"""Prompts that are sent together: enough for a step that is worth its while, not so many that the instance
waits long for the first one."""


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
        log_somewhere(chosen.options.log_level)
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
        self._grammars = CheckedGrammars(self._background.tokenizer)
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
        several = as_list(prompts)
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
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation, or several, rendered with the model's chat template.

        `tools`: OpenAI's, for the template; what the model writes of calls is part of the text.

        Raises `ValueError` for messages or parameters that cannot be served, with the field's name.
        """
        rendered = [
            self._render(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables=chat_template_kwargs,
                tools=self._tools(tools),
            )
            for conversation in conversations_of(messages, self._content_format)
        ]
        ids = [self._background.tokenizer.encode(text, add_special_tokens=False) for text in rendered]
        return self._run(ids, list(rendered), sampling_params, use_tqdm, 0)

    def chat_stream(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Generator[str, None, None]:
        """The answer's text in pieces, as they come.  Closing the generator cancels the request."""
        text = self._render(messages_of(messages, self._content_format), add_generation_prompt=True)
        ids = self._background.tokenizer.encode(text, add_special_tokens=False)
        params = (sampling_params or make_params(self._plan.served.defaults, {}, max_tokens=None)).replace(
            n=1
        )
        generation = self._background.call(self._start_one(ids, params, self._grammar(params)))
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
        ids = [self._prompt(prompt, i)[1] for i, prompt in enumerate(as_list(prompts))]
        return list(map(embedding_of, self._pool(ids, pooling, use_tqdm, priority, "Embedding")))

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        use_tqdm: bool = True,
        instruction: str | None = None,
        priority: int = 0,
    ) -> list[ScoringRequestOutput]:
        """How well pairs of texts fit: one of `data_1` for all of `data_2`, or one for each.

        By what the model says of each pair (`convert="classify"`; `instruction`: what makes them fit), else
        by the cosine of their vectors.  Raises `ValueError` for texts that cannot be served.
        """
        served, tokenizer = self._plan.served, self._background.tokenizer
        self._check_task("score")
        queries, documents = [[one] if isinstance(one, str) else list(one) for one in (data_1, data_2)]
        if not queries or len(queries) not in (1, len(documents)):
            raise ValueError(f"data_1: {len(queries)} for {len(documents)} of data_2; give one, or as many")
        judge = served.judge
        texts = prompts_of(queries, documents, judge, instruction)
        ids = [tokenizer.encode(text, add_special_tokens=judge is None or judge.head) for text in texts]
        pooling = replace(served.pooling, normalize=True) if judge is None else judging(judge, tokenizer)
        found = self._pool(ids, pooling, use_tqdm, priority, "Scoring")
        results = [generation.sequences[0].pooled for generation in found]
        scores = scores_of(results, len(queries), scorer_of(served))
        own = found[len(found) - len(documents) :]
        return [
            ScoringRequestOutput(generation.request_id, ScoringOutput(score))
            for generation, score in zip(own, scores, strict=True)
        ]

    def classify(
        self, prompts: Prompt | Sequence[Prompt], *, use_tqdm: bool = True, priority: int = 0
    ) -> list[ClassificationRequestOutput]:
        """What a model with a head of scores makes of each prompt: the likelihoods of its labels.  Raises
        `ValueError` for a prompt that cannot be served, and of a model without such a head."""
        self._check_task("classify")
        ids = [self._prompt(prompt, i)[1] for i, prompt in enumerate(as_list(prompts))]
        found = self._pool(ids, SCORES, use_tqdm, priority, "Classifying")
        activation = self._plan.served.activation
        return [
            classes_of(generation, activated(checked(unpack_vector(data)), activation))
            for generation in found
            for data in [generation.sequences[0].pooled]
        ]

    # -- inside

    def _check_task(self, task: Literal["score", "classify"]) -> None:
        served = self._plan.served
        if served.labels and task not in served.tasks:
            raise ValueError(f"score: the model has {len(served.labels)} labels, not one; use classify")
        if task == "classify" and not served.labels:
            raise ValueError("classify: the model has no head of scores (…ForSequenceClassification)")

    def _pool(
        self, prompts: list[list[int]], pooling: Pooling, show_progress: bool, priority: int, name: str
    ) -> list[Generation]:
        starts = [partial(self._start, ids, NO_TOKENS, priority, pooling=pooling) for ids in prompts]
        return [generation for generation, _ in self._complete(starts, show_progress, name)]

    def _prompt(self, prompt: Prompt, number: int) -> tuple[str | None, list[int]]:
        where = f"prompts[{number}]"
        if isinstance(prompt, Mapping):
            if prompt.get("prompt_token_ids") is not None:
                return prompt.get("prompt"), token_ids(
                    prompt["prompt_token_ids"], f"{where}.prompt_token_ids"
                )
            if not isinstance(prompt.get("prompt"), str):
                raise ValueError(f'{where}: a mapping needs "prompt", a text, or "prompt_token_ids"')
            prompt = prompt["prompt"]
        if isinstance(prompt, str):
            return prompt, self._background.tokenizer.encode(prompt)
        return None, token_ids(prompt, where)

    @property
    def _content_format(self) -> ContentFormat:
        asked = self._plan.served.content_format
        return self._background.tokenizer.content_format if asked == "auto" else asked

    def _tools(self, tools: Sequence[Mapping[str, Any]] | None) -> Sequence[Mapping[str, Any]] | None:
        """None where there are none.  Raises `BadRequest`, a `ValueError`."""
        if not read_tools(tools).names:
            return None
        if not choose(self._background.tokenizer.template_source).template_has_tools:
            raise ValueError("tools: the model's chat template has no place for tools")
        return tools

    def _render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        options["variables"] = {**self._plan.served.template_defaults, **(options.get("variables") or {})}
        return self._background.tokenizer.render_chat(messages, **options)

    def _grammar(self, params: SamplingParams) -> str:
        """What binds the answers; "": nothing.  Raises `ValueError` for what cannot be enforced."""
        wanted = params.structured_outputs
        return "" if wanted is None else self._grammars.of(wanted)

    async def _start_one(self, prompt: list[int], params: SamplingParams, grammar: str) -> Generation:
        await self._background.ready()
        return self._start(prompt, params, grammar=grammar)

    def _start(
        self,
        prompt: list[int],
        params: SamplingParams,
        priority: int = 0,
        *,
        patient: bool = False,
        pooling: Pooling | None = None,
        grammar: str = "",
    ) -> Generation:
        return self._background.generations.start(
            [prompt],
            params,
            request_id=f"llm-{next(self._ids)}",
            priority=priority,
            patient=patient,
            pooling=pooling,
            grammar=grammar,
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
        each = several_params(params, len(prompts), routes=self._plan.served.routing is not None)
        starts = [
            partial(self._start, ids, one, priority, patient=True, grammar=self._grammar(one))
            for ids, one in zip(prompts, each, strict=True)
        ]
        done = self._complete(starts, show_progress, "Generating")
        return [output_of(*one, text) for one, text in zip(done, texts, strict=True)]

    def _complete(
        self, starts: Sequence[Callable[[], Generation]], show_progress: bool, name: str
    ) -> list[tuple[Generation, list[Completion]]]:
        """Runs all of them to their ends."""

        async def everything() -> list[tuple[Generation, list[Completion]]]:
            started: list[Generation] = []
            try:
                await self._background.ready()
                for first in range(0, len(starts), _TOGETHER):
                    with self._background.together():
                        started += [start() for start in starts[first : first + _TOGETHER]]
                with Progress(len(started), show_progress, name) as advance:
                    each_one = await Gathering(started, advance).completions()
                return list(zip(started, each_one, strict=True))
            finally:
                for generation in started:
                    generation.close()

        return self._background.call(everything())
