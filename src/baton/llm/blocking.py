"""`LLM(model).generate(prompts, params)`: blocking calls, safe to use from several threads.

Names and results follow vLLM's offline API.  As a library in another program it leaves the root logger alone,
does nothing in a child made by fork(), and may be forgotten instead of closed.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from baton.gateway.generation.gathering import Gathering
from baton.gateway.generation.generation import Completion, Generation
from baton.gateway.generation.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
    embedding_of,
    output_of,
)
from baton.gateway.parsing.deltas import Content, Delta
from baton.gateway.reading.arguments import (
    Prompt,
    as_list,
    conversations_of,
    messages_of,
    several_params,
)
from baton.launch.progress import Progress
from baton.llm.body import Body, Message, Prepared, Tool
from baton.protocol.params.sampling_params import SamplingParams

_TOGETHER = 32
"""Prompts that are sent together: enough for a step that is worth its while, not so many that the instance
waits long for the first one."""


class LLM(Body):
    __doc__ = f"{Body.__doc__}\n    Close it, or use it in a `with` block."

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
        params = _for_each(sampling_params, len(several))
        requests = [
            self._prepare(prompt, f"prompts[{i}]", one, priority)
            for i, (prompt, one) in enumerate(zip(several, params, strict=True))
        ]
        return self._run(requests, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Tool] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation, or several, rendered with the model's chat template.

        Where it is known how the model writes reasoning and calls, each output has `content`, `reasoning` and
        `tool_calls` apart; `text` is all that it wrote.  `tools`, `tool_choice`: OpenAI's.

        Raises `ValueError` for messages or parameters that cannot be served, with the field's name.
        """
        conversations = self._read(conversations_of, messages)
        params = _for_each(sampling_params, len(conversations))
        requests = [
            self._converse(
                conversation,
                one or self.default_sampling_params(),
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
                tools=tools,
                tool_choice=tool_choice,
            )
            for conversation, one in zip(conversations, params, strict=True)
        ]
        return self._run(requests, use_tqdm)

    def chat_stream(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Generator[str, None, None]:
        """The answer's text in pieces, as they come.  Closing the generator cancels the request."""
        for delta in self.chat_deltas(messages, sampling_params):
            if isinstance(delta, Content):
                yield delta.text

    def chat_deltas(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Tool] | None = None,
    ) -> Generator[Delta, None, None]:
        """As `chat_stream`, with what the model thinks and calls: `Content`, `Reasoning`, `Call`."""
        conversation = self._read(messages_of, messages)
        request = self._converse(conversation, sampling_params, tools=tools)
        request = replace(request, params=request.params.replace(n=1))
        generation = self._background.call(self._start_one(request))
        try:
            while not generation.done:
                for update in self._background.call(generation.next()):
                    if update.deltas is not None:
                        yield from update.deltas
                    elif update.text:
                        yield Content(update.text)
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
        requests = self._embed(as_list(prompts), dimensions, normalize, priority)
        return list(map(embedding_of, self._pool(requests, use_tqdm, "Embedding")))

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
        requests, queries, documents = self._score(data_1, data_2, instruction, priority)
        return self._scored(self._pool(requests, use_tqdm, "Scoring"), queries, documents)

    def classify(
        self, prompts: Prompt | Sequence[Prompt], *, use_tqdm: bool = True, priority: int = 0
    ) -> list[ClassificationRequestOutput]:
        """What a model with a head of scores makes of each prompt: the likelihoods of its labels.  Raises
        `ValueError` for a prompt that cannot be served, and of a model without such a head."""
        requests = self._classify(prompts, priority)
        return list(map(self._classes, self._pool(requests, use_tqdm, "Classifying")))

    # -- inside

    async def _start_one(self, request: Prepared) -> Generation:
        await self._background.ready()
        return self._start(request, self._new_id())

    def _new_id(self) -> str:
        return f"llm-{next(self._ids)}"

    def _pool(self, requests: Sequence[Prepared], show_progress: bool, name: str) -> list[Generation]:
        return [generation for generation, _ in self._complete(requests, show_progress, name)]

    def _run(self, requests: Sequence[Prepared], show_progress: bool) -> list[RequestOutput]:
        done = self._complete(requests, show_progress, "Generating")
        return [
            output_of(*one, request.text, chat=request.chat, short_ids=request.short_ids)
            for one, request in zip(done, requests, strict=True)
        ]

    def _complete(
        self, requests: Sequence[Prepared], show_progress: bool, name: str
    ) -> list[tuple[Generation, list[Completion]]]:
        """Runs all of them to their ends."""

        async def everything() -> list[tuple[Generation, list[Completion]]]:
            started: list[Generation] = []
            try:
                await self._background.ready()
                for first in range(0, len(requests), _TOGETHER):
                    with self._background.together():
                        for one in requests[first : first + _TOGETHER]:
                            started.append(self._start(one, self._new_id(), patient=True))  # noqa: PERF401
                with Progress(len(started), show_progress, name) as advance:
                    each_one = await Gathering(started, advance).completions()
                return list(zip(started, each_one, strict=True))
            finally:
                for generation in started:
                    generation.close()

        return self._background.call(everything())


def _for_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams | None]:
    """One for each of so many prompts.  Raises `ValueError`."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    each = several_params(params)
    if len(each) != count:
        raise ValueError(f"sampling_params: {len(each)} for {count} prompts; give one or one each")
    return each
