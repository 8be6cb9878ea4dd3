"""The requests of one gateway: where each of them is, and how it goes on when an instance is lost.  No I/O.

Theory.  A request has an id, under which the instances of its *plan* may have it.  It is believed to be at
the first of them, which prefills it, until output comes from another one: with the first token it stays
where that came from.  Only one instance streams a request (`protocol/messages/handover.py`); if output comes
from another one all the same, or under an id that was given up, it is dropped and answered by a `Cancel`.

| what happens | what becomes of a request |
| --- | --- |
| the instance at which it is believed to be is lost | it *goes on*: nobody else streams it |
| another instance of its plan is lost | nothing: the one that has it finds another |
| `Finished(lost)` from where it is believed to be | it *goes on*: handed over, and never heard of again |
| `Finished(lost)` from elsewhere | nothing: it has arrived |
| `Finished(handed_over)` from where it is believed to be | it is there now; if that one is gone, it goes on |
| `Finished`: no room, shutting down, pool too small | it is sent to another instance, if there is one |

To *go on* is to be submitted again, under a new id, with all tokens that came so far (`Submit.generated`),
after the old id has been cancelled wherever it may still be.  Sampling is keyed by seed and position, so
the tokens are the same and the client sees no seam.  If what came so far is complete (the end was lost on
the way), it ends here.

A request may be what kills its instances.  One that lost `SUSPECT_AFTER` of them without a token in between
is *suspect*: of these only one at a time is sent, until a token of it comes, so that the others, which were
only beside it, get away.  After `MAX_FRUITLESS` such losses, or `MAX_LOSSES` in all, a request fails.

While no instance can take it a request waits, at most `retry_wait_s`, if one may still come; else it fails.
Those that wait are sent by priority, those that have tokens first, and fairly by flow: the order in which
instances serve their own queues, which matters where these cannot hold all of them.
"""

from __future__ import annotations

import heapq
import itertools
import logging
from array import array
from collections.abc import Callable

import msgspec

from baton.gateway.arranging.measured import Counting
from baton.gateway.cluster.continued import Continued
from baton.gateway.cluster.member import Member
from baton.gateway.cluster.request import Consumer, EngineRequest, hear_of_prompts, in_order
from baton.gateway.cluster.routing import Job, Plan, choose
from baton.gateway.cluster.trails import Trails
from baton.gateway.errors import ApiError, InstanceUnavailable
from baton.protocol.codec import MalformedMessage, unpack_int32, unpack_int64
from baton.protocol.messages.requests import Finished, Outputs, Routed
from baton.protocol.rules.prefix_keys import short_keys
from baton.protocol.rules.silence import Silence

log = logging.getLogger(__name__)

SUSPECT_AFTER = 3
MAX_FRUITLESS = 5
MAX_LOSSES = 20
_NEXT_SUSPECT_S = 0.05
"""Between two looks whether the suspect that was sent has shown to be harmless."""
_TRY_AGAIN_S = 0.5
"""Between two looks for room, for a request that has lost its instance and found all queues full."""
_ELSEWHERE = ("queue_full", "shutting_down", "never_fits")
"""Codes of a `Finished` after which another instance may still serve the request."""


class RequestTable:
    """`members` is the cluster's, by name."""

    def __init__(
        self,
        members: dict[str, Member],
        ids: itertools.count[int],
        retry_wait_s: float,
        unavailable: Callable[[], InstanceUnavailable],
    ) -> None:
        self.running: dict[int, EngineRequest] = {}
        self.parked: dict[EngineRequest, None] = {}
        """Those that wait for an instance, in order of arrival."""
        self.threshold: int | None = None
        """See `routing.py`."""
        self.gateway = ""
        """What it calls itself in `Hello`."""
        self.traffic = Counting()
        self.num_handed_over = 0
        """Requests that were heard of from another instance than the one they were sent to."""
        self.continued = Continued()
        self._trails = Trails()
        self._members = members
        self._ids = ids
        self._retry_wait_s = retry_wait_s
        self._unavailable = unavailable
        self._deadlines: list[tuple[float, int, EngineRequest]] = []
        """A heap: when to look how long parked requests have waited; those that are not any more are dropped
        when they come to its top."""
        self._try_again_at: float | None = None
        self._trial: EngineRequest | None = None
        """The suspect that was sent last."""
        self._turns = itertools.count(1)

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self.running) + len(self.parked)

    def at(self, name: str) -> list[EngineRequest]:
        """Those that are believed to be at this instance."""
        return [request for request in self.running.values() if request.at == name]

    def involving(self, name: str) -> int:
        """How many are there, or may still come there under their present plans."""
        return sum(name in request.plan for request in self.running.values())

    def next_deadline(self) -> float | None:
        """Costs the same however many are parked: this is asked after every message."""
        if not self.parked:
            for _, _, request in self._deadlines:
                request.timed = None
            self._deadlines.clear()
            return None
        due = self._next_due()
        if due is None or (self._try_again_at is not None and self._try_again_at < due):
            return self._try_again_at
        return due

    def _next_due(self) -> float | None:
        while self._deadlines:
            at, _, request = self._deadlines[0]
            absence = request.absence
            if request in self.parked and absence is not None and absence.deadline == at:
                return at
            heapq.heappop(self._deadlines)
            if request.timed == at:
                request.timed = None
        return None

    def _time(self, request: EngineRequest) -> None:
        """A parked request has an entry for its deadline."""
        assert request.absence is not None  # (it is parked)
        if request.timed != request.absence.deadline:
            request.timed = request.absence.deadline
            heapq.heappush(self._deadlines, (request.timed, next(self._turns), request))

    # -- in and out

    def enqueue(self, request: EngineRequest, now: float) -> None:
        """Sends a new request, or keeps it until there is an instance.  Never raises."""
        request.asked_at = request.asked_at or now
        if not self._place(request, now):
            self._park(request, now)

    def cancel(self, request: EngineRequest) -> None:
        """No more output is wanted.  Harmless after the end; nothing arrives afterwards."""
        if self.running.get(request.id) is request:
            self._retire(request)
        else:
            self.parked.pop(request, None)

    def cancel_all(self, error: ApiError) -> None:
        """Cancels everything; each consumer gets the error."""
        for request in [*self.running.values(), *self.parked]:
            self.cancel(request)
            request.fail(error)

    # -- what instances do

    def lost(self, name: str, reason: str, now: float) -> None:
        """What was at this instance goes on elsewhere.  Its state is not `ready` any more."""
        for request in list(self.running.values()):
            if request.at == name:
                self._retire(request)
                self._lost(request, reason, now)
            elif name in request.plan:
                request.gone.add(name)
        self._give_up_hopeless()

    def move(self, name: str, now: float) -> bool:
        """What is at this draining instance goes on elsewhere, if there is another one that can serve."""
        if not any(member.serves for member in self._members.values()):
            return False
        for request in self.at(name):
            request.note(now, "moved", request.num_generated, name)
            self._retire(request)
            if not self._ends_here(request):
                self.enqueue(request, now)
        return True

    def retry(self, now: float) -> None:
        """An instance can serve again, or there may be room: sends what waits."""
        parked, self.parked = in_order(list(self.parked)), {}
        self._try_again_at = None
        sent = 0
        for request in parked:
            request.refused_by.clear()
            if self._place(request, now):
                sent += 1
            else:
                self._park(request, now)
        if sent:
            log.info("submitted %d requests that waited for an instance", sent)

    def on_clock(self, now: float) -> None:
        if self._try_again_at is not None and now >= self._try_again_at:
            self.retry(now)
        while (at := self._next_due()) is not None and at <= now:
            _, _, request = heapq.heappop(self._deadlines)
            request.timed = None
            assert request.absence is not None  # (it is parked)
            if request.absence.look(now):
                del self.parked[request]
                why = f"{self._reason()}; it was not back within {self._retry_wait_s:g} s"
                request.fail(self.continued.error(request, why))
            else:
                self._time(request)

    def distribute(self, sender: Member, outputs: Outputs, now: float) -> None:
        """Appends tokens to the buffers of their requests; wakes each consumer once."""
        woken: dict[Consumer, None] = {}
        ids, tokens = unpack_int64(outputs.ids), unpack_int32(outputs.tokens)
        if len(ids) != len(tokens) or any(not 0 <= at < len(tokens) for at, _ in outputs.logprobs):
            raise MalformedMessage(f"outputs: {len(ids)} ids and {len(tokens)} tokens do not fit together")
        owners: list[EngineRequest | None] = []
        running, name = self.running, sender.name
        for number, token in zip(ids, tokens, strict=True):
            owner = running.get(number)
            if owner is None or not owner.heard or owner.at != name:  # (nearly always it is the sender's)
                owner = self._owner(sender, number, now)
            owners.append(owner)
            if owner is not None:
                owner.tokens.append(token)
                if not (owner.has_news or owner.patient):
                    owner.inbox.add(owner)
                    woken[owner.inbox] = None
        for index, logprobs in outputs.logprobs:
            owner = owners[index]
            if owner is not None:
                owner.add_logprobs(logprobs)
        hear_of_prompts(self.running, name, outputs, woken)
        for number, prompt_logprobs in outputs.prompt_logprobs:
            owner = self.running.get(number)
            if owner is not None and owner.at == sender.name and owner.add_prompt_logprobs(prompt_logprobs):
                woken[owner.inbox] = None
        for inbox in woken:
            inbox.wake()
        for finished in outputs.finished:
            self._finished(sender, finished, now)

    def routed(self, sender: Member, message: Routed) -> None:
        """Notes where tokens went; nobody is woken: the tokens that follow do that."""
        for number, run in message.runs:
            owner = self.running.get(number)
            if owner is not None and sender.name in owner.plan:
                owner.add_routes(run)

    # -- inside: output

    def _owner(self, sender: Member, number: int, now: float) -> EngineRequest | None:
        """The request whose token this is; None if there is none: then the sender gets a `Cancel`."""
        request = self.running.get(number)
        if request is not None:
            if request.heard and request.at == sender.name:
                return request
            if not request.heard and sender.name in request.plan:
                self._settles(request, sender, now)
                return request
        sender.cancel(number, has_it=True)
        return None

    def _settles(self, request: EngineRequest, sender: Member, now: float) -> None:
        """The first token of a request says where it is, and that it stays there."""
        self._is_at(request, sender)
        sender.decodes_now(request.id, sender.decodes[request.id])
        request.heard, request.absence = True, None
        request.note(now, "heard", 0, sender.name)
        if request.first_at is None:
            request.first_at = now
            self.traffic.began(now - request.asked_at)
        self.continued.resumes(request, now)

    def _is_at(self, request: EngineRequest, holder: Member) -> None:
        """From here on no other instance of the plan may have it."""
        blocks = holder.decodes.get(request.id)
        for name in request.plan:
            member = self._members.get(name)
            if member is None or member is holder:
                continue
            if blocks is None and request.id in member.decodes:
                holder.expects(request.id, blocks := member.decodes[request.id])
            member.dismiss(request.id, heard=False)
        if blocks is None:  # the one that was to decode it has been lost, and its books with it
            holder.expects(request.id, 0)
        self.num_handed_over += request.at != holder.name
        request.at, request.plan = holder.name, (holder.name,)

    def _finished(self, sender: Member, finished: Finished, now: float) -> None:
        sender.ended(finished.id)
        request = self.running.get(finished.id)
        self._trails.told(request, sender, finished, now)
        if request is None or sender.name not in request.plan:
            return
        if finished.reason == "lost":
            if request.at == sender.name:
                self._retire(request)
                self._lost(request, finished.message or "it was lost while it was handed over", now)
            return
        if finished.reason == "handed_over":
            self._handed_over(request, sender, finished.message, now)
            return
        request.at = sender.name
        self._drop(request)
        if finished.code in _ELSEWHERE and self._goes_elsewhere(request, sender, finished, now):
            return
        if finished.code == "queue_full":
            finished = msgspec.structs.replace(finished, retry_after_s=request.retry_after_s)
        if request.first_at is not None:
            self.traffic.ended_with(request.num_generated, now - request.first_at)
        request.end(finished)

    def _handed_over(self, request: EngineRequest, sender: Member, incarnation: str, now: float) -> None:
        """Another instance has it now.  If that one is gone, or was gone for a while and has dropped what
        it had of this gateway, nothing of the request may come."""
        for name in request.plan:
            member = self._members.get(name)
            if member is None or member.state != "ready" or name in request.gone:
                continue
            if member.incarnation == incarnation:
                self._is_at(request, member)
                return
        self._retire(request)
        self._lost(request, "the instance that it was handed over to is gone", now)

    def _goes_elsewhere(self, request: EngineRequest, sender: Member, finished: Finished, now: float) -> bool:
        """Another instance takes a request that this one refused; or it waits, if tokens of it are out."""
        request.refused_by.add(sender.name)
        request.note(now, "refused", 0, finished.code)
        if finished.code == "queue_full":
            sender.full = True
            if finished.retry_after_s > 0:
                known = request.retry_after_s or finished.retry_after_s
                request.retry_after_s = min(known, finished.retry_after_s)
        if self._place(request, now):
            return True
        if finished.code == "never_fits" or not (request.losses or request.num_generated):
            request.refused_by.clear()
            return False
        self._park(request, now)
        self._look_again(now + _TRY_AGAIN_S)
        return True

    # -- inside: placing

    def _place(self, request: EngineRequest, now: float) -> bool:
        """Sends a request by the best plan; False if there is none, or it is not its turn."""
        suspect = request.fruitless >= SUSPECT_AFTER
        if suspect and self._on_trial():
            return False
        members = [m for m in self._members.values() if m.name not in request.refused_by]
        keys = request.keys

        def num_cached(member: Member) -> int:
            assert member.welcome is not None  # (it serves)
            size = member.welcome.block_size
            if size not in keys:
                keys[size] = array("q", short_keys(request.prompt, request.cache_salt, size))
            return member.digest.match(keys[size], now) * size

        num_tokens = len(request.prompt) // 4 + request.num_generated
        left = request.stopping.max_tokens - request.num_generated
        stays = left <= 1 or (request.sampling.prompt_logprobs is not None and not request.num_generated)
        decodes = request.sampling.pooling is None
        stays = stays or not decodes
        plan = choose(members, Job(num_tokens, stays, num_cached, decodes), self.threshold)
        if plan is None:
            return False
        self._trial = request if suspect else self._trial
        self._send(request, plan, num_tokens, now)
        if plan.at.welcome is not None:
            plan.at.digest.expect(keys.get(plan.at.welcome.block_size, ()), now)
        return True

    def _send(self, request: EngineRequest, plan: Plan, num_tokens: int, now: float) -> None:
        request.id = next(self._ids)
        request.at, request.plan, request.heard = plan.at.name, plan.names, False
        request.work = plan.work
        request.gone.clear()
        self.running[request.id] = request
        request.note(now, "sent", plan.work, ">".join(plan.names))
        plan.at.turn = next(self._turns)
        plan.at.sent(plan.work, now)
        self.traffic.sent(plan.work)
        decoder = plan.decoders[0] if plan.decoders else plan.at
        decoder.turn = plan.at.turn
        assert decoder.welcome is not None  # (it serves)
        decoder.expects(request.id, num_tokens // decoder.welcome.block_size + 1)
        plan.at.outgoing.append(request.submit(plan.targets(self.gateway, request.id)))

    def _retire(self, request: EngineRequest) -> None:
        """Gives the request's id up, and tells every instance that may have it."""
        plan, at = request.plan, request.at
        self._drop(request)
        for name in plan:
            member = self._members.get(name)
            if member is not None:
                member.cancel(request.id, has_it=name == at)

    def _drop(self, request: EngineRequest) -> None:
        """Takes a request out of the books."""
        del self.running[request.id]
        self._trails.retired(request)
        for name in request.plan:
            member = self._members.get(name)
            if member is not None:
                member.dismiss(request.id, heard=request.heard)
        request.plan, request.at = (), ""

    def _lost(self, request: EngineRequest, reason: str, now: float) -> None:
        """A request whose instance is gone ends here, fails, or goes on."""
        if self._ends_here(request):
            return
        num_generated = request.num_generated
        request.note(now, "lost", num_generated, reason)
        request.losses += 1
        request.fruitless = request.fruitless + 1 if num_generated == request.known else 1
        request.known = num_generated
        if request.fruitless >= MAX_FRUITLESS or request.losses >= MAX_LOSSES:
            why = f"{reason} (it lost its instance {request.losses} times)"
            request.fail(self.continued.error(request, why))
            return
        request.refused_by.clear()
        request.absence = None
        self.continued.goes_on(request, now)
        self.enqueue(request, now)

    def _ends_here(self, request: EngineRequest) -> bool:
        """Everything came but the word that it was everything."""
        stopping = request.stopping
        if request.num_generated > stopping.min_tokens and request.last_token in stopping.stop_token_ids:
            request.end(Finished(request.id, "stop"))
        elif request.num_generated >= stopping.max_tokens:
            request.end(Finished(request.id, "length"))
        else:
            return False
        return True

    def _park(self, request: EngineRequest, now: float) -> None:
        request.at, request.plan = "", ()
        request.note(now, "parked")
        if request.absence is None:
            request.absence = Silence(self._retry_wait_s, now)
        self.parked[request] = None
        self._time(request)
        if self._on_trial() and request.fruitless >= SUSPECT_AFTER:
            self._look_again(now + _NEXT_SUSPECT_S)
        self._give_up_hopeless()

    def _on_trial(self) -> bool:
        """A suspect was sent, and nothing came of it yet."""
        trial = self._trial
        return trial is not None and not trial.heard and self.running.get(trial.id) is trial

    def _look_again(self, at: float) -> None:
        """Parked requests are tried again then, if not before."""
        self._try_again_at = at if self._try_again_at is None else min(self._try_again_at, at)

    def _give_up_hopeless(self) -> None:
        """No instance is left that could still come: nothing waits for one."""
        if not self.parked or any(member.state != "failed" for member in self._members.values()):
            return
        parked, self.parked = self.parked, {}
        for request in parked:
            began = request.losses or request.num_generated
            request.fail(self.continued.error(request, self._reason()) if began else self._unavailable())

    def _reason(self) -> str:
        """Why there is no instance, for people."""
        reasons = {member.name: member.failure or "it drains" for member in self._members.values()}
        if len(reasons) == 1:
            return next(iter(reasons.values()))
        return "; ".join(f"{name}: {reason}" for name, reason in reasons.items()) or "no instance is left"
