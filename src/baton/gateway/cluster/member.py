"""One instance of the cluster, as its gateway sees it.  No I/O, the clock an argument.

Theory.  An instance is in one of four states:

    starting ──Welcome──► ready ──lost──► restarting ──Welcome──► ready
        └───────────────── failed ◄── (its supervisor gives up)  ───┘

`lost` stands for everything after which output may be missing: the process died, the connection broke, a
message made no sense, a registration ran out.  Whatever was sent on the old connection is void then, and the
next `attach` begins a new one with a `Hello`.

*Draining* is a mark beside the state: nothing new is sent there.  A *label* says what the gateway sends there
(`routing.py`); the instance does not know it.

An instance that *joined* (registered itself over HTTP) has a lease: without a renewal it is lost, and after
a while forgotten.  Those that this process runs are watched by a supervisor and have none.  A gateway that
stood still itself judges nobody for what it has not read meanwhile (`protocol/rules/silence.py`).

Besides, the member keeps books for routing: what this gateway itself has sent there, as an engine's reports
(`Load`) come up to 50 ms late.
"""

from __future__ import annotations

import hmac
import logging
import re
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, Literal, get_args

import msgspec

from baton.gateway.arranging.measured import Label as Label
from baton.gateway.cluster.digest import PrefixDigest
from baton.gateway.errors import ApiError, InstanceUnavailable
from baton.observe.events.clocks import Alignment
from baton.observe.events.steps import StepLog
from baton.protocol.messages.requests import (
    Cancel,
    Hello,
    Load,
    Query,
    QueryKind,
    QueryReply,
    Target,
    ToEngine,
    Welcome,
)
from baton.protocol.rules.passes import pair_key, plan_pass
from baton.protocol.rules.silence import Silence
from baton.protocol.standing import Stand, Standing, changed, give_back
from baton.protocol.weights import Weights

log = logging.getLogger(__name__)

State = Literal["starting", "ready", "restarting", "failed"]
LABELS: tuple[Label, ...] = get_args(Label)
INSTANCE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")
"""Unique in its cluster; a part of URLs and file names."""
Answer = Callable[[dict[str, Any] | ApiError], None]
"""Called once with the instance's reply or with why there is none; never after `forget`."""

_SETTLE_S = 0.02
"""A `Load` that arrives so soon after a request was sent does not count it yet."""
_MAX_CANCELLED = 4096
MAX_LOADS = 1200
"""An instance under load says how busy it is 20 times a second."""


class Member:
    def __init__(self, name: str, label: Label = "mixed", *, joined: bool = False) -> None:
        self.name = name
        self.label: Label = label
        self._registered: Label = label
        self.standing = Standing()
        """The newest that was heard of: `label`, `draining`, `move_at` follow it (`protocol/standing.py`)."""
        self.joined = joined
        self.process = ""
        """Who started an instance that joined, as it said itself."""
        self.state: State = "starting"
        self.failure: str | None = None
        """Why the instance was lost or is failing; None while all is well."""
        self.welcome: Welcome | None = None
        """What the running instance said of itself; None unless the state is `ready`."""
        self.restarts = 0
        """How many times it became ready after the first."""
        self.draining = False
        self.move_at: float | None = None
        """While it drains: when what still runs there is moved."""
        self.lease: Silence | None = None
        """Of an instance that joined: whether it renews its registration."""
        self.absence: Silence | None = None
        """Since it did not: whether it comes back, before it is forgotten."""
        self.load: Load | None = None
        self.loaded_at = 0.0
        """When it reported last; before its first report: when it said that it can serve."""
        self.digest = PrefixDigest()
        self.full = False
        """It refused a request for want of room since its last `Load`."""
        self.turn = 0
        """When it was chosen last, in choices; of equals, the one that waits longest is next."""
        self.decodes: dict[int, int] = {}
        """Own requests that decode here, or are to: id → blocks that they will need."""
        self.unheard_blocks = 0
        """Blocks of those of `decodes` that nothing was heard of yet."""
        self.outgoing: list[ToEngine] = []
        self.load_answer: dict[str, Any] | None = None
        """Its answer to the last order to load weights; None until it comes."""
        self.clock = Alignment()  # with the engine at the other end
        self.loads: deque[tuple[float, int, int, int]] = deque(maxlen=MAX_LOADS)
        """(when, running, waiting, free blocks) as it has said lately."""
        self.steps = StepLog()
        self.was_ready = False
        self._incarnation = ""
        self._proof = b""
        self._fresh: deque[tuple[float, int]] = deque(maxlen=1 << 14)
        """(when, tokens to compute) of what was sent since the last `Load`."""
        self._fresh_tokens = 0
        self._cancelled: OrderedDict[int, None] = OrderedDict()
        """Ids whose cancellation is on its way there: no need for another one."""
        self._queries: dict[int, Answer] = {}

    # -- its life

    @property
    def serves(self) -> bool:
        """New requests may be sent to it."""
        return self.state == "ready" and not self.draining

    @property
    def incarnation(self) -> str:
        """The incarnation that is, or is to be, at the other end."""
        return self.welcome.incarnation if self.welcome is not None else self._incarnation

    @property
    def paused(self) -> bool:
        """The instance stands still, whichever gateway has ordered that."""
        return self.welcome is not None and self.welcome.paused

    @property
    def hands_over(self) -> bool:
        """Other instances reach it."""
        welcome = self.welcome
        return welcome is not None and bool(welcome.peer_endpoint) and welcome.source is not None

    def target(self, gateway: str, request: int, prefiller: str) -> Target:
        """How the instance `prefiller`, by its incarnation, hands this request of this gateway over to it.
        Only if it `hands_over`."""
        welcome = self.welcome
        assert welcome is not None
        return Target(
            welcome.incarnation,
            welcome.peer_endpoint,
            pair_key(welcome.key, prefiller),
            plan_pass(welcome.key, gateway, request, prefiller),
        )

    def attach(self, incarnation: str, hello: Hello, proof: bytes = b"") -> None:
        """There is a new connection, to this incarnation ("": whichever answers).  After `leave`.

        `proof`: what its `Welcome` must carry; empty: nothing."""
        if self.state == "failed":
            self.state = "restarting" if self.was_ready else "starting"
        self.failure = None
        self._incarnation, self._proof = incarnation, proof
        self.clock = Alignment()
        self.outgoing = [hello]

    def is_proven(self, welcome: Welcome) -> bool:
        """False: another process answers than the one that registered."""
        return not self._proof or hmac.compare_digest(welcome.proof, self._proof)

    def welcomed(self, welcome: Welcome, now: float) -> bool:
        """True if the instance can serve from here on."""
        if self.state == "ready" and self.welcome and self.welcome.incarnation == welcome.incarnation:
            self.welcome = welcome  # it has other weights now, or another standing
            return False
        if self._incarnation and welcome.incarnation != self._incarnation:
            log.warning("%s: ignoring a welcome of incarnation %s, not ours", self.name, welcome.incarnation)
            return False
        if self.state in ("ready", "failed"):
            return False
        self.welcome = welcome
        self.loaded_at = now  # from here on it may be silent for too long
        self.state = "ready"
        self.restarts += self.was_ready
        self.was_ready = True
        self.absence = None
        return True

    def leave(self, state: State, reason: str) -> None:
        """The connection is no more.  Its queries are answered with that; its requests are the table's."""
        self.welcome = None
        self.state = state
        self.failure = reason
        self.load = None
        self.full = False
        self.digest.clear()
        self.decodes.clear()
        self.unheard_blocks = 0
        self._fresh.clear()
        self._fresh_tokens = 0
        self._cancelled.clear()
        self.outgoing = []
        queries, self._queries = self._queries, {}
        for answer in queries.values():
            answer(lost_error(reason))

    def unavailable(self, who: str) -> InstanceUnavailable:
        """Why nothing can be sent there now, for the client.  `who`: how it is called there."""
        reason = f": {self.failure}" if self.failure else ""
        if self.state == "failed":
            return InstanceUnavailable(f"{who} has failed{reason}", code="instance_failed")
        if self.state == "restarting":
            message, code = f"{who} is restarting{reason}", "instance_restarting"
        elif self.state == "starting":
            message, code = f"{who} is loading the model{reason}", "instance_starting"
        else:
            message, code = f"{who} is draining", "instance_draining"
        return InstanceUnavailable(message, code=code, retry_after_s=5)

    # -- its standing

    def hear_standing(self, theirs: Standing, number: int, now: float) -> None:
        """What the engine says.  One that does not know what was ordered before is told, with this query."""
        if theirs.generation < self.standing.generation:
            self.query(number, "stand", ignore, "", stand=give_back(self.standing))
        elif theirs != self.standing:
            self._stands(theirs, now)

    def order(self, stand: Stand, number: int, answer: Answer, now: float) -> None:
        """Passes an order on.  One that may not be refused holds here at once, before the engine says so; for
        an instance that is not there it is noted, and given back when it comes."""
        stand = msgspec.structs.replace(stand, generation=self.standing.generation)
        ready = self.state == "ready"
        if ready:
            self.query(number, "stand", answer, "", stand=stand)
        if stand.how == "order":
            after = changed(self.standing, stand)
            if ready:  # (the engine numbers it)
                after = msgspec.structs.replace(after, generation=self.standing.generation)
            self._stands(after, now)
        if not ready:
            answer({"generation": self.standing.generation})

    def begin_anew(self, now: float) -> None:
        """Another process runs the instance: what it drained for is over.  Its label stays."""
        if self.draining:
            self._stands(msgspec.structs.replace(self.standing, draining=False, move_after_s=None), now)

    def _stands(self, standing: Standing, now: float) -> None:
        before, self.standing = self.standing, standing
        self.label = standing.label or self._registered
        self.draining = standing.draining
        if not self.draining:
            self.move_at = None
        elif (before.draining, before.move_after_s) != (True, standing.move_after_s):
            self.move_at = None if standing.move_after_s is None else now + standing.move_after_s

    # -- messages

    def order_weights(self, number: int, weights: Weights) -> None:
        """It is to have these: what is sent after this is computed with them."""
        self.load_answer = None

        def answered(answer: dict[str, Any] | ApiError) -> None:
            if not isinstance(answer, ApiError):
                self.load_answer = answer

        self.query(number, "update_weights", answered, weights.path, weights)

    def query(
        self,
        number: int,
        what: QueryKind,
        answer: Answer,
        argument: str,
        weights: Weights | None = None,
        stand: Stand | None = None,
    ) -> None:
        """The caller has seen that the state is `ready`."""
        self._queries[number] = answer
        self.outgoing.append(Query(number, what, argument, weights, stand))

    def forget(self, number: int) -> None:
        """Nobody waits for the answer to this query any more."""
        self._queries.pop(number, None)

    def replied(self, reply: QueryReply) -> None:
        answer = self._queries.pop(reply.id, None)
        if answer is not None:
            answer(reply.body)

    def cancel(self, number: int, *, has_it: bool) -> None:
        """Sends a cancellation, of a request that it has for sure, or that may still come to it from a peer:
        then the cancellation can be too early, and what it sends of the request is answered by another."""
        if self.state != "ready" or number in self._cancelled:
            return
        if has_it:
            self._cancelled[number] = None
            if len(self._cancelled) > _MAX_CANCELLED:
                self._cancelled.popitem(last=False)
        self.outgoing.append(Cancel(number))

    def ended(self, number: int) -> None:
        """It said that a request is over, whosever that was."""
        self._cancelled.pop(number, None)

    # -- books

    def loaded(self, load: Load, now: float) -> None:
        """Takes in a report.  Raises `MalformedMessage`."""
        self.digest.update(load)
        self.load, self.loaded_at = load, now
        self.loads.append((now, load.running, load.waiting, load.free_blocks))
        if load.steps:
            self.clock.heard(load.written, now)
            self.steps.add(self.incarnation, load.steps, self.clock, now)
        self.full = False
        while self._fresh and self._fresh[0][0] < now - _SETTLE_S:
            self._fresh_tokens -= self._fresh.popleft()[1]

    def sent(self, tokens: int, now: float) -> None:
        """A request with so many tokens to compute was sent there."""
        if len(self._fresh) == self._fresh.maxlen:
            self._fresh_tokens -= self._fresh[0][1]
        self._fresh.append((now, tokens))
        self._fresh_tokens += tokens

    def expects(self, number: int, blocks: int) -> None:
        """A request is to decode here."""
        self.decodes[number] = blocks
        self.unheard_blocks += blocks

    def dismiss(self, number: int, *, heard: bool) -> None:
        """A request does not decode here (any more).  `heard`: it had begun to."""
        blocks = self.decodes.pop(number, None)
        if blocks is not None and not heard:
            self.unheard_blocks -= blocks

    def decodes_now(self, number: int, blocks: int) -> None:
        """The first output of a request came from here."""
        if number in self.decodes:
            self.unheard_blocks -= self.decodes[number]
        self.decodes[number] = blocks

    @property
    def queued_tokens(self) -> int:
        """Tokens of prompts that wait there to be computed."""
        return self._fresh_tokens + (self.load.waiting_tokens if self.load else 0)

    @property
    def sequences(self) -> int:
        """That decode there, or wait to: of all gateways as it says, or of this one if that is more."""
        reported = self.load.running + self.load.waiting if self.load else 0
        return max(reported, len(self.decodes))

    @property
    def free_blocks(self) -> int:
        """What is left when all that was sent there has its blocks."""
        if self.welcome is None:
            return 0
        free = self.load.free_blocks if self.load else self.welcome.num_blocks
        return free - self.unheard_blocks


def ignore(answer: dict[str, Any] | ApiError) -> None:
    """For those who need no answer."""


def lost_error(reason: str) -> InstanceUnavailable:
    return InstanceUnavailable(
        f"the instance was lost while it served this request: {reason}", code="instance_lost", retry_after_s=1
    )
