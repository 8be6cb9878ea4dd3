"""The gateway that the explorer moves: the production cluster, of one instance or two, and its clients.

Clients read at once what comes, so every token is compared with the oracle's at the moment when a client
would see it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from baton.gateway.cluster.cluster import Cluster
from baton.gateway.cluster.member import Label
from baton.gateway.cluster.request import EngineRequest
from baton.gateway.instances.inbox import Inbox
from baton.protocol.codec import pack_int32, unpack_int64
from baton.protocol.config import InstanceConfig
from baton.protocol.messages.requests import FROM_ENGINE, TO_ENGINE, Failing, Finished, Outputs, QueryKind
from baton.protocol.params.sampling import Sampling, Stopping
from baton.simulation import describe
from baton.simulation.checks.oracle import expected_tokens
from baton.simulation.explorer.machines import Broken

NOW = 100.0
"""Time stands still: nothing in a small scenario is decided by a clock."""
INSTANCE = "i"


@dataclass(frozen=True)
class Ask:
    """What one client wants."""

    prompt: tuple[int, ...]
    max_tokens: int
    priority: int = 0
    stop: bool = False
    """The second token of the answer is a stop token."""
    cancels: bool = False
    """The client may hang up at any moment."""


class _Client:
    """Somebody who wants one answer."""

    def __init__(self, name: str, ask: Ask, expected: list[int], end: str) -> None:
        self.name = name
        self.expected = tuple(expected)
        self.expected_end = end
        self.may_cancel = ask.cancels
        self.tokens: list[int] = []
        self.answer: str | None = None
        self.request: EngineRequest | None = None


class Gateway:
    """The production cluster, and its clients, who read at once what comes."""

    def __init__(
        self,
        config: InstanceConfig,
        asks: Sequence[Ask],
        queries: Sequence[str],
        labels: dict[str, Label] | None = None,
    ) -> None:
        """`labels`: of the instances; None: there is a single one."""
        self.cluster = Cluster("g", retry_wait_s=30.0, disaggregation_threshold=0)
        for name, label in (labels or {INSTANCE: "mixed"}).items():
            self.cluster.add(name, label)
        self.queries: list[str] = list(queries)
        """To be asked, in this order."""
        self.clients: list[_Client] = []
        self.ended: list[int] = []
        """Ids that the engine has ended."""
        self.told_failing = False
        self.streams: dict[int, str] = {}
        """id → the instance that sent its first token."""
        for number, ask in enumerate(asks):
            self.clients.append(_client("ABCDEFGH"[number], ask, config.vocab_size))

    def connect(self, incarnation: str, name: str = INSTANCE) -> None:
        self.told_failing = False
        self.cluster.attach(name, incarnation, NOW)

    def submit_all(self) -> None:
        """Everybody asks, in order."""
        for client in self.clients:
            if client.request is not None:
                self.cluster.submit(client.request, NOW)

    def take_outgoing(self) -> list[bytes]:
        return [TO_ENGINE.encode(message) for _, message in self.cluster.take_outgoing()]

    def take_for(self, names: Sequence[str]) -> list[list[bytes]]:
        """For each of several instances."""
        outgoing = self.cluster.take_outgoing()
        return [[TO_ENGINE.encode(message) for to, message in outgoing if to == name] for name in names]

    def cancel(self, number: int) -> list[bytes]:
        self.hang_up(number)
        return self.take_outgoing()

    def query(self) -> list[bytes]:
        self.cluster.query(INSTANCE, cast(QueryKind, self.queries.pop(0)), _ignore)
        return self.take_outgoing()

    def lost(self, name: str = INSTANCE) -> None:
        """The supervisor says that the instance is gone."""
        self.cluster.lost(name, "the instance died", NOW)
        self._read()

    def hang_up(self, number: int) -> None:
        client = self.clients[number]
        client.may_cancel = False
        client.answer = "cancelled"
        if client.request is not None:
            self.cluster.cancel(client.request)

    def receive_from(self, name: str, data: bytes) -> None:
        """Of one of several instances."""
        message = FROM_ENGINE.decode(data)
        if isinstance(message, Outputs):
            for number in unpack_int64(message.ids):
                if self.streams.setdefault(number, name) != name:
                    raise Broken(
                        f"stream: {name} sends a token of id {number}, as {self.streams[number]} did"
                    )
        self.cluster.receive(name, message, NOW)
        self._read()

    def receive(self, data: bytes) -> list[bytes]:
        message = FROM_ENGINE.decode(data)
        if self.told_failing:
            raise Broken(f"answer: {describe.from_engine(message)} follows Failing, which is the last")
        self.told_failing = isinstance(message, Failing)
        if isinstance(message, Outputs):
            self._check_outputs(message)
        self.cluster.receive(INSTANCE, message, NOW)
        self._read()
        return self.take_outgoing()

    def _check_outputs(self, outputs: Outputs) -> None:
        ended = set(unpack_int64(outputs.ids)).intersection(self.ended)
        if ended:
            raise Broken(f"answer: tokens of requests {sorted(ended)} after their end")
        for finished in outputs.finished:
            if finished.id in self.ended:
                raise Broken(f"answer: request {finished.id} ended twice")
            self.ended.append(finished.id)

    def _read(self) -> None:
        for client in self.clients:
            request = client.request
            if request is None or not request.has_news or client.answer is not None:
                continue
            assert isinstance(request.inbox, Inbox)
            request.inbox.take()
            chunk = request.take()
            client.tokens += chunk.tokens
            if tuple(client.tokens) != client.expected[: len(client.tokens)]:
                raise Broken(f"tokens: {client.name} got {client.tokens}, the oracle says {client.expected}")
            if chunk.error is not None:
                raise Broken(f"answer: {client.name} failed: {chunk.error}")
            elif chunk.finished is not None:
                self._finished(client, chunk.finished)

    def _finished(self, client: _Client, finished: Finished) -> None:
        client.answer = finished.reason
        if finished.reason != client.expected_end or tuple(client.tokens) != client.expected:
            raise Broken(
                f"answer: {client.name} ended with {finished.reason} {finished.code} after {client.tokens}, "
                f"expected {client.expected_end} after {list(client.expected)} {finished.message}".strip()
            )


def _client(name: str, ask: Ask, vocab_size: int) -> _Client:
    sampling, stopping = Sampling(seed=1, temperature=0.0), Stopping(ask.max_tokens)
    if ask.stop:
        tokens, _ = expected_tokens(ask.prompt, sampling, stopping, vocab_size)
        stopping = Stopping(ask.max_tokens, stop_token_ids=(tokens[1],))
    client = _Client(name, ask, *expected_tokens(ask.prompt, sampling, stopping, vocab_size))
    client.request = EngineRequest(
        name, pack_int32(ask.prompt), sampling, stopping, ask.priority, "", Inbox()
    )
    return client


def _ignore(answer: object) -> None:
    """Nobody waits for what a query answers."""
