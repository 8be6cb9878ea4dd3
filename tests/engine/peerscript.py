"""One core whose gateways, workers and peers are the test: every message is written by hand."""

from __future__ import annotations

import msgspec

from baton.engine.core import EngineCore
from baton.launch.planning.instance_config import instance_config
from baton.protocol.codec import pack_int32, unpack_int32, unpack_int64
from baton.protocol.messages.commands import Admit, Command
from baton.protocol.messages.handover import InstanceSource, PeerMessage, PoolSource, Reserve
from baton.protocol.messages.reports import Closed, CloseReason, Fetched, LayersDone, StepReport, WorkerReady
from baton.protocol.messages.requests import Finished, Hello, Outputs, Query, QueryReply, Submit
from baton.protocol.params.sampling import Sampling, Stopping

from .introductions import introduce

BLOCK = 4
LEASE_S = 3.0
SAMPLING = Sampling(seed=1, temperature=0.0)


def pool_source(rank: int = 0, **changes) -> PoolSource:
    values: dict = {"num_blocks": 64, "block_bytes": 64, "num_layers": 4, "kv_heads": 1, "head_start": rank}
    values |= {"total_kv_heads": 2, "reader_key": b"of rank %d" % rank}
    return PoolSource(rank, "host", **{**values, **changes})


def instance_source(**changes) -> InstanceSource:
    return InstanceSource(**{"tile": "t", "block_size": BLOCK, "ranks": [pool_source()], **changes})


class PeerScript:
    """The core of instance `me`; peers are called by their incarnations and listen on `ipc://<incarnation>`."""

    def __init__(self, *, ranks: int = 1, num_blocks: int = 32, gateway: bool = True, **changes) -> None:
        self.readers = [pool_source(rank).reader_key for rank in range(ranks)]
        """As it names them to P (`Reserved.reader_keys`)."""
        options = {
            "model": "",
            "max_model_len": 64,
            "block_size": BLOCK,
            "max_num_seqs": 4,
            "lease_s": LEASE_S,
            "reserve_timeout_s": 0.5,
            "credit_wait_s": 1.0,
            "load_interval_s": 0.0,
            "admission_headroom": 0,
        }
        self.config = instance_config(**{**options, **changes})
        self.now = 10.0
        self.core = EngineCore(
            self.config,
            incarnation="me",
            workers=list(range(1, ranks + 1)),
            now=self.now,
            peer_endpoint="ipc://me",
        )
        self.commands: list[Command] = []
        self.sent: list[tuple[str, PeerMessage]] = []
        self.tokens: list[tuple[int, int]] = []
        self.finished: list[Finished] = []
        self.replies: list[QueryReply] = []
        self.step = 0
        for rank in range(ranks):
            self.report(WorkerReady(rank, num_blocks, BLOCK, "t", 64, 100, pool_source(rank)), rank)
        if gateway:
            self.tell(Hello("gate"))

    # -- in

    def tell(self, message) -> None:
        self.core.on_message(b"g", message, self.now)
        self.flush()

    def report(self, report, rank: int = 0) -> None:
        self.core.on_report(rank, report, self.now)
        self.flush()

    def hear(self, peer: str, message: PeerMessage) -> None:
        if isinstance(message, Reserve) and not message.plan_pass:
            proof = introduce("me", "", peer, message.request, message.gateway).plan_pass
            message = msgspec.structs.replace(message, plan_pass=proof)
        self.core.on_peer(peer, message, self.now)
        self.flush()

    def lose(self, peer: str, dead: bool = False) -> None:
        self.core.peer_lost(peer, self.now, dead)
        self.flush()

    def wait(self, seconds: float) -> None:
        """Time passes, and the clock is looked at whenever the core wants it."""
        end = self.now + seconds
        for _ in range(1000):
            deadline = self.core.next_deadline()
            if deadline is None or deadline > end:
                self.now = end
                return
            self.now = max(self.now, deadline)
            self.core.on_clock(self.now)
            self.flush()
        raise AssertionError("the clock is wanted for ever")

    def flush(self) -> None:
        batch, messages, peers = self.core.flush(self.now)
        self.commands += batch.commands if batch else []
        for to, message in peers:
            assert to.endpoint == f"ipc://{to.incarnation}"
            self.sent.append((to.incarnation, message))
        for _, message in messages:
            if isinstance(message, Outputs):
                ids, tokens = unpack_int64(message.ids), unpack_int32(message.tokens)
                self.tokens += zip(ids, tokens, strict=True)
                self.finished += message.finished
            elif isinstance(message, QueryReply):
                self.replies.append(message)
        assert self.core.flush(self.now) == (None, [], [])
        if self.core.ready:
            self.core.scheduler.ledger.check()

    def submit(
        self,
        number: int,
        *decoders: str,
        prompt=range(1, 11),
        max_tokens: int = 8,
        sampling: Sampling = SAMPLING,
        **changes,
    ) -> None:
        targets = tuple(introduce(name, f"ipc://{name}", "me", number) for name in decoders)
        stopping = Stopping(max_tokens=max_tokens)
        prompt = pack_int32(prompt)
        self.tell(Submit(number, f"r{number}", prompt, sampling, stopping, decoders=targets, **changes))

    def prefilled(self, admit: Admit, computed: int) -> None:
        """A step computed a chunk."""
        self.step += 1
        one = [pack_int32([number]) for number in (admit.slot, admit.epoch, computed)]
        self.report(
            StepReport(self.step, 0, prefill_slots=one[0], prefill_epochs=one[1], prefill_computed=one[2])
        )

    def token(self, admit: Admit, token: int) -> None:
        self.step += 1
        slot, epoch, value = (pack_int32([number]) for number in (admit.slot, admit.epoch, token))
        self.report(StepReport(self.step, 0, slot, epoch, value))

    def first_token(
        self, admit: Admit, token: int = 7, reason: CloseReason = CloseReason.HANDED_OVER
    ) -> None:
        """The last chunk was computed, a token sampled, the epoch closed."""
        self.step += 1
        slot, epoch, value = (pack_int32([number]) for number in (admit.slot, admit.epoch, token))
        self.report(
            StepReport(
                self.step,
                0,
                slot,
                epoch,
                value,
                prefill_slots=slot,
                prefill_epochs=epoch,
                prefill_computed=pack_int32([len(admit.tokens) // 4]),
                closings=[Closed(admit.slot, admit.epoch, reason)],
            )
        )

    def close(self, admit: Admit, reason: CloseReason) -> None:
        self.report(StepReport(0, 0, closings=[Closed(admit.slot, admit.epoch, reason)]))

    def layers(self, admit: Admit, layers: int) -> None:
        self.report(LayersDone(pack_int32([admit.slot]), pack_int32([admit.epoch]), layers))

    def fetched(self, number: int, rank: int = 0, **changes) -> None:
        self.report(Fetched(rank, number, **changes), rank)

    def ask(self, peer: str = "p", number: int = 1, attempt: int = 1, prompt=range(1, 11), **changes) -> None:
        """A peer asks for room."""
        self.hear(peer, reserve(peer, number, attempt, prompt, **changes))

    # -- out

    def take(self) -> list[tuple[str, PeerMessage]]:
        """What was said to peers since the last call."""
        sent, self.sent = self.sent, []
        return sent

    def orders(self) -> list[Command]:
        """What the workers were told since the last call."""
        commands, self.commands = self.commands, []
        return commands

    def query(self, what: str, argument: str = "") -> dict:
        self.tell(Query(1, what, argument))
        return self.replies[-1].body

    @property
    def counts(self) -> dict[str, int]:
        return self.core.scheduler.ledger.counts()

    @property
    def owned(self) -> tuple[int, int, int]:
        """Blocks held, exported, reserved."""
        counts = self.counts
        return counts["held"], counts["exported"], counts["reserved"]

    @property
    def counters(self):
        return self.core.counters.handovers


def reserve(peer: str = "p", number: int = 1, attempt: int = 1, prompt=range(1, 11), **changes) -> Reserve:
    values = {
        "id": number,
        "attempt": attempt,
        "endpoint": f"ipc://{peer}",
        "gateway": "gate",
        "request": 100 + number,
        "name": f"r{number}",
        "prompt": pack_int32(prompt),
        "generated": b"",
        "sampling": SAMPLING,
        "stopping": Stopping(max_tokens=8),
        "priority": 0,
        "cache_salt": "",
        "source": instance_source(),
        "lease_s": LEASE_S,
    }
    return Reserve(**{**values, **changes})
