"""A `Cluster` whose instances are lists of messages: what a test says happens, and nothing else."""

from __future__ import annotations

from typing import Any

from baton.gateway.cluster.cluster import Cluster
from baton.gateway.cluster.request import EngineRequest
from baton.gateway.errors import ApiError
from baton.gateway.instances.inbox import Inbox
from baton.protocol.codec import pack_int32, pack_int64
from baton.protocol.messages.handover import InstanceSource
from baton.protocol.messages.requests import (
    Cancel,
    Finished,
    Hello,
    Load,
    Outputs,
    Query,
    Submit,
    ToEngine,
    Welcome,
)
from baton.protocol.params.sampling import Sampling, Stopping
from baton.protocol.rules.fair_queue import EVERYBODY, Flow
from baton.protocol.standing import Stand

BLOCK = 16


def welcome(incarnation: str, **changes: Any) -> Welcome:
    settings: dict[str, Any] = dict(
        incarnation=incarnation,
        num_blocks=1000,
        block_size=BLOCK,
        max_model_len=4096,
        max_num_seqs=8,
        vocab_size=512,
        workers=[1],
        peer_endpoint=f"ipc:///run/{incarnation}.peer",
        source=InstanceSource("tile", BLOCK, []),
    )
    return Welcome(**{**settings, **changes})


def load(**changes: Any) -> Load:
    settings: dict[str, Any] = dict(
        waiting=0,
        running=0,
        waiting_tokens=0,
        free_blocks=1000,
        prefill_tokens_per_s=10_000.0,
        decode_step_s=0.01,
    )
    return Load(**{**settings, **changes})


class FakeCluster:
    """`FakeCluster(p="prefill", d="decode")`: every instance is ready; their incarnations are p.1, d.1, …"""

    def __init__(self, *, threshold: int | None = 0, retry_wait_s: float = 10.0, **labels: Any) -> None:
        self.now = 100.0
        self.cluster = Cluster("g", retry_wait_s=retry_wait_s, disaggregation_threshold=threshold)
        self.sent: dict[str, list[ToEngine]] = {}
        self.starts: dict[str, int] = {}
        self.inbox = Inbox()
        self._tokens: dict[EngineRequest, list[int]] = {}
        for name, label in labels.items():
            self.add(name, label)
            self.start(name)

    def add(self, name: str, label: str = "mixed", **more: Any) -> None:
        self.cluster.add(name, label, **more)
        self.sent[name] = []

    def start(self, name: str, **changes: Any) -> None:
        """A new incarnation is attached and greets."""
        self.starts[name] = self.starts.get(name, 0) + 1
        incarnation = f"{name}.{self.starts[name]}"
        self.cluster.attach(name, incarnation, self.now)
        self.pump()
        assert isinstance(self.sent[name].pop(), Hello)
        self.say(name, welcome(incarnation, **changes))

    def lose(self, name: str, reason: str = "it died") -> None:
        self.cluster.lost(name, reason, self.now)
        self.pump()

    def say(self, name: str, message: Any) -> None:
        self.cluster.receive(name, message, self.now)
        self.pump()

    def tokens(self, name: str, number: int, *tokens: int) -> None:
        self.say(name, Outputs(pack_int64([number] * len(tokens)), pack_int32(tokens)))

    def finish(
        self, name: str, number: int, reason: str = "length", code: str = "", retry_after_s: float = 0.0
    ) -> None:
        finished = Finished(number, reason, code, reason, retry_after_s=retry_after_s)
        self.say(name, Outputs(finished=[finished]))

    def orders(self, name: str) -> list[Stand]:
        """About its standing, that were sent there."""
        return [query.stand for query in self.queries(name) if query.stand is not None]

    def pass_time(self, seconds: float) -> None:
        """Lets the clock run, with every deadline on its way."""
        end = self.now + seconds
        while (deadline := self.cluster.next_deadline()) is not None and deadline <= end:
            assert deadline >= self.now - 1e-9
            self.now = max(deadline, self.now)
            self.cluster.on_clock(self.now)
            self.pump()
        self.now = end

    def pump(self) -> None:
        for name, message in self.cluster.take_outgoing():
            self.sent[name].append(message)

    def request(
        self,
        prompt: Any = (1, 2, 3),
        max_tokens: int = 10,
        priority: int = 0,
        flow: Flow = EVERYBODY,
        **sampling: Any,
    ) -> EngineRequest:
        stopping = Stopping(max_tokens, stop_token_ids=(2,))
        return EngineRequest(
            "r",
            pack_int32(prompt),
            Sampling(seed=1, **sampling),
            stopping,
            priority,
            "",
            self.inbox,
            flow=flow,
        )

    def submit(self, prompt: Any = (1, 2, 3), max_tokens: int = 10, **more: Any) -> EngineRequest:
        request = self.request(prompt, max_tokens, **more)
        self.cluster.submit(request, self.now)
        self.pump()
        return request

    def cancel(self, request: EngineRequest) -> None:
        self.cluster.cancel(request)
        self.pump()

    # -- what came of it

    def submits(self, name: str) -> list[Submit]:
        return [message for message in self.sent[name] if isinstance(message, Submit)]

    def cancels(self, name: str) -> list[int]:
        return [message.id for message in self.sent[name] if isinstance(message, Cancel)]

    def queries(self, name: str) -> list[Query]:
        return [message for message in self.sent[name] if isinstance(message, Query)]

    def received(self, request: EngineRequest) -> list[int]:
        """All tokens that its consumer has seen."""
        seen = self._tokens.setdefault(request, [])
        seen += request.take().tokens
        return seen

    def plan(self, request: EngineRequest) -> str:
        """`p>d,e`: where it is, and where it may go."""
        first, *rest = request.plan
        return first + (">" + ",".join(rest) if rest else "")

    def check_books(self) -> None:
        """The table and the members agree on what is where, and nothing is kept of what has ended."""
        running = self.cluster.requests
        for number, request in running.items():
            assert request.id == number
            assert request.at in request.plan
            assert request not in self.cluster.parked
        for member in self.cluster.members.values():
            for number in member.decodes:
                assert member.name in running[number].plan
            unheard = [b for n, b in member.decodes.items() if not running[n].heard]
            assert member.unheard_blocks == sum(unheard)


def error_of(request: EngineRequest) -> ApiError:
    assert request.error is not None
    return request.error
