"""An instance in one process: the real core, the real slots, the simulated executor, two FIFO queues.

Nothing moves by itself: a test says which party does something next, and how much of what waits it takes.
After every event of the engine the books are checked, and every answer is checked against the oracle.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from baton.engine.core import EngineCore
from baton.engine.request import Request
from baton.engine.scheduling.scheduler import Decisions
from baton.engine.states import State
from baton.executor.simulated.executor import SimulatedExecutor, simulated_next_token
from baton.launch.planning.instance_config import instance_config
from baton.protocol.codec import pack_int32, unpack_int32, unpack_int64
from baton.protocol.config import CostModel
from baton.protocol.messages.commands import CommandBatch
from baton.protocol.messages.reports import StepReport, WorkerReady
from baton.protocol.messages.requests import (
    Cancel,
    Finished,
    FromEngine,
    Hello,
    Outputs,
    Query,
    QueryReply,
    Submit,
    Welcome,
)
from baton.protocol.params.sampling import Sampling, Stopping
from baton.worker.slots.composition import composition_of
from baton.worker.slots.outcome import Admitted
from baton.worker.slots.slots import Slots


@dataclass
class Client:
    """What one request asked for and what it got."""

    submit: Submit
    tokens: list[int] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, int]] = field(default_factory=list)
    """(position, token) of each."""
    logprobs: list[int] = field(default_factory=list)
    finished: Finished | None = None

    @property
    def prompt(self) -> list[int]:
        return list(unpack_int32(self.submit.prompt))


def _goes_before(seated: Request, waiting: Request) -> bool:
    """Newcomers of one priority take turns by flow, and each gateway's are a flow; all else is by rank."""
    ours, theirs = (seated.rank[0], not seated.continued), (waiting.rank[0], not waiting.continued)
    if ours == theirs and (seated.continued or waiting.lets_pass or seated.flow == waiting.flow):
        return seated.rank < waiting.rank
    return ours <= theirs


class World:
    """Engine and worker of one instance; gateways are names."""

    def __init__(self, *, cost: CostModel | None = None, **changes) -> None:
        options = {
            "model": "",
            "executor": "simulated",
            "vocab_size": 50,
            "max_model_len": 64,
            "block_size": 4,
            "num_blocks": 12,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 16,
            "max_waiting": 100,
            "load_interval_s": 0.0,
        }
        self.config = instance_config(**{**options, **changes})
        self.now = 100.0
        self.core = EngineCore(self.config, incarnation="inc", workers=[4242], now=self.now)
        self.executor = SimulatedExecutor(
            num_blocks=self.config.num_blocks,
            block_size=self.config.block_size,
            max_num_seqs=self.config.max_num_seqs,
            vocab_size=self.config.vocab_size,
            cost=cost,
        )
        self.slots = Slots(
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_model_len=self.config.max_model_len,
            block_size=self.config.block_size,
            num_blocks=self.config.num_blocks,
            composition=composition_of(self.config),
        )
        self.commands: deque[CommandBatch] = deque()
        self.reports: deque[StepReport] = deque()
        self.clients: dict[tuple[bytes, int], Client] = {}
        self.replies: list[QueryReply] = []
        self.welcomed: list[bytes] = []
        self.gone: set[bytes] = set()
        self.cancelled: set[int] = set()
        self.idle_steps = 0
        self._ids = 0
        self._step = 0
        self._applied = 0
        self._sequence = 0
        info = self.executor.info
        self.core.on_report(
            0,
            WorkerReady(0, info.num_blocks, info.block_size, info.tile, info.block_bytes, info.vocab_size),
            self.now,
        )
        self._unchecked_decide = self.core.scheduler.decide
        self.core.scheduler.decide = self._decide

    # -- gateways

    def hello(self, gateway: bytes = b"g") -> None:
        self.core.on_message(gateway, Hello(gateway.decode()), self.now)
        self.flush()

    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        *,
        gateway: bytes = b"g",
        priority: int = 0,
        salt: str = "",
        stop: tuple[int, ...] = (),
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        flush: bool = True,
    ) -> Client:
        self._ids += 1
        sampling = Sampling(seed=1, temperature=0.0, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
        stopping = Stopping(max_tokens=max_tokens, stop_token_ids=stop)
        submit = Submit(
            self._ids, f"r{self._ids}", pack_int32(prompt), sampling, stopping, priority, cache_salt=salt
        )
        client = self.clients[gateway, submit.id] = Client(submit)
        self.core.on_message(gateway, submit, self.now)
        if flush:
            self.flush()
        return client

    def cancel(self, client: Client, gateway: bytes = b"g") -> None:
        self.cancelled.add(client.submit.id)
        self.core.on_message(gateway, Cancel(client.submit.id), self.now)
        self.flush()

    def query(self, what: str, gateway: bytes = b"g") -> dict:
        self.core.on_message(gateway, Query(7, what), self.now)
        self.flush()
        return self.replies[-1].body

    def lose(self, gateway: bytes) -> None:
        self.gone.add(gateway)
        self.core.gateway_lost(gateway)
        self.flush()

    # -- engine

    def flush(self) -> None:
        batch, messages, peers = self.core.flush(self.now)
        assert not peers
        if batch is not None:
            self._sequence += 1
            assert batch.sequence == self._sequence
            self.commands.append(batch)
        for gateway, message in messages:
            self._deliver(gateway, message)
        assert self.core.flush(self.now) == (None, [], []), "deciding again decides nothing"
        self.core.scheduler.ledger.check()
        assert self.core.failure is None

    def read_reports(self, count: int = 1_000_000) -> int:
        """The engine reads so many reports in one turn."""
        count = min(count, len(self.reports))
        for _ in range(count):
            self.core.on_report(0, self.reports.popleft(), self.now)
            self.core.scheduler.ledger.check()
        self.flush()
        return count

    def _decide(self) -> Decisions:
        """`Scheduler.decide`, checked: admissions follow the rank, victims are the youngest of the lowest."""
        scheduler = self.core.scheduler
        followed = {request for request in scheduler.slots if request and request.state is State.FOLLOWING}
        decisions = self._unchecked_decide()
        waiting = list(scheduler.waiting_requests())
        stay = (State.RUNNING, State.FOLLOWING)
        running = [request.rank for request in scheduler.slots if request and request.state in stay]
        seated = {admission.request for admission in decisions.admitted} - followed
        for newcomer in (*seated, *decisions.following):
            assert all(_goes_before(newcomer, one) for one in waiting)
        for victim in (*decisions.preempted, *decisions.gave_up):
            assert all(rank < victim.rank for rank in running)
        for request in scheduler.slots:
            assert (
                request is None
                or request.held * self.config.block_size < request.limit + self.config.block_size
            )
        return decisions

    def _deliver(self, gateway: bytes, message: FromEngine) -> None:
        assert gateway not in self.gone
        if isinstance(message, QueryReply):
            self.replies.append(message)
        elif isinstance(message, Welcome):
            self.welcomed.append(gateway)
        elif isinstance(message, Outputs):
            ids, tokens = unpack_int64(message.ids), unpack_int32(message.tokens)
            for number, token in zip(ids, tokens, strict=True):
                client = self.clients[gateway, number]
                assert client.finished is None, "a token after the end"
                client.tokens.append(token)
            for index, logprobs in message.logprobs:
                assert logprobs.token == tokens[index]
                self.clients[gateway, ids[index]].logprobs.append(logprobs.token)
            for number, run in message.prompt_logprobs:
                client = self.clients[gateway, number]
                for offset, position in enumerate(run.positions):
                    client.prompt_logprobs.append((run.first + offset, position.token))
            for finished in message.finished:
                client = self.clients[gateway, finished.id]
                assert client.finished is None, "two ends"
                client.finished = finished

    # -- worker

    def apply(self, count: int = 1_000_000) -> int:
        """The worker applies so many command batches."""
        count = min(count, len(self.commands))
        closings = []
        for _ in range(count):
            batch = self.commands.popleft()
            assert batch.sequence == self._applied + 1
            self._applied = batch.sequence
            for command in batch.commands:
                result = self.slots.apply(command)
                if isinstance(result, Admitted):
                    self.executor.admit(*result)
                elif result is not None:
                    self.executor.release(result.slot)
                    closings.append(result)
        if closings:
            self.reports.append(StepReport(step=0, applied=self._applied, closings=closings))
        return count

    def step(self) -> bool:
        """The worker runs one step, if there is anything to run."""
        batch = self.slots.compose(self._step + 1)
        if batch is None:
            self.idle_steps += 1
            return False
        self._step += 1
        before = self.executor.virtual_seconds
        outcome = self.slots.commit(batch, self.executor.execute(batch))
        seconds = self.executor.virtual_seconds - before
        for closed in outcome.closings:
            self.executor.release(closed.slot)
        self.reports.append(outcome.report(self._step, self._applied, seconds or 0.001))
        return True

    # -- together

    def drain(self, limit: int = 20_000) -> None:
        """Everybody works, in turn, until nothing is left to do."""
        for _ in range(limit):
            moved = self.apply() + self.read_reports() + self.step()
            if not moved and not self.commands and not self.reports:
                return
        raise AssertionError(f"still busy after {limit} rounds: {self.core.stats(self.now)}")

    def check_end(self) -> None:
        """Everybody has one answer, which is right, and nobody holds anything."""
        stats = self.core.stats(self.now)
        assert stats["violations"] == 0
        assert stats["running"] == stats["closing"] == stats["waiting"] == 0
        assert stats["blocks"]["held"] == 0
        assert stats["blocks"]["free"] + stats["blocks"]["cached"] == self.config.num_blocks
        assert self.core.next_deadline() is None
        for (gateway, _), client in self.clients.items():
            if gateway not in self.gone:
                self.check_answer(client)

    def check_answer(self, client: Client) -> None:
        finished, stopping = client.finished, client.submit.stopping
        assert finished is not None, f"{client.submit.name} has no answer"
        expected = self.oracle(client)
        if finished.reason in ("stop", "length"):
            assert client.tokens == expected
            stopped = expected[-1] in stopping.stop_token_ids
            assert finished.reason == ("stop" if stopped else "length")
            if client.submit.sampling.prompt_logprobs is not None:
                assert client.prompt_logprobs == list(enumerate(client.prompt))[1:]
            if client.submit.sampling.logprobs is not None:
                assert client.logprobs == client.tokens
        else:
            if finished.reason == "aborted":
                assert client.submit.id in self.cancelled
            else:
                assert finished.reason == "rejected"
                assert finished.code in ("queue_full", "never_fits")
                assert client.tokens == []
            assert client.tokens == expected[: len(client.tokens)]

    def oracle(self, client: Client) -> list[int]:
        """What the request would get if it were alone."""
        prompt, stopping = client.prompt, client.submit.stopping
        text = list(prompt)
        while len(text) < len(prompt) + stopping.max_tokens:
            text.append(simulated_next_token(text, self.config.vocab_size))
            if text[-1] in stopping.stop_token_ids:
                break
        return text[len(prompt) :]
