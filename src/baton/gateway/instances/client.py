"""The gateway's side of its instances: the shell around `Cluster`, with sockets, timers and futures.

What happens to requests is decided in `cluster.py`; this file sends what it wants sent, sets its timer, and
wakes who waits.  There is one `InstanceClient` per instance: those that this process runs are added with
`add` and driven by their supervisors; others register themselves over HTTP (`join`), again and again while
they live, and leave with `leave`, or by not registering again in time.

A defect of this side in distributing output is no instance's fault: then everything in flight fails, the
state is `failed`, and `on_fatal` is called, which by default ends the process with SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import zmq

from baton.gateway.cluster.cluster import Cluster, Requirements
from baton.gateway.cluster.member import Label, Member, State
from baton.gateway.cluster.request import EngineRequest
from baton.gateway.errors import ApiError, BadRequest, Conflict, InstanceUnavailable, NotFound, Overloaded
from baton.gateway.instances.conditions import Conditions
from baton.gateway.instances.connection import InstanceClient
from baton.gateway.instances.inbox import Inbox, Turn
from baton.gateway.instances.limits import Limits, check_size, limits_of
from baton.gateway.instances.orders import Answers, ask_each, checked, merge
from baton.ipc.sockets.curve import Encryption, Place
from baton.ipc.sockets.zeromq import terminate
from baton.protocol.codec import pack_int32
from baton.protocol.messages.requests import QueryKind, Welcome
from baton.protocol.params.sampling import Sampling, Stopping
from baton.protocol.rules.fair_queue import EVERYBODY, Flow
from baton.protocol.weights import Weights

log = logging.getLogger(__name__)

_LINGER_MS = 200
_CLOSE_S = 0.5
"""For the last messages to leave, and for ZeroMQ to end."""
MAX_JOINED = 256
"""Instances of elsewhere: each takes three of ZeroMQ's 1,023 sockets."""


def _terminate(reason: str) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class ClusterClient:
    """Speaks `protocol/messages/requests.py` with every instance.  Belongs to one event loop."""

    def __init__(
        self,
        *,
        retry_wait_s: float = 120.0,
        on_fatal: Callable[[str], None] = _terminate,
        disaggregation_threshold: int | None = None,
        encryption: Encryption | None = None,
        watches: bool = False,
    ) -> None:
        """`encryption`: of connections to other hosts (None: in clear).  `watches`: it sends no requests."""
        self.encryption = encryption
        self.watches = watches
        self.cluster = Cluster(
            secrets.token_hex(16),  # who knows it could speak for it
            retry_wait_s=retry_wait_s,
            disaggregation_threshold=disaggregation_threshold,
        )
        self.instances: dict[str, InstanceClient] = {}
        self.turn = Turn()  # for the inboxes of consumers that listen
        self._on_fatal = on_fatal
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at: float | None = None
        self._waiters = Conditions()
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._closed = False
        self._holding = False
        self.updating = False
        """An update of the weights is under way (`weights.py`)."""
        self.on_weights: Callable[[Weights], None] = lambda weights: None
        """Called when the instances are to have other weights, before they are told."""
        self._weights = self.cluster.weights

    @property
    def state(self) -> State:
        """That of the cluster as a whole."""
        return self.cluster.state

    @property
    def restarts(self) -> dict[str, int]:
        """How many times each instance became ready again after the first."""
        return {name: member.restarts for name, member in self.cluster.members.items()}

    @property
    def paused(self) -> bool:
        """Every instance that serves was told to pause, through this client."""
        serving = self._serving()
        return bool(serving) and all(member.paused for member in serving)

    @property
    def in_flight(self) -> int:
        """Sequences that have not ended."""
        return len(self.cluster)

    @property
    def limits(self) -> Limits | None:
        """Of what serves now; None if nothing does."""
        serving = [member for member in self._serving() if member.label != "prefill"] or self._serving()
        return limits_of([member.welcome for member in serving if member.welcome is not None])

    def require(self, requirements: Requirements) -> None:
        """What instances that join must be like."""
        self.cluster.requirements = requirements

    # -- instances

    def add(self, name: str = "instance-0", label: Label = "mixed") -> InstanceClient:
        """An instance of a supervisor in this process.  Raises `ValueError` for a name that is taken."""
        return self._add(self.cluster.add(name, label))

    def join(
        self,
        name: str,
        endpoint: str,
        incarnation: str,
        label: Label,
        ttl_s: float,
        *,
        process: str = "",
        secret: str = "",
    ) -> None:
        """An instance registers itself, or says that it still lives.  It gets requests when the engine at the
        endpoint has proven to know `secret` ("": at once).

        `label`: that of its start, until somebody orders another one.  `process`: who started it.  Raises
        `Conflict` if the name is that of an instance of this server, or of a running one that somebody else
        started, `Overloaded` if there are too many, `BadRequest` if this incarnation has turned out not to
        fit."""
        if self._closed:
            raise InstanceUnavailable("the server shuts down", code="shutting_down")
        link = self.instances.get(name)
        if link is None:
            if sum(one.member.joined for one in self.instances.values()) >= MAX_JOINED:
                raise Overloaded(
                    f"{MAX_JOINED} instances have joined already, and no more can; remove some, or wait "
                    "until those that are gone are forgotten",
                    code="too_many_instances",
                    retry_after_s=30,
                )
            link = self._add(self.cluster.add(name, label, joined=True))
            self._watchers[name] = asyncio.create_task(link.watch(), name=f"watch {name}")
            log.info("instance %s joins from %s as %s", name, Place.parse(endpoint).address, label)
        elif not link.member.joined:
            raise Conflict(f"name: {name!r} is an instance of this server; join under another name")
        elif link.state == "ready" and link.member.process != process:
            # (Else the two would take the name, and its requests, from each other with each renewal.)
            raise Conflict(f"name: an instance {name!r} is there already; join under another name")
        if link.member.process != process:
            link.member.process = process
            link.member.begin_anew(self._now())
        same = (link.endpoint, link.incarnation, link.secret) == (endpoint, incarnation, secret)
        link.secret = secret
        if same and link.state == "failed":
            raise BadRequest(f"instance {name!r} cannot take part: {link.failure}", code="misfit")
        self.cluster.renew(name, ttl_s, self._now())
        if not same or not link.connected:
            link.open(endpoint, incarnation)
        self.settle()

    def leave(self, name: str, reason: str = "it left the cluster") -> None:
        """An instance that joined goes: what is still there goes on elsewhere.  Raises `NotFound`."""
        link = self._link(name)
        if not link.member.joined:
            raise Conflict(f"{name!r} is an instance of this server; drain it, or stop the server")
        self.cluster.remove(name, self._now(), reason)
        self.settle()

    async def set_label(self, name: str, label: Label, only_if: int | None = None) -> None:
        """Returns when the instance has told its gateways.  `only_if`: see `Cluster`.  Raises `ApiError`."""
        link, order = self._link(name), self.cluster.set_label
        checked(await link.answered(lambda answer: order(name, label, self._now(), only_if, answer=answer)))

    async def drain(self, name: str, move_after_s: float | None = None) -> None:
        """Nothing new goes there; what still runs there after `move_after_s` is continued elsewhere."""
        link, order = self._link(name), self.cluster.drain
        checked(await link.answered(lambda answer: order(name, self._now(), move_after_s, answer=answer)))

    async def undrain(self, name: str) -> None:
        link, order = self._link(name), self.cluster.undrain
        checked(await link.answered(lambda answer: order(name, self._now(), answer=answer)))

    def describe(self, name: str | None = None) -> list[dict[str, Any]]:
        """How the instances stand.  Raises `NotFound`."""
        now = self._now()
        if name is None:
            return self.cluster.snapshot(now)
        self._link(name)
        return [self.cluster.describe(name, now)]

    async def ready(self) -> None:
        """Waits until requests can be served: after the first start of this process, by all of its instances.

        Raises `InstanceUnavailable` when all have failed.  The wait has no deadline of its own: supervisors
        give up on instances that do not become ready.
        """
        cluster = self.cluster
        await self.wait_for(
            lambda: cluster.state == "failed" or (cluster.settled and cluster.state == "ready")
        )
        cluster.check_ready()

    async def close(self) -> None:
        """Cancels what runs and closes the sockets; nothing can be sent afterwards."""
        for watcher in self._watchers.values():
            watcher.cancel()
        if not self._closed:
            self._closed = True
            self.cluster.cancel_all(InstanceUnavailable("the server shuts down", code="shutting_down"))
            self.settle()
            self._fail_all("the server shuts down")
        if self._context is not None:
            terminate(self._context, _CLOSE_S, _LINGER_MS)
            self._context = None

    @property
    def closed(self) -> bool:
        """The server shuts down: no instance is connected any more, and that says nothing about them."""
        return self._closed

    # -- requests

    def check_ready(self) -> None:
        """Raises `InstanceUnavailable` with the reason unless a request can be submitted now."""
        self.cluster.check_ready()

    def check_settled(self) -> None:
        """Raises `InstanceUnavailable` while some instance of this process starts for the first time."""
        if not self.cluster.settled:
            starting = [link.name for link in self.instances.values() if link.state == "starting"]
            raise InstanceUnavailable(
                f"{', '.join(starting)}: loading the model", code="instance_starting", retry_after_s=5
            )

    def check_size(
        self, prompt_bytes: int, sampling: Sampling, stopping: Stopping, name: str = "", cache_salt: str = ""
    ) -> None:
        """Raises `BadRequest` if a sequence with a packed prompt of so many bytes, and all this, is larger
        than engines read, and `InstanceUnavailable` while there is no instance to send it to."""
        self.cluster.check_ready()
        check_size(self._welcomes(), len(self.instances), prompt_bytes, sampling, stopping, name, cache_salt)

    def prepare(
        self,
        prompt: bytes,
        sampling: Sampling,
        stopping: Stopping,
        *,
        inbox: Inbox,
        name: str = "",
        priority: int = 0,
        cache_salt: str = "",
        flow: Flow = EVERYBODY,
        patient: bool = False,
        keys: dict[int, array[int]] | None = None,
    ) -> EngineRequest:
        """One sequence, not sent yet; its output will arrive in `inbox`.  `prompt`: packed int32; `keys`: one
        dictionary for all sequences of this prompt and salt, empty at first (`EngineRequest.keys`).

        Never raises: `check_size` has been asked once for all sequences of its request.
        """
        request = EngineRequest(name, prompt, sampling, stopping, priority, cache_salt, inbox, patient, flow)
        if keys is not None:
            request.keys = keys
        return request

    def enqueue(self, request: EngineRequest) -> None:
        """Sends a sequence that was prepared.  Never raises: if the instances were lost since, the sequence
        waits for one, or fails, as if it had been lost with it."""
        self.cluster.enqueue(request, self._now())
        self.settle()

    def submit(
        self, prompt: Iterable[int], sampling: Sampling, stopping: Stopping, *, inbox: Inbox, **more: Any
    ) -> EngineRequest:
        """`check_size`, `prepare` and `enqueue` of one sequence.  Raises as `check_size`."""
        packed = pack_int32(prompt)
        self.check_size(len(packed), sampling, stopping, more.get("name", ""), more.get("cache_salt", ""))
        request = self.prepare(packed, sampling, stopping, inbox=inbox, **more)
        self.enqueue(request)
        return request

    def cancel(self, request: EngineRequest) -> None:
        """No more output is wanted.  Harmless after the end; nothing arrives afterwards."""
        self.cluster.cancel(request)
        self._send()

    # -- questions and orders

    async def query_one(
        self, name: str, what: QueryKind, deadline_s: float = 5.0, argument: str = ""
    ) -> dict[str, Any]:
        """Asks one instance.  Raises `InstanceUnavailable` without an instance or an answer in time, and
        `NotFound`."""
        return await self._link(name).query(what, deadline_s, argument)

    async def query_each(self, what: QueryKind, deadline_s: float = 5.0, argument: str = "") -> Answers:
        """Asks every instance that is ready."""
        return await ask_each(self.instances, what, deadline_s, argument)

    async def query(
        self, what: QueryKind, deadline_s: float = 5.0, argument: str = "", *, everybody: bool = False
    ) -> dict[str, Any]:
        """Asks all instances that are ready.  The answer of a single one is given as it is; those of several
        are put together by `orders.merge`.

        `everybody`: an instance that is not ready (and has not failed) is an error.  Raises
        `InstanceUnavailable` if no instance is ready, or the only one does not answer in time.
        """
        for link in self.instances.values():
            if everybody and link.state in ("starting", "restarting"):
                raise link.member.unavailable(self.cluster.call(link.name))
        each = await ask_each(self.instances, what, deadline_s, argument)
        if not each:
            raise self.cluster.unavailable()
        if len(self.instances) > 1:
            return merge(each)
        (answer,) = each.values()
        if isinstance(answer, ApiError):
            raise answer
        return answer

    def decide(self, weights: Weights) -> list[Member]:
        """Orders every instance to load these weights; returns the members that have the order now."""
        told = self.cluster.decide(weights)
        self.settle()
        return told

    def release_weights(self, names: list[str]) -> None:
        self.cluster.release_weights(names)
        self.settle()

    # -- the shell

    @property
    def context(self) -> zmq.Context[zmq.Socket[bytes]]:
        if self._context is None:
            self._context = zmq.Context()
        return self._context

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is enqueued inside is sent at the end of it, so that an instance finds it all at once."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False
            self.settle()

    def settle(self) -> None:
        """After anything that may have changed the state: sends, closes, wakes, sets the timer."""
        if self._holding:
            return
        if self.cluster.weights != self._weights:
            self._weights = self.cluster.weights
            self.on_weights(self._weights)
        self._send()
        for link in list(self.instances.values()):
            link.close_if_failing()
            if link.name not in self.cluster.members:
                self._forget(link)
        self._waiters.look()
        deadline = self.cluster.next_deadline()
        if deadline != self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = deadline
            loop = asyncio.get_running_loop()
            self._timer = None if deadline is None else loop.call_at(deadline, self._on_timer)

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Returns when the condition holds after some change."""
        await self._waiters.wait_for(condition)

    def reader_died(self, name: str, error: Exception) -> None:
        reason = f"the gateway could not read the instance's output: {error}"
        log.critical("%s: %s; giving up", name, reason, exc_info=error)
        self._fail_all(reason)
        self._on_fatal(reason)

    # -- inside

    def _now(self) -> float:
        return time.monotonic()

    def _serving(self) -> list[Member]:
        return [member for member in self.cluster.members.values() if member.serves]

    def _welcomes(self) -> list[Welcome]:
        return [member.welcome for member in self._serving() if member.welcome is not None]

    def _add(self, member: Member) -> InstanceClient:
        link = self.instances[member.name] = InstanceClient(self, member)
        return link

    def _link(self, name: str) -> InstanceClient:
        link = self.instances.get(name)
        if link is None:
            names = ", ".join(repr(known) for known in self.instances) or "none"
            raise NotFound(f"there is no instance {name!r}; known: {names}", code="instance_not_found")
        return link

    def _send(self) -> None:
        for name, message in self.cluster.take_outgoing():
            link = self.instances.get(name)
            if link is not None:
                link.send(message)

    def _on_timer(self) -> None:
        self._timer = self._timer_at = None
        self.cluster.on_clock(self._now())
        self.settle()

    def _fail_all(self, reason: str) -> None:
        for name in list(self.cluster.members):
            self.cluster.failed(name, reason, self._now())
        self.settle()
        for link in self.instances.values():
            link.close()

    def _forget(self, link: InstanceClient) -> None:
        """It is no member any more."""
        link.close()
        del self.instances[link.name]
        watcher = self._watchers.pop(link.name, None)
        if watcher is not None:
            watcher.cancel()
        log.info("instance %s is gone: %s", link.name, link.failure)


__all__ = ["ClusterClient", "InstanceClient", "Label", "Limits", "QueryKind", "Requirements", "State"]
