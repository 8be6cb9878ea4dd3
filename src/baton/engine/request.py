"""One request inside the engine, and the outbox of the gateway that it came from.

Its states and their transitions are the table of `states.py`.
"""

from __future__ import annotations

import hashlib
from array import array

from baton.engine.states import TRANSITIONS, Event, IllegalTransition, State
from baton.protocol.codec import INT32, INT64, pack_int32, pack_int64
from baton.protocol.messages.reports import PromptLogprobs
from baton.protocol.messages.requests import Finished, Outputs
from baton.protocol.notes import Notes
from baton.protocol.params.sampling import Sampling, Stopping, TokenLogprobs
from baton.protocol.routes import Routes
from baton.protocol.rules.fair_queue import EVERYBODY, Flow, Share

_FLOW_BYTES = 6
NEVER = 1 << 62
"""A number of tokens that no request reaches."""


class Request:
    """A sequence to generate.  What the scheduler needs is kept flat, for the sake of the token path."""

    __slots__ = (
        "arrived",
        "begun",
        "cache_salt",
        "charged",
        "computed",
        "continued",
        "departure",
        "epoch",
        "fills",
        "fills_to",
        "first_admitted",
        "flow",
        "gateway",
        "held",
        "hurried",
        "id",
        "indexed",
        "indexing",
        "keys",
        "lets_pass",
        "limit",
        "name",
        "notes",
        "num_accepted",
        "num_cached",
        "num_preemptions",
        "num_prompt",
        "number",
        "origin",
        "outbox",
        "patient",
        "progress_at",
        "prompt_logprobs_sent",
        "rank",
        "root",
        "routes_sent",
        "sampling",
        "settled",
        "share",
        "slot",
        "state",
        "stopping",
        "tokens",
        "told",
        "uncomputed",
        "urgency",
        "watermark",
    )

    def __init__(
        self,
        gateway: Outbox,
        id: int,
        name: str,
        tokens: array[int],
        sampling: Sampling,
        stopping: Stopping,
        *,
        priority: int,
        number: int,
        arrived: float,
        num_prompt: int | None = None,
        cache_salt: str = "",
        root: bytes = b"",
        patient: bool = False,
        flow: Flow = EVERYBODY,
        state: State = State.WAITING,
    ) -> None:
        """`tokens`: the prompt, and what the client already has of the answer."""
        self.gateway = gateway
        self.outbox = gateway
        """Where its tokens go: the gateway, nowhere once it was cancelled, or aside while it is not known
        which instance is to send them."""
        self.id = id
        self.name = name
        self.tokens = tokens
        """The prompt, then everything generated."""
        self.num_prompt = len(tokens) if num_prompt is None else num_prompt
        self.limit = self.num_prompt + stopping.max_tokens - 1
        """Tokens whose KV it can need at most: the last generated one is never fed."""
        self.sampling = sampling
        self.stopping = stopping
        self.rank: tuple[int, float] = (priority, number)
        """Smaller is served first, among those that run and those of one flow (`waiting.py`); a preempted
        request keeps it."""
        self.flow = flow
        self.share: Share[Request] | None = None
        """While it runs: what is charged for what it generates."""
        self.settled = 0
        """So many of its tokens have been charged, or are free."""
        self.continued = state is State.ARRIVING or len(tokens) > self.num_prompt
        """It ran before, here or elsewhere: it comes before those that have not, and is not refused."""
        self.patient = patient
        self.number = number
        """Grows with each request that comes to this engine."""
        self.arrived = arrived
        self.state = state
        self.departure: object | None = None
        """How it is to be handed over to another instance (see `handover/records.py`); None: it stays."""
        self.computed = 0
        """Leading tokens of this epoch's prefill whose KV is computed, as far as was reported."""
        self.uncomputed = 0
        """While it runs: tokens of this epoch's prefill that are not computed, as far as was reported."""
        self.slot = -1
        self.epoch = 0
        self.lets_pass = False
        """It decodes here only because there was no room elsewhere."""
        self.urgency: tuple[int, float] = self.rank
        """While it has a slot: its rank, or the smallest of those that wait for what it computes
        (`in_flight.py`)."""
        self.hurried = not patient
        """While it has a slot: a client waits for its tokens, or for those of one that waits for it."""
        self.told = (0, False)
        """While it runs: the priority and the haste that the worker was told."""
        self.watermark = NEVER
        """The number of tokens at which the scheduler wants to look at it again."""
        self.held = 0
        """Blocks that it holds."""
        self.cache_salt = cache_salt
        self.root = root
        self.keys: list[bytes] = []
        """Prefix keys of its leading full blocks, as far as they were needed."""
        self.indexed = 0
        """Leading blocks that have been offered to the prefix index in this epoch."""
        self.indexing = False
        """Whether blocks of this epoch may enter the prefix index."""
        self.fills = self.fills_to = 0
        """Blocks [fills, fills_to) of its table are full ones of its tokens that it has to compute, as far as
        was reported; others may wait for them (`in_flight.py`)."""
        self.first_admitted: float | None = None
        """When it first had a slot."""
        self.begun = False
        """The worker has been told of it, here or at the instance that handed it over."""
        self.charged = 0
        """Tokens of its prompt that its flow was charged for."""
        self.origin = ""
        """Whose word it is that the KV of this epoch is right: "": this instance has computed it; or the
        gateway that named the instance which has."""
        self.num_cached = 0
        self.num_preemptions = 0
        self.num_accepted = 0
        """Drafts that were right, since it is here."""
        self.notes: Notes | None = None
        """Its way, if its gateway wants to know it."""
        self.progress_at: float | None = None
        """From when on its client is told again how far its prompt is; None: it did not ask."""
        self.prompt_logprobs_sent = 1 if len(tokens) == self.num_prompt else self.num_prompt
        """Prompt positions below this need no log-probabilities any more (position 0 never has any)."""
        self.routes_sent = NEVER if sampling.routes_from is None else sampling.routes_from
        """Of positions below this nobody needs to know any more which experts they went to."""

    def advance(self, event: Event) -> State:
        """Moves to the next state and returns it.  Raises `IllegalTransition` if there is none, and stays."""
        next_state = TRANSITIONS[self.state].get(event)
        if next_state is None:
            raise IllegalTransition(f"request {self.name!r}: {event.value!r} while {self.state.value}")
        self.state = next_state
        return next_state

    def let_pass(self, count: int) -> None:
        """Of its priority, the next `count` requests that come are served before this one, which is not in a
        queue; and it leaves `Room.kept_slots` to them."""
        self.rank = (self.rank[0], self.number + count + 0.5)
        self.lets_pass = True

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether a part of them is still to be computed, so that no part of the prompt may be skipped."""
        return self.sampling.prompt_logprobs is not None and self.prompt_logprobs_sent < self.num_prompt

    @property
    def pools(self) -> bool:
        """It wants a result of its prompt (`protocol/params/pooling.py`), and no token."""
        return self.sampling.pooling is not None

    @property
    def reusable(self) -> int:
        """So many leading tokens need not be computed if their KV is there: of the others something is wanted
        that is not kept with it."""
        pooling = self.sampling.pooling
        needs_all = self.wants_prompt_logprobs or (pooling is not None and pooling.whole)
        return 0 if needs_all else self.routes_sent

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt


class Outbox:
    """What is to be told to one gateway.  `ids` and `tokens` are aligned, as in `Outputs`.

    Tokens go in as packed arrays from the start, so that writing one costs two appends and sending them one
    copy.
    """

    __slots__ = (
        "aside",
        "cached",
        "finished",
        "flow",
        "identity",
        "ids",
        "logprobs",
        "name",
        "progress",
        "prompt_logprobs",
        "requests",
        "routes",
        "tokens",
    )

    def __init__(self, identity: bytes, *, aside: bool = False) -> None:
        self.identity = identity
        self.aside = aside
        """Of no gateway: keeps what it gets until `pour`."""
        self.name: str | None = None
        """What the gateway called itself in `Hello`; None before."""
        self.flow = ""
        """Its name in flows (`fair_queue.Flow`)."""
        self.requests: dict[int, Request] = {}
        """Those that still need their `Finished`."""
        self.ids: array[int] = array(INT64)
        self.tokens: array[int] = array(INT32)
        self.logprobs: list[tuple[int, TokenLogprobs]] = []
        self.prompt_logprobs: list[tuple[int, PromptLogprobs]] = []
        self.routes: list[tuple[int, Routes]] = []
        """Go before all else, as a message of their own (`Routed`)."""
        self.finished: list[Finished] = []
        self.cached: list[tuple[int, int]] = []
        """Of requests that were admitted, and no reason to send anything."""
        self.progress: list[tuple[int, int, int]] = []
        """How far prompts are computed, for those who ask."""

    def call(self, name: str) -> None:
        """A gateway has said who it is."""
        self.name = name
        self.flow = hashlib.blake2b(name.encode(), digest_size=_FLOW_BYTES).hexdigest()

    def __str__(self) -> str:
        return f"{self.name or 'unknown'} ({self.identity.hex()})"

    def pour(self, into: Outbox) -> None:
        """Moves tokens and their log-probabilities, and where they went."""
        offset = len(into.ids)
        into.ids += self.ids
        into.tokens += self.tokens
        into.logprobs += [(offset + index, logprobs) for index, logprobs in self.logprobs]
        into.routes += self.routes
        self.ids, self.tokens, self.logprobs, self.routes = array(INT64), array(INT32), [], []

    def take(self) -> Outputs | None:
        """What was collected, or None if there is nothing; the outbox is empty afterwards."""
        if not (self.ids or self.finished or self.prompt_logprobs or self.progress):
            return None
        outputs = Outputs(
            ids=pack_int64(self.ids),
            tokens=pack_int32(self.tokens),
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            finished=self.finished,
            cached=self.cached,
            progress=self.progress,
        )
        self.ids, self.tokens = array(INT64), array(INT32)
        self.logprobs, self.prompt_logprobs, self.finished = [], [], []
        self.cached, self.progress = [], []
        return outputs
