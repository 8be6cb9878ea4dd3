"""Some instances in one process that hand requests over to each other: real cores, slots and pools.

Nothing moves by itself: a test says which party does something next.  Messages are encoded and decoded, the
books are checked after every event, and every token of every answer is compared with the oracle as it comes:
a page that was not copied, or copied when it was no longer P's, shows in the tokens.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import msgspec
import numpy as np

from baton.engine.core import EngineCore
from baton.executor.simulated.executor import SimulatedExecutor, simulated_next_token
from baton.launch.planning.instance_config import instance_config
from baton.protocol.codec import pack_int32, unpack_int32, unpack_int64
from baton.protocol.messages.commands import CommandBatch, Control, DropFetch, Fetch
from baton.protocol.messages.handover import PEER
from baton.protocol.messages.reports import ControlDone, Fetched, LayersDone, StepReport, WorkerReady
from baton.protocol.messages.requests import (
    Cancel,
    Finished,
    Hello,
    Load,
    Outputs,
    Query,
    QueryReply,
    Submit,
    Target,
)
from baton.protocol.params.sampling import Sampling, Stopping
from baton.transfer.layout import plan
from baton.worker.slots.outcome import Admitted
from baton.worker.slots.slots import Slots

from .introductions import introduce

GATEWAY = b"g"
LEASE_S = 3.0


@dataclass
class Client:
    """What one request asked for, and what came, from whom."""

    submit: Submit
    plan: list[str]
    tokens: list[int] = field(default_factory=list)
    senders: list[str] = field(default_factory=list)
    finished: list[tuple[str, Finished]] = field(default_factory=list)
    cancelled: bool = False

    def expected(self, vocab_size: int) -> list[int]:
        """What it would get if it were alone, after what it has got already."""
        prompt = list(unpack_int32(self.submit.prompt))
        text = prompt + list(unpack_int32(self.submit.generated))
        start, stopping = len(text), self.submit.stopping
        while len(text) < len(prompt) + stopping.max_tokens:
            text.append(simulated_next_token(text, vocab_size))
            if text[-1] in stopping.stop_token_ids:
                break
        return text[start:]

    @property
    def reasons(self) -> list[str]:
        return [finished.reason for _, finished in self.finished]


class Node:
    """One instance: engine core, and workers that do what they are told when the test says so."""

    def __init__(self, cluster: Cluster, name: str, **changes) -> None:
        options = {
            "model": "",
            "executor": "simulated",
            "vocab_size": 50,
            "max_model_len": 64,
            "block_size": 4,
            "num_blocks": 40,
            "max_num_seqs": 6,
            "max_num_batched_tokens": 8,
            "load_interval_s": 0.0,
            "lease_s": LEASE_S,
            "simulated_layers": 2,
            "simulated_kv_heads": 2,
        }
        self.config = instance_config(**{**options, **changes})
        self.cluster, self.name = cluster, name
        self.dead = False
        ranks = range(self.config.tensor_parallel_size)
        self.core = cluster.make_core(
            self.config,
            incarnation=name,
            workers=[100 + rank for rank in ranks],
            now=cluster.now,
            peer_endpoint=f"ipc://{name}",
        )
        self.executors = [SimulatedExecutor.from_config(self.config, rank) for rank in ranks]
        self.slots = Slots(
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_model_len=self.config.max_model_len,
            block_size=self.config.block_size,
            num_blocks=self.config.num_blocks,
        )
        self.commands: deque[CommandBatch] = deque()
        self.reports: list[deque] = [deque() for _ in ranks]
        self.fetches: list[dict[int, Fetch]] = [{} for _ in ranks]
        """By rank: those that are under way."""
        self.step_number = self.applied = 0
        self.replies: list[QueryReply] = []
        for rank, executor in enumerate(self.executors):
            source = msgspec.structs.replace(executor.pool.source(rank), shared_memory=name)
            info = executor.info
            ready = WorkerReady(
                rank, info.num_blocks, info.block_size, info.tile, info.block_bytes, info.vocab_size, source
            )
            self.core.on_report(rank, ready, cluster.now)
        self.core.on_message(GATEWAY, Hello("gate"), cluster.now)
        self.flush()

    def target(self, prefiller: Node, number: int) -> Target:
        return introduce(self.name, f"ipc://{self.name}", prefiller.name, number)

    @property
    def counts(self) -> dict[str, int]:
        return self.core.scheduler.ledger.counts()

    @property
    def counters(self):
        return self.core.counters.handovers

    # -- engine

    def flush(self) -> None:
        now = self.cluster.now
        batch, messages, peers = self.core.flush(now)
        if batch is not None:
            self.commands.append(batch)
        for _, message in messages:
            self.cluster.receive(self, message)
        for to, message in peers:
            assert to.endpoint == f"ipc://{to.incarnation}"
            self.cluster.send(self.name, to.incarnation, message)
        assert self.core.flush(now) == (None, [], []), "deciding again decides nothing"
        self.check()

    def check(self) -> None:
        scheduler = self.core.scheduler
        scheduler.ledger.check()
        assert self.core.failure is None
        assert len(scheduler.room._free_slots) >= len(scheduler.arriving)

    def tell(self, message) -> None:
        self.core.on_message(GATEWAY, message, self.cluster.now)
        self.flush()

    def query(self, what: str, argument: str = "") -> dict:
        self.tell(Query(1, what, argument))
        return self.replies[-1].body

    def clock(self) -> None:
        self.core.on_clock(self.cluster.now)
        self.flush()

    def read(self, count: int = 1 << 30) -> int:
        moved = 0
        for rank, reports in enumerate(self.reports):
            for _ in range(min(count, len(reports))):
                self.core.on_report(rank, reports.popleft(), self.cluster.now)
                self.core.scheduler.ledger.check()
                moved += 1
        if moved:
            self.flush()
        return moved

    # -- workers

    def apply(self, count: int = 1 << 30) -> int:
        count = min(count, len(self.commands))
        closings = []
        for _ in range(count):
            batch = self.commands.popleft()
            self.applied = batch.sequence
            for command in batch.commands:
                if isinstance(command, Fetch):
                    for fetches in self.fetches:
                        fetches[command.id] = command
                    continue
                if isinstance(command, DropFetch):
                    for rank, fetches in enumerate(self.fetches):
                        for number in command.ids:
                            if fetches.pop(number, None) is not None:
                                self.reports[rank].append(Fetched(rank, number, dropped=True))
                    continue
                if isinstance(command, Control) and command.id:
                    for rank, reports in enumerate(self.reports):
                        reports.append(ControlDone(rank, command.id))
                result = self.slots.apply(command)
                if isinstance(result, Admitted):
                    for executor in self.executors:
                        executor.admit(*result)
                elif result is not None:
                    self._release(result.slot)
                    closings.append(result)
        if closings:
            self.reports[0].append(StepReport(step=0, applied=self.applied, closings=closings))
        return count

    def _release(self, slot: int) -> None:
        for executor in self.executors:
            executor.release(slot)

    def step(self, on_layer=None) -> bool:
        """One step of all ranks.  `on_layer`: called when a layer of a last chunk is done and reported."""
        batch = self.slots.compose(self.step_number + 1)
        if batch is None:
            return False
        self.step_number += 1
        slots, epochs = self.slots.last_chunks(batch)

        def report(layers: int) -> None:
            self.reports[0].append(LayersDone(pack_int32(slots), pack_int32(epochs), layers))
            if on_layer is not None:
                on_layer()

        followers = [executor.execute(batch) for executor in self.executors[1:]]
        result = self.executors[0].execute(batch, report if slots else None)
        assert all((other.tokens == result.tokens).all() for other in followers)
        outcome = self.slots.commit(batch, result)
        for closed in outcome.closings:
            self._release(closed.slot)
        self.reports[0].append(outcome.report(self.step_number, self.applied, 0.001))
        return True

    def fetch(self, rank: int, count: int = 1 << 30, error: str = "") -> int:
        """So many fetches of a rank are carried out and reported, or end with an error."""
        moved = 0
        for number, fetch in list(self.fetches[rank].items())[:count]:
            del self.fetches[rank][number]
            moved += 1
            copied = 0 if error else self.copy(rank, fetch)
            why = error or ("" if copied is not None else "the source is dead")
            self.reports[rank].append(Fetched(rank, number, error=why, num_bytes=copied or 0, seconds=0.001))
        return moved

    def copy(self, rank: int, fetch: Fetch) -> int | None:
        """Copies as a worker would; None: the source is dead."""
        source = self.cluster.nodes[fetch.source.ranks[0].shared_memory]
        if source.dead:
            return None
        pool = self.executors[rank].pool
        pages, blocks = (np.array(unpack_int32(data), np.int32) for data in (fetch.pages, fetch.blocks))
        total = 0
        for copy in plan(
            pool, fetch.source.ranks, pages, blocks, fetch.first_layer, fetch.num_layers, reader=rank
        ):
            there = source.executors[copy.source.rank].pool.array()
            layers = slice(copy.first_layer, copy.first_layer + copy.num_layers)
            taken = there[copy.pages, layers, :, copy.source_head : copy.source_head + copy.num_heads]
            pool.array()[copy.blocks, layers, :, copy.head : copy.head + copy.num_heads] = taken
            total += taken.nbytes
        return total

    def work(self) -> int:
        """Everything that can be done here now."""
        moved = self.apply()
        moved += sum(self.fetch(rank) for rank in range(len(self.fetches)))
        moved += self.step()
        return moved + self.read()


class Cluster:
    """Nodes, the connections between them, and one gateway that is connected to all."""

    def __init__(self, *, make_core=EngineCore) -> None:
        self.make_core = make_core
        self.now = 100.0
        self.nodes: dict[str, Node] = {}
        self.wires: dict[tuple[str, str], deque[bytes | None]] = {}
        """None: the receiver sees that this is another connection than before."""
        self.sent: list[tuple[str, str, object]] = []
        """All messages between engines: (from, to, message)."""
        self.clients: dict[int, Client] = {}
        self.loads: list[tuple[str, Load]] = []

    def add(self, name: str, **changes) -> Node:
        node = self.nodes[name] = Node(self, name, **changes)
        return node

    def submit(self, node: Node, prompt: list[int], max_tokens: int, *decoders: Node, **changes) -> Client:
        number = len(self.clients) + 1
        sampling = changes.pop("sampling", Sampling(seed=1, temperature=0.0))
        stopping = Stopping(max_tokens=max_tokens, stop_token_ids=changes.pop("stop", ()))
        targets = tuple(decoder.target(node, number) for decoder in decoders)
        generated = pack_int32(changes.pop("generated", []))
        submit = Submit(
            number,
            f"r{number}",
            pack_int32(prompt),
            sampling,
            stopping,
            generated=generated,
            decoders=targets,
            **changes,
        )
        names = [node.name, *(decoder.name for decoder in decoders)]
        client = self.clients[number] = Client(submit, names)
        node.tell(submit)
        return client

    def cancel(self, client: Client, *nodes: Node) -> None:
        client.cancelled = True
        for node in nodes:
            node.tell(Cancel(client.submit.id))

    # -- messages

    def send(self, source: str, to: str, message) -> None:
        self.sent.append((source, to, message))
        if to in self.nodes and not self.nodes[to].dead:
            self.wires.setdefault((source, to), deque()).append(PEER.encode(message))

    def deliver(self, source: str | None = None, to: str | None = None, count: int = 1 << 30) -> int:
        moved = 0
        for (one, two), wire in list(self.wires.items()):
            if source in (None, one) and to in (None, two):
                for _ in range(min(count, len(wire))):
                    data, core = wire.popleft(), self.nodes[two].core
                    if data is None:
                        core.peer_lost(one, self.now)
                    else:
                        core.on_peer(one, PEER.decode(data), self.now)
                    self.nodes[two].flush()
                    moved += 1
        return moved

    def said(self, kind: type, source: str | None = None) -> list:
        return [m for one, _, m in self.sent if isinstance(m, kind) and source in (None, one)]

    def disconnect(self, one: Node, two: Node, *, dead: bool = False) -> None:
        """The connections between two nodes are gone, with everything on them."""
        for pair in ((one.name, two.name), (two.name, one.name)):
            self.wires.pop(pair, None)
        for node, other in ((one, two), (two, one)):
            if not node.dead:
                node.core.peer_lost(other.name, self.now, dead=dead)
                node.flush()

    def lose_link(self, one: Node, two: Node) -> None:
        """`one` notices that its own connection to `two` is gone; the other direction is well, and `two` will
        see that a new connection has been opened."""
        self.wires[one.name, two.name] = deque((None,))
        one.core.peer_lost(two.name, self.now)
        one.flush()

    def kill(self, node: Node, *, noticed: bool = True) -> None:
        node.dead = True
        for other in self.nodes.values():
            if other is not node and not other.dead:
                self.disconnect(other, node, dead=noticed)

    def receive(self, node: Node, message) -> None:
        if isinstance(message, QueryReply):
            node.replies.append(message)
        elif isinstance(message, Load):
            self.loads.append((node.name, message))
        elif isinstance(message, Outputs):
            for number, token in zip(unpack_int64(message.ids), unpack_int32(message.tokens), strict=True):
                client = self.clients[number]
                client.tokens.append(token)
                client.senders.append(node.name)
                expected = client.expected(node.config.vocab_size)
                assert client.tokens == expected[: len(client.tokens)], f"{client.submit.name}: wrong tokens"
            for finished in message.finished:
                if finished.reason != "handed_over":  # that is where it goes on, not its end
                    self.clients[finished.id].finished.append((node.name, finished))

    # -- together

    def alive(self) -> list[Node]:
        return [node for node in self.nodes.values() if not node.dead]

    def turn(self, seconds: float = 0.001) -> int:
        """Everybody does everything that can be done."""
        self.now += seconds
        moved = 0
        for node in self.alive():
            node.clock()
            moved += node.work()
        return moved + self.deliver()

    def run(self, limit: int = 3000) -> None:
        """Until nothing is left to do but to wait for deadlines, and those, too."""
        for _ in range(limit):
            if self.turn():
                continue
            deadlines = [node.core.next_deadline() for node in self.alive()]
            due = min((deadline for deadline in deadlines if deadline is not None), default=None)
            if due is None:
                return
            self.now = max(self.now, due)
        raise AssertionError(f"still busy: {[node.core.stats(self.now) for node in self.alive()]}")

    def check_end(self) -> None:
        """Nobody holds anything, nobody waits, and every request has its answer."""
        for node in self.alive():
            counts, stats = node.counts, node.core.stats(self.now)
            assert counts["free"] + counts["cached"] == counts["total"], (node.name, counts)
            assert stats["running"] == stats["waiting"] == stats["closing"] == stats["arriving"] == 0
            assert not any(stats["departures"].values()), stats
            assert not any(stats["arrivals"].values()), stats
            assert stats["violations"] == 0
            assert not node.core.scheduler.ending
            windows = node.core._handovers.departures.attempts._windows.values()
            assert all(window.asking == 0 for window in windows)
            assert node.core._handovers.departures._num_placed == 0
        for client in self.clients.values():
            self.check_answer(client)

    def check_answer(self, client: Client) -> None:
        """One answer that is right; lost ones only where that may be."""
        if client.cancelled or "lost" in client.reasons or all(self.nodes[n].dead for n in client.plan):
            return
        assert client.reasons in (["stop"], ["length"]), (client.submit.name, client.finished)
        assert client.tokens == client.expected(50)


def random_prompt(rng: random.Random, longest: int = 30) -> list[int]:
    return [rng.randrange(50) for _ in range(rng.randint(1, longest))]
