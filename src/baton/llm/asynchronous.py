"""`AsyncLLM(model).generate(prompt, params)`: answers as asynchronous iterators, for programs of asyncio.

Names and results follow vLLM's `AsyncLLM`.  The instance is driven by a thread of its own, so a program's
loop may be slow, or end and be followed by another one, and the instance is none the worse for it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from baton.gateway.generation.generation import Generation
from baton.gateway.generation.outputs import (
    Assembler,
    ClassificationRequestOutput,
    CompletionOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
    embedding_of,
)
from baton.gateway.reading.arguments import Prompt, as_list, messages_of
from baton.gateway.text.encoding import LONG_TEXT
from baton.launch.planning.plan import ServerPlan
from baton.llm.body import Body, Message, Prepared, Tool
from baton.llm.hops import Hop
from baton.llm.streams import Stream, Streams
from baton.protocol.params.sampling_params import RequestOutputKind, SamplingParams

_ID = re.compile(r"[\x21-\x7e]{1,128}\Z")


class AsyncLLM(Body):
    __doc__ = f"""{Body.__doc__}
    It starts its processes before it returns: `await asyncio.to_thread(AsyncLLM, …)` keeps a loop free
    meanwhile.  `shutdown` it, or use it in an `async with` block.  Methods are called on any running loop.
    """

    def _begin(self, plan: ServerPlan) -> None:
        self._streams = Streams()
        self._hop: Hop | None = None
        super()._begin(plan)
        self._background.on_end = self._streams.end
        self._to_background = Hop(self._background.loop, self._background.together)

    def shutdown(self) -> None:
        """Stops the instance; what still runs ends with an error.  A second call does nothing."""
        self._close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.shutdown)

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The completion of one prompt, as it comes; see `SamplingParams.output_kind`.  A slow consumer finds
        what came meanwhile in one output.

        To leave the iterator early (`break`, `aclose`, a cancelled task) aborts the request.  The first step
        raises `ValueError` for a prompt, a parameter or an id that cannot be served; each may raise
        `ApiError` if the request is lost for good.  (A worker that dies is restarted; the request goes on.)
        """
        prepare = partial(self._prepare, prompt, "prompt", sampling_params, priority)
        long = isinstance(prompt, str) and len(prompt) >= LONG_TEXT
        params = sampling_params  # (of another type it is refused when it is prepared)
        bound = isinstance(params, SamplingParams) and params.structured_outputs is not None
        return self._outputs(prepare, request_id, apart=long or bound or isinstance(prompt, Mapping))

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Tool] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The answer to a conversation, as `generate` gives it, with `content`, `reasoning` and `tool_calls`
        as in `LLM.chat`."""

        def prepare() -> Prepared:
            return self._converse(
                self._read(messages_of, messages),
                sampling_params,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
                tools=tools,
                tool_choice=tool_choice,
                priority=priority,
            )

        return self._outputs(prepare, request_id, apart=True)

    async def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        priority: int = 0,
    ) -> list[EmbeddingRequestOutput]:
        """As `LLM.embed`."""
        requests = await asyncio.to_thread(self._embed, as_list(prompts), dimensions, normalize, priority)
        return list(map(embedding_of, await self._ends(requests)))

    async def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        instruction: str | None = None,
        priority: int = 0,
    ) -> list[ScoringRequestOutput]:
        """As `LLM.score`."""
        prepare = partial(self._score, data_1, data_2, instruction, priority)
        requests, queries, documents = await asyncio.to_thread(prepare)
        return self._scored(await self._ends(requests), queries, documents)

    async def classify(
        self, prompts: Prompt | Sequence[Prompt], *, priority: int = 0
    ) -> list[ClassificationRequestOutput]:
        """As `LLM.classify`."""
        requests = await asyncio.to_thread(self._classify, prompts, priority)
        return list(map(self._classes, await self._ends(requests)))

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends requests: their iterators give what came last, with the finish reason `abort`.  Ids that are
        not running are passed over."""
        for one in [request_id] if isinstance(request_id, str) else request_id:
            stream = self._streams.get(one)
            if stream is not None:
                self._to_background(stream.abort)

    async def check_health(self) -> None:
        """Raises `InstanceUnavailable` with the reason unless a request could be served now, `RuntimeError`
        after the end."""
        self._background.check()
        self._background.check_ready()

    @property
    def num_unfinished_requests(self) -> int:
        return len(self._streams)

    # -- inside

    async def _outputs(
        self, prepare: Callable[[], Prepared], request_id: str | None, *, apart: bool
    ) -> AsyncGenerator[RequestOutput, None]:
        """`apart`: preparing it takes long, and is done in a thread."""
        self._background.check()
        request = await asyncio.to_thread(prepare) if apart else prepare()
        name, stream = self._open(request, request_id)
        try:
            assembler: Assembler | None = None
            while True:
                updates, ended = await stream.news()
                kind = request.params.output_kind
                if stream.generation is None:  # aborted before it began
                    yield _aborted(request, name)
                    return
                if assembler is None:
                    assembler = Assembler(
                        stream.generation,
                        request.text,
                        chat=request.chat,
                        short_ids=request.short_ids,
                        delta=kind is RequestOutputKind.DELTA,
                    )
                assembler.add(updates)
                if ended or kind is not RequestOutputKind.FINAL_ONLY:
                    yield assembler.output(finished=ended)
                if ended:
                    return
        finally:
            self._leave(name, stream)

    async def _ends(self, requests: Sequence[Prepared]) -> list[Generation]:
        """Runs all to their ends.  If one fails, the others are given up."""
        opened: list[tuple[str, Stream]] = []
        ended: list[Generation] = []
        self._background.check()
        try:
            opened = [self._open(one, None) for one in requests]
            for _, stream in opened:
                while not (await stream.news())[1]:
                    pass
                assert stream.generation is not None  # (its id is nobody's to abort)
                ended.append(stream.generation)
        finally:
            for name, stream in opened:
                self._leave(name, stream)
        return ended

    def _open(self, request: Prepared, request_id: str | None) -> tuple[str, Stream]:
        name = f"llm-{next(self._ids)}" if request_id is None else request_id
        if not isinstance(name, str) or not _ID.match(name):
            raise ValueError(f"request_id: {name!r} must be 1 to 128 printable ASCII characters, no spaces")
        patient = request.params.output_kind is RequestOutputKind.FINAL_ONLY
        start = partial(self._start, request, name, patient=patient)
        stream = Stream(self._program_hop(), start, self._background.ready)
        self._streams.add(name, stream)
        if not self._to_background(stream.begin):
            self._streams.discard(name)
            raise RuntimeError("this AsyncLLM is shut down")
        return name, stream

    def _leave(self, name: str, stream: Stream) -> None:
        self._streams.discard(name)
        self._to_background(stream.leave)

    def _program_hop(self) -> Hop:
        """To the loop that runs this."""
        loop = asyncio.get_running_loop()
        if self._hop is None or self._hop.loop is not loop:
            self._hop = Hop(loop)
        return self._hop


def _aborted(request: Prepared, name: str) -> RequestOutput:
    outputs = [CompletionOutput(i, "", [], None, "abort", None) for i in range(request.params.n)]
    return RequestOutput(name, request.text, list(request.ids), outputs)
