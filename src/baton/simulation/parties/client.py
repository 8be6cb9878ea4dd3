"""The clients: each wants one answer, and compares what it gets with the oracle's.

A client does what `Generation` does for an HTTP request: takes chunks, and cancels when it is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from baton.gateway.cluster.request import EngineRequest
from baton.gateway.errors import ApiError, InstanceUnavailable
from baton.gateway.instances.inbox import Inbox
from baton.observe.events.story import Story
from baton.protocol.codec import pack_int32
from baton.protocol.weights import Weights
from baton.simulation.checks.oracle import expected_tokens, expected_vector
from baton.simulation.events import Party
from baton.simulation.plans.plan import RequestSpec

if TYPE_CHECKING:
    from baton.simulation.parties.gateway import GatewayProcess
    from baton.simulation.world import World

ASK_AGAIN_S = 0.25
"""A client that was told 503 asks again after so long (clients do, as `Retry-After` tells them)."""
PATIENCE_S = 20.0


class _Inbox(Inbox):
    """An inbox whose consumer is a virtual client."""

    def __init__(self, client: Client) -> None:
        super().__init__()
        self._client = client

    def wake(self) -> None:
        self._client.woken()


class Client(Party):
    """Somebody who wants one answer."""

    def __init__(self, world: World, spec: RequestSpec) -> None:
        super().__init__(f"client{spec.number}")
        self.spec = spec
        self.answer: str | None = None
        """How it ended; None while it waits."""
        self.submitted = False
        self.tokens: list[int] = []
        self.prompt_positions: list[int] = []
        self.num_logprobs = 0
        self.last_progress = 0.0
        self.request: EngineRequest | None = None
        self.story: Story | None = None
        """Its way, as its gateway notes it."""
        self.gateway: GatewayProcess | None = None
        self.expected, self.expected_end = expected_tokens(
            spec.prompt, spec.sampling, spec.stopping, world.plan.config.vocab_size
        )
        self.weights = Weights()
        """Those that gave the tokens of late."""
        self.inbox = _Inbox(self)
        self._world = world
        self._events = world.events
        self._reading = False

    def align(self, tokens: list[int]) -> None:
        """Where these tokens are not what the weights of so far give, newer ones may have given them; older
        ones may not.  What is expected follows."""
        while tokens != self.expected[: len(tokens)]:
            wrong = next(
                (i for i, (a, b) in enumerate(zip(tokens, self.expected, strict=False)) if a != b), None
            )
            newer = [weights for weights in self._world.decided if weights.newer(self.weights)]
            if wrong is None or not newer:
                return
            self.weights = min(newer, key=lambda weights: (weights.generation, weights.name))
            spec = self.spec
            self.expected, self.expected_end = expected_tokens(
                spec.prompt,
                spec.sampling,
                spec.stopping,
                self._world.plan.config.vocab_size,
                self.weights.path,
                tokens[:wrong],
            )

    def may_be_answered(self, vector: bytes) -> bool:
        """Whether it is that of the weights of so far, or of newer ones."""
        spec, pooling = self.spec, self.spec.sampling.pooling
        if pooling is None or self.tokens:
            return False
        newer = [weights for weights in self._world.decided if weights.newer(self.weights)]
        return any(
            vector == expected_vector(spec.prompt, pooling, weights.path)
            for weights in (self.weights, *newer)
        )

    def arrive(self) -> None:
        """Comes, or comes again after it was told that no instance is there."""
        world, spec = self._world, self.spec
        if self.answer is not None:
            return
        gateway = self._balanced(world.gateways[spec.gateway])
        if self._must_wait(gateway, self.arrive):
            return
        if not gateway.alive or not self._submit(gateway):
            if self._events.now > spec.at + PATIENCE_S:
                self.end("unavailable")
            else:
                self._events.after(ASK_AGAIN_S, self, self.arrive)
            return
        if spec.cancel_after_s is not None:
            self._events.after(spec.cancel_after_s, self, self.cancel)

    def _balanced(self, gateway: GatewayProcess) -> GatewayProcess:
        """Another one, if this one is about to leave."""
        others = [one for one in self._world.gateways if one.alive and not one.leaving]
        return others[self.spec.number % len(others)] if gateway.leaving and others else gateway

    def _submit(self, gateway: GatewayProcess) -> bool:
        spec = self.spec
        request = EngineRequest(
            f"r{spec.number}",
            pack_int32(spec.prompt),
            spec.sampling,
            spec.stopping,
            spec.priority,
            spec.salt,
            self.inbox,
            patient=self._world.plan.seed % 2 == 0 and spec.cancel_after_tokens is None,
            flow=spec.flow,
        )
        now = gateway.now()
        story = Story(request.name, now, now, self._events.now, len(spec.prompt))
        request.trail, self.story = story.trail(), story
        try:
            gateway.cluster.submit(request, now)
        except InstanceUnavailable:
            return False
        self.submitted = True
        self.request, self.gateway = request, gateway
        self._world.timeline.stories.append((gateway, story))
        self.last_progress = self._events.now
        gateway.clients[request] = self
        self._world.note(self, f"asks: {spec}", spec.number, "b")
        gateway.pump()
        return True

    def cancel(self) -> None:
        """The client hangs up."""
        if self.gateway is not None and self._must_wait(self.gateway, self.cancel):
            return
        if self.answer is None and self.gateway is not None and self.request is not None:
            self._world.note(self, "hangs up", self.spec.number)
            gateway, request = self.gateway, self.request
            self.end("cancelled")
            gateway.cluster.cancel(request)
            gateway.pump()

    def connection_lost(self) -> None:
        """Its gateway is gone."""
        self.end("gateway gone")

    def woken(self) -> None:
        if not self._reading:
            self._reading = True
            self._events.after(self.spec.slow_s, self, self._read)

    def _must_wait(self, gateway: GatewayProcess, action: Callable[[], None]) -> bool:
        """A stopped gateway does nothing for its clients; what they want is done when it goes on."""
        if gateway.stalled_until <= self._events.now:
            return False
        self._events.at(gateway.stalled_until, self, action)
        return True

    def _read(self) -> None:
        if self.gateway is not None and self._must_wait(self.gateway, self._read):
            return
        self._reading = False
        news, self.inbox._news = self.inbox._news, []
        for request in news:
            request.has_news = False
            if self.answer is None and request is self.request:
                self._advance(request)

    def _advance(self, request: EngineRequest) -> None:
        chunk = request.take()
        world, spec = self._world, self.spec
        self.last_progress = self._events.now
        if chunk.error is not None:
            self._failed(chunk.error)
            return
        self.tokens += chunk.tokens
        self.num_logprobs += len(chunk.logprobs)
        for run in chunk.prompt_logprobs:
            self.prompt_positions += range(run.first, run.first + len(run.positions))
        world.monitor.clients.got(self)
        if chunk.finished is not None:
            finished = chunk.finished
            self.end(finished.reason if not finished.code else f"{finished.reason}: {finished.code}")
            world.monitor.clients.finished(self, finished)
        elif spec.cancel_after_tokens is not None and len(self.tokens) >= spec.cancel_after_tokens:
            self.cancel()

    def _failed(self, error: ApiError) -> None:
        self.end(f"error: {error.code}")
        self._world.monitor.clients.failed(self, error)

    def _tell(self, story: Story, gateway: GatewayProcess) -> None:
        story.ended, story.generated_tokens = gateway.now(), len(self.tokens)
        story.reasons = (self.answer or "",)

    def end(self, answer: str) -> None:
        """Exactly once."""
        self._world.monitor.clients.ended(self, answer)
        self.answer = answer
        self._world.note(self, f"{answer} after {len(self.tokens)} tokens", self.spec.number, "e")
        if self.gateway is not None and self.request is not None:
            if self.story is not None:
                self._tell(self.story, self.gateway)
            self.gateway.clients.pop(self.request, None)
        self._world.open_clients -= 1
