"""What an instance says of its load, and when."""

from __future__ import annotations

from baton.engine.core import EngineCore
from baton.engine.loads import Speeds
from baton.launch.planning.instance_config import instance_config
from baton.protocol.codec import pack_int32, unpack_int64
from baton.protocol.messages.handover import Reserved
from baton.protocol.messages.reports import CloseReason, WorkerReady
from baton.protocol.messages.requests import Hello, Load, Welcome
from baton.protocol.rules.prefix_keys import short_keys
from tests.engine.cluster import Cluster
from tests.engine.peerscript import PeerScript, pool_source

INTERVAL_S = 0.05


class Loaded(PeerScript):
    """Keeps the loads that were sent, to gateway g."""

    def __init__(self, **changes) -> None:
        self.loads: list[Load] = []
        super().__init__(load_interval_s=INTERVAL_S, **changes)

    def flush(self) -> None:
        take = self.core._outboxes.take

        def watched():
            messages = take()
            self.loads += [m for to, m in messages if isinstance(m, Load) and to == b"g"]
            return messages

        self.core._outboxes.take = watched
        super().flush()
        self.core._outboxes.take = take

    def latest(self) -> Load:
        self.wait(INTERVAL_S)
        return self.loads[-1]


def test_a_gateway_gets_the_whole_after_welcome():
    core = EngineCore(
        instance_config(model="", max_model_len=64, block_size=4), incarnation="i", workers=[1], now=0.0
    )
    core.on_message(b"early", Hello("early"), 0.0)
    core.on_report(0, WorkerReady(0, 16, 4, "t", 64, 100, pool_source()), 0.0)
    core.on_message(b"late", Hello("late"), 0.0)
    messages = core.flush(0.0).gateways
    assert [(to, type(m)) for to, m in messages] == [
        (b"early", Welcome),
        (b"early", Load),
        (b"late", Welcome),
        (b"late", Load),
    ]
    assert all(m.reset for _, m in messages if isinstance(m, Load))
    assert messages[1][1].free_blocks == 16


def test_what_waits_and_runs_is_reported_when_it_changes_and_not_too_often():
    s = Loaded(max_num_seqs=1)
    assert len(s.loads) == 1
    s.wait(1.0)
    s.submit(1, prompt=range(1, 11))
    s.submit(2, prompt=range(20, 26))
    assert len(s.loads) == 2, "at once, as the last one is long ago; and then not for a while"
    assert (s.loads[-1].running, s.loads[-1].waiting) == (1, 0)
    load = s.latest()
    assert (load.running, load.waiting, load.waiting_tokens) == (1, 1, 16)
    (admit,) = s.orders()
    s.prefilled(admit, 4)
    load = s.latest()
    assert load.waiting_tokens == 12
    assert load.free_blocks == s.core.scheduler.ledger.available
    count = len(s.loads)
    assert s.core.next_deadline() - s.now > 1, "nobody wants the clock for this"
    s.wait(1.0)
    assert len(s.loads) == count, "nothing has changed"


def test_preparing_requests_are_part_of_it():
    s = Loaded()
    s.submit(1, "d")
    assert s.latest().waiting == 1
    assert s.loads[-1].waiting_tokens == 10
    s.hear("d", Reserved(1, 1, 0))
    load = s.latest()
    assert (load.waiting, load.running) == (0, 1)


def test_keys_that_come_and_go():
    s = Loaded(num_blocks=6)
    known: set[int] = set()
    s.submit(1, prompt=range(1, 11))
    s.first_token(s.orders()[0], reason=CloseReason.STOP)
    s.latest()
    for load in s.loads:
        known -= set(unpack_int64(load.removed))
        known |= set(unpack_int64(load.added))
    assert known == set(short_keys(pack_int32(range(1, 11)), "", 4))
    s.submit(2, prompt=range(30, 50), max_tokens=4)
    s.first_token(s.orders()[0], reason=CloseReason.STOP)
    s.query("reset_prefix_cache")
    s.submit(3, prompt=range(60, 65))
    s.first_token(s.orders()[-1], reason=CloseReason.STOP)
    s.latest()
    count = len(s.loads)
    for load in s.loads:
        known -= set(unpack_int64(load.removed))
        known |= set(unpack_int64(load.added))
    assert known == set(short_keys(pack_int32(range(60, 65)), "", 4))
    s.core.on_message(b"h", Hello("other"), s.now)
    (_, _), (to, whole) = s.core.flush(s.now).gateways
    assert to == b"h"
    assert whole.reset
    assert set(unpack_int64(whole.added)) == known
    assert count == len(s.loads)


def test_a_mirror_of_the_index_stays_true_whatever_happens():
    """What a gateway puts together from deltas is what the index knows, at every delta."""
    cluster = Cluster()
    node = cluster.add("a", load_interval_s=0.01, num_blocks=16)
    mirrors: dict[str, set[int]] = {}
    for number in range(20):
        cluster.submit(node, [number % 5, *range(number % 7 + 5)], 6)
        cluster.run()
        for name, load in cluster.loads:
            mirror = set() if load.reset else mirrors[name]
            mirrors[name] = (mirror - set(unpack_int64(load.removed))) | set(unpack_int64(load.added))
        cluster.loads.clear()
        keys = {
            int.from_bytes(key[:8], "little", signed=True) for key in list(node.core.scheduler.prefix.keys())
        }
        assert mirrors["a"] == keys


def test_speeds_are_averages_of_what_they_measure():
    speeds = Speeds()
    speeds.step(100, 0.1)
    assert (speeds.prefill_tokens_per_s, speeds.decode_step_s) == (1000.0, 0.0)
    speeds.step(0, 0.02)
    speeds.step(0, 0.0)
    assert speeds.decode_step_s == 0.02
    for _ in range(100):
        speeds.step(400, 0.1)
        speeds.step(0, 0.01)
    assert 3900 < speeds.prefill_tokens_per_s < 4001
    assert 0.0099 < speeds.decode_step_s < 0.011
