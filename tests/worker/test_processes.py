"""Worker groups as real processes: tokens, agreement of ranks, failures, deaths."""

import os
import random
import signal
import subprocess
import sys
import time

import msgspec
import pytest

from baton.ipc.processes.process import open_pidfd, wait_any
from baton.protocol.codec import pack_int32
from baton.protocol.config import CostModel
from baton.protocol.messages.commands import COMMANDS, Abort, CommandBatch, Control, Grow, Preempt
from baton.protocol.messages.reports import StepReport, WorkerFailed, WorkerReady

from .group import Group, make_config, oracle
from .model import admit


def digest_argv(path):
    def argv(wiring):
        command = [sys.executable, "-m", "tests.worker.digest_worker"]
        return [*command, msgspec.json.encode(wiring).decode(), str(path)]

    return argv


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_requests_get_the_oracles_tokens_and_ranks_agree(ranks, tmp_path):
    """Random prompts with blocks handed out bit by bit, while steps run: what crosses, crosses."""
    config = make_config(tensor_parallel_size=ranks, simulated_cost=CostModel(base=2e-4))
    rng = random.Random(ranks)
    with Group(config, digest_argv(tmp_path / "steps")) as group:
        group.ready()
        info = group.of_kind(WorkerReady, ranks - 1)[0]
        assert (info.rank, info.num_blocks, info.block_size, info.vocab_size) == (ranks - 1, 512, 8, 1000)
        expected, preempted = {}, []
        for round_ in range(4):
            admits, growth = [], []
            for slot in range(8):
                prompt = [rng.randrange(1000) for _ in range(rng.randrange(1, 120))]
                count = rng.randrange(1, 60)
                blocks = [round_ % 2 * 256 + slot * 32 + i for i in range(32)]
                enough = -(-len(prompt) // 8)
                admits.append(admit(slot, round_, prompt, blocks[:enough], max_tokens=count))
                growth.append(Grow(slot, round_, pack_int32(blocks[enough:])))
                expected[slot, round_] = oracle(prompt, count)
            group.send(*admits[:4])
            for command in admits[4:]:
                group.send(command)
            for command in growth[1:]:
                group.send(command)
                group.poll()
            preempted.append((0, round_))
            group.send(growth[0], Preempt(0, round_))
            group.send(Preempt(0, round_), Abort(0, round_))
            group.wait_closed(*((slot, round_) for slot in range(8)))
        tokens, closings = group.tokens(), group.closings()
        assert group.shutdown() == [0] * ranks
        assert set(closings) == set(expected)
        for key, answer in expected.items():
            if closings[key] == "length":
                assert tokens[key] == answer
            else:
                assert key in preempted
                assert closings[key] == "preempted"
                assert tokens.get(key, []) == answer[: len(tokens.get(key, []))]
        for rank in range(1, ranks):
            assert not group.of_kind(StepReport, rank)
    steps = [(tmp_path / f"steps.{rank}").read_text() for rank in range(ranks)]
    assert steps[0].count("\n") > 100
    assert all(text == steps[0] for text in steps)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_command_larger_than_the_ring(ranks):
    config = make_config(tensor_parallel_size=ranks, command_ring_bytes=512, max_model_len=4096)
    prompt = [i * 7 % 1000 for i in range(3000)]
    with Group(config) as group:
        group.ready()
        group.send(admit(0, 0, prompt, list(range(400)), max_tokens=3))
        group.send(admit(1, 0, prompt[:100], list(range(400, 420)), max_tokens=3))
        assert group.wiring.commands.pending
        group.wait_closed((0, 0), (1, 0))
        assert group.tokens() == {(0, 0): oracle(prompt, 3), (1, 0): oracle(prompt[:100], 3)}
        assert group.shutdown() == [0] * ranks


def test_a_slow_engine_loses_no_report():
    """A report ring far too small, read late: the worker queues, and goes on."""
    with Group(make_config(report_ring_bytes=256)) as group:
        group.ready()
        group.send(admit(0, 0, [1, 2, 3], list(range(20)), max_tokens=100))
        time.sleep(0.3)
        group.wait_closed((0, 0))
        assert group.tokens()[0, 0] == oracle([1, 2, 3], 100)


def test_a_malformed_record_is_fatal_and_said():
    with Group(make_config(tensor_parallel_size=2)) as group:
        group.ready()
        group.write(b"\xc1 not a batch")
        assert group.workers[0].wait(60) == 1
        assert group.workers[1].wait(60) == 1
        group.poll()
        reason = "record 1 of the command log is malformed"
        assert reason in group.of_kind(WorkerFailed)[0].message
        follower = group.of_kind(WorkerFailed, 1)[0].message
        assert reason in follower or "leader rank died" in follower


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (CommandBatch(2, []), "batch 2 came after batch 0"),
        (CommandBatch(1, [Preempt(99, 0)]), "ProtocolViolation: Preempt of slot 99"),
        (CommandBatch(1, [Preempt(1, 1)]), "never admitted"),
    ],
)
def test_a_broken_log_is_fatal_and_said(record, reason):
    with Group(make_config()) as group:
        group.ready()
        group.write(COMMANDS.encode(record))
        assert group.workers[0].wait(60) == 1
        group.poll()
        assert reason in group.failures()[0]


def test_a_failed_start_is_said():
    with Group(make_config(vocab_size=0)) as group:
        assert group.workers[0].wait(60) == 1
        group.poll()
        assert "vocab_size" in group.failures()[0]
        assert not group.of_kind(WorkerReady)


def test_signals_and_idle_cpu():
    """SIGINT is ignored, an idle worker sleeps, SIGTERM ends it in good order, a follower included."""
    with Group(make_config(tensor_parallel_size=2)) as group:
        group.ready()
        group.send(Control("pause"), admit(0, 0, [1], [0], max_tokens=2), admit(1, 0, [1], [1]))
        group.send(Abort(1, 0))
        group.wait_closed((1, 0))
        for worker in group.workers:
            worker.send_signal(signal.SIGINT)
        for _ in range(20):  # the signals, and what came before, may take a while on a slow machine
            before = [switches(worker.pid) for worker in group.workers]
            time.sleep(1.0)
            after = [switches(worker.pid) for worker in group.workers]
            if idle := all(b - a <= 1 for a, b in zip(before, after, strict=True)):
                break
        assert idle
        assert not group.tokens()
        group.send(Control("resume"))
        group.wait_closed((0, 0))
        for worker in reversed(group.workers):
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(60) == 0


def switches(pid):
    """How often the main thread went to sleep so far."""
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("voluntary_ctxt"))


def test_a_dead_follower_of_a_simulated_group_stops_the_leader_with_a_reason():
    """Without collectives the leader runs ahead until the tickets are used up, and no further."""
    config = make_config(tensor_parallel_size=2, step_timeout_s=0.5, max_model_len=2000)
    with Group(config) as group:
        group.ready()
        group.workers[1].kill()
        group.send(admit(0, 0, [1], list(range(250)), max_tokens=1900))
        assert group.workers[0].wait(60) == 1
        group.poll()
        assert "the slowest follower is 64 rounds behind" in group.failures()[0]


ENGINE = """
import sys, time
from tests.worker.group import Group, make_config
from tests.worker.model import admit
from baton.protocol.config import CostModel
busy = sys.argv[1] == "busy"
group = Group(make_config(tensor_parallel_size=2, simulated_cost=CostModel(base=0.01))).ready()
if busy:
    group.send(admit(0, 0, [1], list(range(32)), max_tokens=255))
print(*(worker.pid for worker in group.workers), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("state", ["idle", "busy"])
def test_workers_die_with_their_engine(state):
    engine = subprocess.Popen([sys.executable, "-c", ENGINE, state], stdout=subprocess.PIPE)
    fds = [open_pidfd(int(word)) for word in engine.stdout.readline().split()]
    assert len(fds) == 2
    assert wait_any(fds, 0.0) == []
    os.kill(engine.pid, signal.SIGKILL)
    for fd in fds:
        assert wait_any([fd], 60.0) == [fd]
        os.close(fd)
    engine.communicate()
