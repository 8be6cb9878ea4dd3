"""From prompts and `SamplingParams` to a stream of text, tokens and log-probabilities.  No HTTP.

A `Generator` belongs to a served model; `start` submits one API request, which is a `Generation` of
prompts × n `Sequence`s, in that order.

A `Generator` can hold back what is new until what is there has ended (`hold`, `drained`, `release`): for
pauses (`pausing.py`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq

from msgspec.structs import replace

from baton.gateway.cluster.request import EngineRequest
from baton.gateway.errors import BadRequest, Overloaded
from baton.gateway.generation.costs import check_cost, check_routes, counted
from baton.gateway.generation.generation import Generation
from baton.gateway.generation.sequence import Sequence, Shared
from baton.gateway.instances.client import ClusterClient, Limits
from baton.gateway.instances.inbox import Inbox
from baton.gateway.parsing.plan import Parsing
from baton.gateway.reading.checks import check_prompt
from baton.gateway.reading.prompts import is_packed
from baton.gateway.served_model import ServedModel
from baton.gateway.text.bad_words import bad_sequences
from baton.gateway.text.tokenizer import Tokenizer
from baton.observe.events.context import Trace
from baton.observe.events.log import EventLog
from baton.observe.events.story import Story
from baton.observe.metrics import Metrics
from baton.observe.tracing.tracer import Tracer
from baton.protocol.codec import pack_int32
from baton.protocol.params.pooling import Pooling
from baton.protocol.params.sampling import Sampling, Stopping
from baton.protocol.params.sampling_params import SamplingParams, resolve
from baton.protocol.rules.fair_queue import EVERYBODY, Flow
from baton.protocol.rules.seeds import choice_seed, draw_seed

log = logging.getLogger(__name__)

MAX_HELD = 1024
"""Requests that may be held back."""
_LOGGED = 8
"""Prompts of a request whose lengths are logged."""


class Generator:
    """Starts generations on the cluster for one served model."""

    def __init__(
        self,
        served: ServedModel,
        tokenizer: Tokenizer,
        client: ClusterClient,
        *,
        metrics: Metrics | None = None,
        events: EventLog | None = None,
    ) -> None:
        # A fine-tune of a base model often says it in one of its files, and the base's end in the others.
        ends = tuple(dict.fromkeys((*served.eos_token_ids, *tokenizer.end_ids)))
        if len(ends) > 1:
            log.debug("answers end with any of %s", ", ".join(f"{tokenizer.token(end)!r}" for end in ends))
        self.served = served = dataclasses.replace(served, eos_token_ids=ends)
        self.tokenizer = tokenizer
        self.client = client
        self.metrics = metrics
        self.events = events or EventLog()
        """The ways of requests that have ended."""
        self.tracer: Tracer | None = None
        """Tells a collector of them as well."""
        self.logs = False
        """Each request is logged."""
        self._unseeded = 0
        """Numbers the sequences whose seed comes from the server's."""
        self._open: set[Generation] = set()
        self._holding = False
        self._drained: asyncio.Future[None] | None = None
        """Set when nothing is open but what is held back."""

    @property
    def open(self) -> list[Generation]:
        """Those that have not been closed."""
        return list(self._open)

    @property
    def num_held(self) -> int:
        return sum(generation.held for generation in self._open)

    def hold(self) -> None:
        """What starts from now on is held back until `release`; what is open goes on."""
        self._holding = True

    def release(self) -> None:
        """What was held back is submitted, in the order of its coming."""
        self._holding = False
        held = [generation for generation in self._open if generation.held]
        for generation in sorted(held, key=lambda one: one.arrived):
            generation.held = False
            generation.feed()

    async def drained(self, timeout_s: float) -> bool:
        """Waits until nothing is open but what is held back; False: that took longer than `timeout_s`."""
        self._drained = asyncio.get_running_loop().create_future()
        self._check_drained()
        try:
            async with asyncio.timeout(timeout_s):
                await self._drained
        except TimeoutError:
            return False
        finally:
            self._drained = None
        return True

    def _closed(self, generation: Generation) -> None:
        self._open.discard(generation)
        if generation.story is not None:
            self.events.add(generation.story, time.monotonic())
            if generation.story.trace is not None and self.tracer is not None:
                self.tracer.add(generation.story)
        if self._drained is not None:
            self._check_drained()

    def _check_drained(self) -> None:
        waiter = self._drained
        if waiter is not None and not waiter.done() and all(one.held for one in self._open):
            waiter.set_result(None)

    def start(
        self,
        prompts: Seq[Seq[int]],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
        flow: Flow = EVERYBODY,
        drop_output: bool = False,
        patient: bool = False,
        shorten: bool = False,
        arrived: float | None = None,
        pooling: Pooling | None = None,
        field: str = "prompt",
        parsing: Parsing | None = None,
        grammar: str = "",
        grammar_field: str = "",
        timed: bool = False,
        progress: bool = False,
        trace: Trace | None = None,
    ) -> Generation:
        """Submits prompts × `params.n` sequences.

        `grammar`: what binds the answers, checked (`grammar/checking.py`); `params.structured_outputs`
        alone does not.  `grammar_field`: which field asked for it, for errors.

        `pooling`: this is wanted of each prompt, and no tokens (`Sequence.pooled`).  `field`: where the
        prompts stood, for errors.  `drop_output`: only the prompt is of interest.  `patient`: only the end of
        each sequence is, so tokens may come late, unless something has to be looked for in them.
        `timed`: its story is told with the answer, also where none are kept; `trace`: to a collector.
        `progress`: how far the prompts are is wanted while they are computed (`progress.py`).
        `shorten`: an answer of `max_tokens` for which there is no room ends earlier, and is not refused.
        `parsing`: how the texts are taken apart (`Update.deltas`).  Raises `BadRequest`, `InvalidParameter`,
        `InstanceUnavailable`, or `Overloaded` if too many are held back already.
        """
        self.client.check_ready()
        if self._holding and self.num_held >= MAX_HELD:
            raise Overloaded(
                f"the server is about to pause, and {MAX_HELD} requests wait for it to go on",
                code="paused",
                retry_after_s=5,
            )
        if pooling is None and "generate" not in self.served.tasks:
            raise BadRequest(
                f"model: {self.served.name!r} generates no text here: it is served for "
                f"{' and '.join(sorted(self.served.tasks))} alone (--runner pooling)",
                param="model",
                code="unsupported_task",
            )
        for prompt in prompts:
            if not is_packed(prompt):
                check_prompt(
                    prompt,
                    self.served.max_model_len,
                    self.served.vocab_size,
                    field=field,
                    answers=pooling is None,
                )
        params = counted(params, self.served)
        check_cost(prompts, params, field, len(grammar))
        if params.return_routed_experts and pooling is None:
            check_routes(prompts, params, self.served, field)
        if self.logs:
            lengths = ", ".join(str(len(prompt)) for prompt in prompts[:_LOGGED])
            more = "" if len(prompts) <= _LOGGED else f" and {len(prompts) - _LOGGED} more"
            log.info(
                "request %s: prompts of %s%s tokens, %s",
                request_id,
                lengths,
                more,
                params,
                extra={"request_id": request_id},
            )
        count = len(prompts) * params.n
        seed = self._seeds(params, count)
        arrived = time.monotonic() if arrived is None else arrived
        limits = self.client.limits
        looked_at = params.stop_strings or parsing is not None or params.repetition_detection is not None
        patient = patient and not looked_at
        sampling, stopping = resolve(
            params,
            seed=0,
            room=self.served.max_model_len,
            eos_token_ids=self.served.eos_token_ids,
            vocab_size=self.served.vocab_size,
            grammar=grammar,
            bad_words=bad_sequences(params.bad_words, self.tokenizer) if params.bad_words else (),
        )
        if pooling is not None:
            sampling = Sampling(0, 0.0, pooling=pooling)
            stopping, patient = Stopping(1), True
        packed = [pack_int32(prompt) for prompt in prompts]
        rooms = [self._room(len(prompt), params, limits, shorten=shorten) for prompt in prompts]
        self.client.check_size(max(map(len, packed)), sampling, stopping, request_id, cache_salt)

        keys: list[dict[int, array[int]]] = [{} for _ in packed]
        story = None
        if self.events.keep or timed or trace is not None:
            now, most = time.monotonic(), params.max_tokens
            story = Story(request_id, arrived, now, time.time() - (now - arrived), max_tokens=most)
            story.prompt_tokens, story.sequences = sum(map(len, prompts)), count
            if trace is not None:
                story.trace, story.params = trace, params

        def make(sequence: Sequence, inbox: Inbox) -> EngineRequest:
            request = prepare(sequence, inbox)
            request.trail = None if story is None else story.trail()
            request.wants_progress = progress and not sequence.index % params.n
            return request

        def prepare(sequence: Sequence, inbox: Inbox) -> EngineRequest:
            index, number = sequence.index, sequence.index // params.n
            if pooling is not None:
                return self.client.prepare(
                    packed[number],
                    sampling,
                    stopping,
                    inbox=inbox,
                    name=request_id if count == 1 else f"{request_id}-{index}",
                    priority=priority,
                    cache_salt=cache_salt,
                    flow=flow,
                    patient=True,
                    keys=keys[number],
                )
            most = min(stopping.max_tokens, rooms[number])
            own = replace(sampling, seed=seed(index))
            if own.routes_from is not None and index % params.n:  # (the first one of the prompt has the rest)
                own = replace(own, routes_from=max(own.routes_from, len(prompts[number]) - 1))
            return self.client.prepare(
                packed[number],
                own,
                replace(stopping, max_tokens=most, min_tokens=min(stopping.min_tokens, most)),
                inbox=inbox,
                name=request_id if count == 1 else f"{request_id}-{index}",
                priority=priority,
                cache_salt=cache_salt,
                flow=flow,
                patient=patient,
                keys=keys[number],
            )

        generation = Generation(
            request_id,
            self.client,
            self.metrics,
            make,
            n=params.n,
            arrived=arrived,
            window=max(1, limits.max_num_seqs if limits else 1),
            on_close=self._closed,
            story=story,
        )
        shared = Shared(
            params,
            stopping.stop_token_ids,
            self.tokenizer,
            self.served.eos_token_ids,
            drop_output=drop_output,
            parsing=parsing,
            grammar_field=grammar_field,
        )
        for index in range(count):
            generation.add(Sequence(index, prompts[index // params.n], shared))
        generation.held = self._holding
        self._open.add(generation)
        generation.feed()
        return generation

    def _room(self, num_prompt: int, params: SamplingParams, limits: Limits | None, *, shorten: bool) -> int:
        """Tokens that may follow the prompt; without `max_tokens`, or where those are no demand, also no more
        than the KV pool holds."""
        room = self.served.max_model_len - num_prompt
        if (params.max_tokens is not None and not shorten) or limits is None:
            return room
        # The last token is never fed to the model, so it needs no KV.
        pool = limits.kv_tokens + 1 - num_prompt
        return min(room, pool) if pool >= 1 else room

    def _seeds(self, params: SamplingParams, count: int) -> Callable[[int], int]:
        """That of sequence number i, once.  With a seed of the user every prompt has the same n seeds."""
        given, served = params.seed, self.served.seed
        if given is not None:
            return lambda index: choice_seed(given, index % params.n)
        if served is None:
            return lambda index: draw_seed()
        first, self._unseeded = self._unseeded, self._unseeded + count
        return lambda index: choice_seed(served, first + index)
