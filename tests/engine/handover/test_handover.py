"""Two and more cores back to back, with slots and pools: hand-overs from the first message to the last."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest

from baton.engine.core import EngineCore
from baton.engine.handover.courier import Courier
from baton.engine.recording.recorder import RecordingCore
from baton.engine.recording.replay import replay_all
from baton.executor.simulated.executor import simulated_next_token
from baton.launch.planning.instance_config import instance_config
from baton.protocol.codec import pack_int32
from baton.protocol.messages.handover import Handoff, Progress, Reserve, Reserved, Taken
from baton.protocol.messages.reports import WorkerReady
from baton.protocol.messages.requests import Hello, Query, Submit, Target
from baton.protocol.params.sampling import Sampling, Stopping
from tests.engine.cluster import Cluster, random_prompt
from tests.engine.peerscript import pool_source

PROMPT = list(range(1, 22))


def test_a_request_is_prefilled_here_and_decoded_there():
    cluster = Cluster()
    p, d = cluster.add("p"), cluster.add("d")
    client = cluster.submit(p, PROMPT, 12, d)
    cluster.run()
    assert client.reasons == ["length"]
    assert set(client.senders) == {"d"}, "the first token, too"
    assert client.finished[0][0] == "d"
    for kind in (Reserve, Reserved, Handoff, Taken):
        assert len(cluster.said(kind)) == 1
    assert len(cluster.said(Progress)) >= 2
    assert d.counters.seated == 1
    assert not d.counters.recomputed
    cluster.check_end()


@pytest.mark.parametrize("ranks", [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_tensor_parallel_sizes_may_differ(ranks):
    cluster = Cluster()
    p = cluster.add("p", tensor_parallel_size=ranks[0])
    d = cluster.add("d", tensor_parallel_size=ranks[1])
    clients = [cluster.submit(p, [n, *PROMPT], 9, d) for n in range(5)]
    cluster.run()
    assert all(set(client.senders) == {"d"} for client in clients)
    assert d.counters.seated == 5
    cluster.check_end()


class Chaos:
    """A cluster in which anything may happen at any moment, drawn from a seed."""

    def __init__(self, seed: int, make_core=EngineCore) -> None:
        self.random = random.Random(seed)
        self.cluster = Cluster(make_core=make_core)
        self.troubled = False
        """Something happened after which a request may be lost."""
        for name in "abc"[: self.random.randint(2, 3)]:
            self.add(name)

    def add(self, name: str) -> None:
        draw = self.random
        self.cluster.add(
            name,
            num_blocks=draw.choice((16, 18, 24, 40)),
            max_num_seqs=draw.choice((1, 2, 4, 6)),
            tensor_parallel_size=draw.choice((1, 1, 2)),
            enable_prefix_caching=draw.random() < 0.8,
            max_preparing=draw.choice((1, 2, 64)),
            admission_headroom=draw.choice((0, None)),
            reserve_timeout_s=0.2,
            credit_wait_s=draw.choice((0.1, 1.0)),
        )

    def run(self, turns: int) -> None:
        cluster, draw = self.cluster, self.random
        for _ in range(turns):
            cluster.now += draw.choice((0.0, 0.0, 0.0, 0.0005, 0.002))
            self.event(draw.choice(cluster.alive()))
        for node in cluster.alive():
            node.query("resume")
        cluster.run()
        self.check()

    def event(self, node) -> None:
        draw, cluster = self.random, self.cluster
        number = draw.random()
        if number < 0.06 and len(cluster.clients) < 25:
            prompt = [draw.randrange(3)] * draw.randint(0, 12) + random_prompt(draw, 20)
            others = [other for other in cluster.nodes.values() if other is not node]
            decoders = draw.sample(others, draw.randint(1, len(others)))
            stop = (draw.randrange(50),) if draw.random() < 0.2 else ()
            generated = [simulated_next_token(prompt, 50)] if draw.random() < 0.2 else []
            cluster.submit(
                node,
                prompt,
                draw.randint(1 + len(generated), draw.choice((10, 64 - len(prompt)))),
                *decoders,
                stop=stop,
                priority=draw.choice((0, 0, 1)),
                generated=generated,
            )
        elif number < 0.065 and cluster.clients:
            client = draw.choice(list(cluster.clients.values()))
            nodes = [cluster.nodes[name] for name in client.plan if not cluster.nodes[name].dead]
            cluster.cancel(client, *draw.sample(nodes, draw.randint(0, len(nodes))), *nodes)
        elif number < 0.075:
            node.query(draw.choice(("pause", *["resume"] * 4, "reset_prefix_cache", "ledger", "stats")))
        elif number < 0.077:
            node.tell(Query(1, "update_weights", draw.choice(("/one", "/two"))))
        elif number < 0.08 and len(cluster.alive()) > 1:
            other = draw.choice([other for other in cluster.alive() if other is not node])
            draw.choice((cluster.disconnect, cluster.lose_link))(node, other)
            self.troubled = True
        elif number < 0.082 and len(cluster.alive()) > 1:
            cluster.kill(node, noticed=draw.random() < 0.7)
            self.troubled = True
            if draw.random() < 0.7:
                self.add(f"{node.name[0]}{len(cluster.nodes)}")
        elif number < 0.084:
            cluster.now += draw.choice((0.5, 4.0, 8.0))
            self.troubled = True
        elif number < 0.3:
            node.apply(draw.randint(1, 3))
        elif number < 0.45:
            node.step(on_layer=lambda: self.meanwhile(node))
        elif number < 0.6:
            node.read(draw.randint(1, 3))
        elif number < 0.7:
            rank = draw.randrange(len(node.fetches))
            error = "broken" if draw.random() < 0.02 else ""
            node.fetch(rank, draw.randint(1, 2), error)
        elif number < 0.72:
            node.clock()
        else:
            cluster.deliver(None, node.name, draw.randint(1, 3))

    def meanwhile(self, node) -> None:
        """In the middle of a step."""
        if self.random.random() < 0.5:
            node.read()
            self.cluster.deliver(node.name)
            for other in self.cluster.alive():
                if other is not node:
                    other.apply()
                    other.fetch(0)

    def check(self) -> None:
        cluster = self.cluster
        if not self.troubled:
            assert not any("lost" in client.reasons for client in cluster.clients.values())
        for client in cluster.clients.values():
            reasons = [reason for reason in client.reasons if reason not in ("aborted", "lost")]
            assert len(reasons) <= 1, client.finished
            if any(cluster.nodes[name].dead for name in client.plan):
                client.cancelled = True  # nobody may be left to answer; what was said was checked
        cluster.check_end()


@pytest.mark.parametrize("part", range(4))
def test_whatever_happens_tokens_are_right_and_nothing_is_left(part):
    for seed in range(part * 8, part * 8 + 8):
        try:
            Chaos(seed).run(600)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_a_recorded_hand_over_is_replayed_byte_for_byte(tmp_path):
    def make_core(config, *, incarnation, **options):
        number = len(list(tmp_path.iterdir()))
        config = msgspec.structs.replace(config, record=str(tmp_path / f"{number}-{incarnation}"))
        return RecordingCore(config, incarnation=incarnation, **options)

    counts = Counter()
    for seed in (2001, 2002, 2003):
        chaos = Chaos(seed, make_core)
        chaos.run(600)
        for node in chaos.cluster.nodes.values():
            node.core.close()
    for directory in tmp_path.iterdir():
        for _, result in replay_all(directory):
            assert result.identical, result.difference
            assert result.counts["defects"] == 0
            counts += result.counts
    assert counts["messages of engines"] > 100
    assert counts["engines lost"] > 3
    assert counts["commands"] > 100


def test_a_replay_notices_another_message_to_an_engine(tmp_path, monkeypatch):
    p = RecordingCore(
        instance_config(model="", max_model_len=64, block_size=4, record=str(tmp_path), load_interval_s=0.0),
        incarnation="p",
        workers=[1],
        now=1.0,
        peer_endpoint="ipc://p",
    )
    p.on_report(0, WorkerReady(0, 16, 4, "t", 64, 100, pool_source()), 1.0)
    p.on_message(b"g", Hello("gate"), 1.0)
    sampling, stopping = Sampling(seed=1), Stopping(max_tokens=8)
    target = Target("d", "ipc://d")
    p.on_message(b"g", Submit(1, "r", pack_int32([1, 2]), sampling, stopping, decoders=(target,)), 1.0)
    assert [type(message) for _, message in p.flush(1.0).peers] == [Reserve]
    p.peer_lost("d", 1.5)
    p.flush(1.5)
    p.close()
    ((_, result),) = replay_all(tmp_path)
    assert result.identical
    monkeypatch.setattr(Courier, "take", lambda courier: [])
    ((_, result),) = replay_all(tmp_path)
    assert "messages to engines with digest" in result.difference.recorded
    assert result.difference.replayed == "no messages to engines"
