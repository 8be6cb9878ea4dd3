"""One sequence on its way through the cluster: what is asked, where it is, and what came of it.  No I/O.

The buffers are filled by the table of requests (`table.py`) and emptied by the consumer, which is
woken through its inbox (`inbox.py`); here only what the table needs of an inbox is known.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from baton.gateway.errors import ApiError
from baton.observe.events.trail import Trail
from baton.protocol.messages.reports import PromptLogprobs
from baton.protocol.messages.requests import Finished, Outputs, Submit, Target
from baton.protocol.params.sampling import Sampling, Stopping, TokenLogprobs
from baton.protocol.routes import Routes
from baton.protocol.rules.fair_queue import EVERYBODY, FairLine, Flow
from baton.protocol.rules.silence import Silence


class Consumer(Protocol):
    """Who wants the output of some sequences."""

    def add(self, request: EngineRequest) -> None:
        """Notes that a sequence has news."""

    def wake(self) -> None:
        """The message that brought news is through."""


@dataclass(slots=True)
class Chunk:
    """What came for one sequence since the last look."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]
    """Aligned with `tokens`, or empty where none were asked for."""
    prompt_logprobs: list[PromptLogprobs]
    finished: Finished | None
    error: ApiError | None
    """Instead of `finished`: no more will come."""


@dataclass(slots=True, eq=False)
class EngineRequest:
    """One sequence on its way through the cluster, over as many instances as it takes.

    What follows `id` belongs to the cluster's table (`table.py`), and the buffers to both sides.
    """

    name: str
    prompt: bytes
    """Packed int32."""
    sampling: Sampling
    stopping: Stopping
    priority: int
    cache_salt: str
    inbox: Consumer
    patient: bool = False
    """Its consumer wants to hear of its end alone; tokens wait until then, and the instance knows that."""
    flow: Flow = EVERYBODY
    id: int = -1
    """The id under which instances know it now; another one after each loss."""
    at: str = ""
    """The instance that has it, as far as is known; "" while it waits for one."""
    plan: tuple[str, ...] = ()
    """The instances that may have it under this id, the one that prefills first."""
    heard: bool = False
    """Output came under this id: from here on it stays with the instance that sent it."""
    gone: set[str] = field(default_factory=set)
    """Instances of the plan that were lost since it was sent, and may be there again."""
    work: int = 0
    """Tokens to compute under this id, those in the prefix cache left out: an estimate."""
    losses: int = 0
    fruitless: int = 0
    """Losses in a row without a token in between."""
    known: int = 0
    """Tokens that it had at the last loss."""
    refused_by: set[str] = field(default_factory=set)
    """Instances that had no room for it; forgotten when it waits for room."""
    retry_after_s: float = 0.0
    """The shortest time that one of them said its queue will take; 0: none said so."""
    keys: dict[int, array[int]] = field(default_factory=dict)
    """Block size → `short_keys` of the prompt, once it was placed; shared by all sequences of one prompt."""
    absence: Silence | None = None
    """While it waits for an instance: whether one comes."""
    timed: float | None = None
    """Its entry in the table's heap of deadlines."""
    lost_at: float | None = None
    """When its instance was lost, until a token comes again."""
    asked_at: float = 0.0
    """When it came to the table first, on the cluster's clock."""
    first_at: float | None = None
    """When its first token came, on the cluster's clock."""
    num_cached: int = 0
    """Prompt tokens from the prefix cache, known with the first token."""
    prompt_position: int = 1
    """The prompt position whose log-probabilities come next: those before came, maybe of a lost instance."""
    has_news: bool = False
    tokens: array[int] = field(default_factory=lambda: array("i"))
    """All that came, of all instances."""
    taken: int = 0
    """So many of them the consumer has."""
    logprobs: list[TokenLogprobs] | None = None
    """Of the tokens that the consumer does not have; None if there are none."""
    prompt_logprobs: list[PromptLogprobs] | None = None
    routes: list[Routes] | None = None
    """The experts that tokens went to, of positions in a row from `sampling.routes_from` on."""
    finished: Finished | None = None
    error: ApiError | None = None
    consumer: Any = None
    """Whatever the consumer wants to find here."""
    trail: Trail | None = None
    """Its way, if somebody wants to know it: then the engines note it as well."""
    wants_progress: bool = False
    """Its consumer wants to know how far its prompt is computed."""
    progress: tuple[int, int] | None = None
    """(tokens of its prompt that are computed, milliseconds since it was admitted), as was told last."""

    @property
    def num_generated(self) -> int:
        return len(self.tokens)

    @property
    def last_token(self) -> int | None:
        """The last token that came; None before the first."""
        return self.tokens[-1] if self.tokens else None

    def take_tokens(self) -> list[int] | None:
        """The tokens that came since the last look, if nothing else came; None: call `take`."""
        if (
            self.finished is not None
            or self.logprobs is not None
            or self.prompt_logprobs is not None
            or self.error is not None
        ):
            return None
        new = self.tokens[self.taken :].tolist()
        self.taken += len(new)
        return new

    def take(self) -> Chunk:
        """Everything that came since the last look."""
        new = self.tokens[self.taken :].tolist()
        self.taken += len(new)
        chunk = Chunk(new, self.logprobs or [], self.prompt_logprobs or [], self.finished, self.error)
        self.logprobs = self.prompt_logprobs = None
        return chunk

    def add_logprobs(self, logprobs: TokenLogprobs) -> None:
        """Of the token that came last without any."""
        if self.logprobs is None:
            self.logprobs = []
        self.logprobs.append(logprobs)

    def submit(self, decoders: tuple[Target, ...] = ()) -> Submit:
        """The message that asks an engine for it, or for the rest of it."""
        sampling = self.sampling
        generated = b""
        if self.num_generated:
            generated = self.tokens.tobytes()
            if sampling.prompt_logprobs is not None:  # they came before the first token
                sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        if self.routes:  # (those of a run of tokens may have come whose tokens were lost with the instance)
            known = len(self.prompt) // self.tokens.itemsize + len(self.tokens)
            sampling = msgspec.structs.replace(sampling, routes_from=min(self.routes[-1].stop, known))
        return Submit(
            id=self.id,
            name=self.name,
            prompt=self.prompt,
            sampling=sampling,
            stopping=self.stopping,
            priority=self.priority,
            cache_salt=self.cache_salt,
            generated=generated,
            decoders=decoders,
            patient=self.patient,
            flow=self.flow,
            noted=self.trail is not None,
            progress=self.wants_progress and not self.num_generated,
        )

    def note(self, now: float, what: str, b: int = 0, text: str = "") -> None:
        """With its present id (`protocol/notes.py`)."""
        if self.trail is not None:
            self.trail.add(now, what, self.id, b, 0, text[:200])

    def add_prompt_logprobs(self, run: PromptLogprobs) -> bool:
        """Takes the positions that did not come before; False if there are none."""
        known = self.prompt_position - run.first
        if known >= len(run.positions):
            return False
        if known > 0:
            run = msgspec.structs.replace(run, first=self.prompt_position, positions=run.positions[known:])
        self.prompt_position = run.first + len(run.positions)
        if self.prompt_logprobs is None:
            self.prompt_logprobs = []
        self.prompt_logprobs.append(run)
        self.notify()
        return True

    def add_routes(self, run: Routes) -> None:
        """Takes the positions that did not come before; what does not follow on those is left."""
        wanted = self.sampling.routes_from
        if wanted is None:
            return
        if self.routes is None:
            self.routes = []
        known = self.routes[-1].stop if self.routes else wanted
        fresh = run.since(known)
        if fresh is not None and fresh.first == known:
            self.routes.append(fresh)

    def renew(self) -> None:
        """It ended before it began, and may be sent again as if it never had been."""
        self.finished = None
        self.losses = self.fruitless = 0
        self.refused_by.clear()
        self.retry_after_s = 0.0

    def end(self, finished: Finished) -> None:
        self.finished = finished
        self.notify()
        self.inbox.wake()

    def fail(self, error: ApiError) -> None:
        self.error = error
        self.notify()
        self.inbox.wake()

    def notify(self) -> None:
        """Puts the sequence among the news.  The caller wakes the consumer afterwards."""
        if not self.has_news:
            self.inbox.add(self)


def hear_of_prompts(
    running: Mapping[int, EngineRequest], sender: str, outputs: Outputs, woken: dict[Consumer, None]
) -> None:
    """Notes what an instance says of the prompts of its requests, and in `woken` who wanted to know."""
    for number, cached in outputs.cached:
        owner = running.get(number)
        if owner is not None and sender in owner.plan:
            owner.num_cached = cached
    for number, computed, milliseconds in outputs.progress:
        owner = running.get(number)
        if owner is not None and sender in owner.plan and owner.wants_progress:
            owner.progress = computed, milliseconds
            owner.notify()
            woken[owner.inbox] = None


def in_order(parked: list[EngineRequest]) -> list[EngineRequest]:
    """As they are to be sent; `parked` is in the order of their coming."""
    line: FairLine[tuple[int, EngineRequest]] = FairLine()
    for number, request in enumerate(parked):
        level = (request.priority, not request.num_generated)
        line.push((number, request), number, level, request.flow)
    ordered = []
    while (head := line.head()) is not None:
        number, request = head
        line.take(number, len(request.prompt) // 4)
        ordered.append(request)
    return ordered
