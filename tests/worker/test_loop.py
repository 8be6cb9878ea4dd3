"""The loop driven round by round in this process: when it sleeps, what it reports, what ends it."""

import os
import subprocess
import sys
import threading
import time
from array import array
from itertools import pairwise

import pytest

from baton.executor.simulated.executor import SimulatedExecutor
from baton.ipc.doorbell import Doorbell
from baton.ipc.processes.process import open_pidfd, wait_any
from baton.ipc.ring import RingReader, RingWriter, create_ring
from baton.ipc.ticket import PeerDied, TicketReader, TicketTimeout, TicketWriter, create_tickets
from baton.protocol.codec import pack_int32
from baton.protocol.messages.commands import COMMANDS, CommandBatch, Control, Grow, Preempt
from baton.protocol.messages.reports import REPORTS, Closed, CloseReason, StepReport, StepsRan
from baton.worker.command_log import CommandLog, CommandLogBroken
from baton.worker.loop import WorkerLoop, flush_reports
from baton.worker.ran import StepTimes
from baton.worker.rounds import FollowerRounds, LeaderRounds
from baton.worker.slots.slots import Slots

from .group import VOCAB, oracle
from .model import admit


class InProcess:
    """An engine and `ranks` loops in this process.  The engine's pidfd is that of a child."""

    def __init__(self, ranks=1, timeout_s=60.0, observer=None, executor=None, note_steps=False, late=False):
        self.child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        self.pidfd = open_pidfd(self.child.pid)
        self.bell = Doorbell.create()
        bells = [Doorbell.create() for _ in range(ranks)]
        ring = create_ring(1 << 14, ranks)
        self.writer, self.sequence = RingWriter(ring, bells[:1]), 0
        self.readers, self.loops, self.logs = [], [], []
        tickets = create_tickets(ranks - 1) if ranks > 1 else None
        for rank in range(ranks):
            reports = create_ring(1 << 14, 1)
            self.readers.append(RingReader(reports, 0, bells[rank]))
            report_writer = RingWriter(reports, [self.bell])
            log = CommandLog(RingReader(ring, rank, self.bell))
            self.logs.append(log)
            if rank == 0:
                writer = None if tickets is None else TicketWriter(tickets, bells[1:])
                rounds = LeaderRounds(
                    log,
                    report_writer,
                    bells[0],
                    self.pidfd,
                    tickets=writer,
                    follower_doorbells=bells[1:],
                    timeout_s=timeout_s,
                )
            else:
                reader = TicketReader(tickets, rank - 1, bells[rank], {self.pidfd: "engine"}, bells[0])
                rounds = FollowerRounds(log, report_writer, reader, timeout_s=timeout_s)
            self.loops.append(
                WorkerLoop(
                    rank=rank,
                    slots=Slots(
                        max_num_seqs=8,
                        max_num_batched_tokens=64,
                        max_model_len=256,
                        block_size=8,
                        num_blocks=512,
                    ),
                    executor=executor
                    or SimulatedExecutor(num_blocks=512, block_size=8, max_num_seqs=8, vocab_size=VOCAB),
                    commands=log,
                    rounds=rounds,
                    reports=report_writer,
                    note_steps=note_steps,
                    observer=observer and (lambda applied, batch, rank=rank: observer(rank, applied, batch)),
                )
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.child.kill()
        self.child.communicate()
        os.close(self.pidfd)

    def send(self, *commands):
        self.sequence += 1
        self.writer.write(COMMANDS.encode(CommandBatch(self.sequence, list(commands))))

    def reports(self, rank=0):
        return [REPORTS.decode(record) for record in self.readers[rank].records()]


@pytest.mark.parametrize("noted", [True, False])
def test_every_rank_tells_when_it_ran_its_steps_if_that_is_wanted(noted):
    with InProcess(ranks=2, note_steps=noted) as world:
        leader, follower = world.loops
        begun = time.monotonic()
        world.send(admit(3, 7, [1, 2, 3], [0], max_tokens=3))
        for _ in range(4):  # three steps, and a round that finds nothing to run
            leader.run_once()
            follower.run_once()
        ended = time.monotonic()
        steps = [report for report in world.reports(0) if isinstance(report, StepReport)]
        assert [report.step for report in steps] == [1, 2, 3]
        for report, after in pairwise([*steps, None]):
            end = ended if after is None else after.began
            assert begun <= report.began <= report.began + report.seconds <= end
        others = [report for report in world.reports(1) if isinstance(report, StepsRan)]
        assert len(others) == noted, "together, when nothing runs any more"
        for told in others:
            assert (told.first, len(told.began), len(told.seconds)) == (1, 3, 3)
            assert begun <= told.began[0] < told.began[1] < told.began[2] < told.written <= ended
            for began, seconds, step in zip(told.began, told.seconds, steps, strict=True):
                assert began >= step.began + step.seconds  # (here one runs after the other)
                assert seconds > 0


def test_steps_of_a_rank_that_never_rests_are_told_now_and_then():
    times = StepTimes()
    taken = [times.take(step / 100) for step in range(1, 101) if times.add(step, step / 100, 0.009)]
    assert [(told.first, len(told.began)) for told in taken] == [(1 + 6 * n, 6) for n in range(16)]
    assert times.take(2.0) == StepsRan(2.0, 97, [0.97, 0.98, 0.99, 1.0], [0.009] * 4)
    assert times.take(3.0) is None


def test_one_round_at_a_time():
    with InProcess() as world:
        (loop,) = world.loops
        world.send(admit(3, 7, [1, 2, 3], [0], max_tokens=2))
        assert loop.run_once()
        (first,) = world.reports()
        assert (first.step, first.applied) == (1, 1)
        assert list(array("i", first.slots)) == [3]
        assert list(array("i", first.epochs)) == [7]
        assert list(array("i", first.tokens)) == oracle([1, 2, 3], 1)
        assert list(array("i", first.prefill_computed)) == [3]
        assert first.seconds > 0
        assert loop.run_once()
        (second,) = world.reports()
        assert list(array("i", second.tokens)) == oracle([1, 2, 3], 2)[1:]
        assert second.prefill_slots == b""
        assert second.closings == [Closed(3, 7, CloseReason.LENGTH)]
        assert not loop.run_once()
        assert loop.steps == 2


def rings_of(world, rounds):
    """Whether each of so many rounds wakes the engine."""
    rings = []
    for _ in range(rounds):
        world.loops[0].run_once()
        rings.append(world.bell.drain())
    return rings


def test_tokens_that_nobody_waits_for_wake_the_engine_now_and_then():
    with InProcess() as world:
        world.send(admit(0, 0, [1, 2], [0, 1], max_tokens=9, patient=True))
        # The end of a prompt wakes it, as the next one may wait for that; the last one closes.
        assert rings_of(world, 9) == [True] + [False] * 4 + [True] + [False] * 2 + [True]
        reports = world.reports()
        assert b"".join(report.tokens for report in reports) == pack_int32(oracle([1, 2], 9))
        world.send(
            admit(1, 0, [1, 2], [2, 3], max_tokens=9, patient=True), admit(2, 0, [3], [4], max_tokens=2)
        )
        assert rings_of(world, 2) == [True, True]  # somebody waits for one of them, and then it is over
        assert rings_of(world, 1) == [False]
        world.send(Preempt(1, 0))
        assert rings_of(world, 1) == [True]


def test_a_loop_that_has_nothing_to_run_leaves_no_report_unheard():
    with InProcess() as world:
        world.send(admit(0, 0, list(range(7)), [0], max_tokens=9, patient=True))
        assert rings_of(world, 2) == [True, False]
        assert rings_of(world, 1) == [True]  # it has no block for the next token, and must be given one
        assert [len(report.tokens) for report in world.reports()] == [4, 4]
        world.send(Grow(0, 0, pack_int32([1])))
        assert rings_of(world, 1) == [False]


def test_closings_are_reported_before_the_step_that_follows_and_without_one():
    with InProcess() as world:
        (loop,) = world.loops
        world.send(admit(0, 0, [1], [0], max_tokens=9), admit(1, 0, [2], [1], max_tokens=9))
        assert loop.run_once()
        world.send(Preempt(0, 0))
        assert loop.run_once()
        _, closing, step = world.reports()
        assert (closing.step, closing.applied) == (0, 2)
        assert closing.closings == [Closed(0, 0, CloseReason.PREEMPTED)]
        assert list(array("i", step.slots)) == [1]
        world.send(Preempt(1, 0))
        assert not loop.run_once()
        (closing,) = world.reports()
        assert closing.closings == [Closed(1, 0, CloseReason.PREEMPTED)]
        assert closing.tokens == b""


def test_an_idle_loop_sleeps_until_it_is_rung():
    with InProcess() as world:
        (loop,) = world.loops
        world.send(admit(0, 0, [1] * 8, [0], max_tokens=9))
        assert loop.run_once()
        assert not loop.run_once()  # composes nothing: no block for the next token
        threading.Timer(0.1, world.send, (Grow(0, 0, pack_int32([1])),)).start()
        rounds = 1
        while not loop.run_once():
            rounds += 1
        assert rounds <= 3, "it was woken by the ring alone"


def test_leave_ends_a_sleep():
    with InProcess(ranks=2) as world:
        threads = [threading.Thread(target=loop.run) for loop in world.loops]
        for thread, loop in zip(threads, world.loops, strict=True):
            thread.start()
            time.sleep(0.02)
            loop.leave()
            thread.join(60.0)
            assert not thread.is_alive()


def test_a_sleeping_loop_notices_the_death_of_its_engine():
    with InProcess(ranks=2) as world:
        world.child.kill()
        for loop in world.loops:
            with pytest.raises(PeerDied, match="the engine died"):
                loop.run()


def test_all_ranks_run_the_same_steps_after_the_same_commands():
    seen = [[], [], []]

    def observe(rank, applied, batch):
        seen[rank].append((batch.step, applied, batch.slots.tolist(), batch.tokens.tolist()))

    with InProcess(ranks=3, observer=observe) as world:
        threads = [threading.Thread(target=loop.run) for loop in world.loops]
        for thread in threads:
            thread.start()
        for epoch in range(20):
            for slot in range(8):
                world.send(admit(slot, epoch, [slot, epoch], [slot * 4 + i for i in range(4)], max_tokens=25))
            closed = []
            while len(closed) < 8:
                assert wait_any([world.bell.fileno()], 60.0)
                world.bell.drain()
                world.writer.flush()
                closed += [end for report in world.reports() for end in report.closings]
        world.send(Control("shutdown"))
        for thread in threads:
            thread.join(60.0)
            assert not thread.is_alive()
        assert seen[0] == seen[1] == seen[2]
        assert len(seen[0]) >= 20 * 25
        assert {log.applied for log in world.logs} == {161}


def test_a_stuck_leader_is_noticed_by_its_follower():
    with InProcess(ranks=2, timeout_s=0.1) as world:
        leader, follower = world.loops
        world.send(admit(0, 0, [1], [0], max_tokens=5))
        assert leader.run_once()
        assert follower.run_once()
        with pytest.raises(TicketTimeout, match=r"no ticket for round 2 within 0\.1 s"):
            follower.run_once()


def test_a_request_that_the_executor_refuses_is_closed_with_an_error():
    class Picky(SimulatedExecutor):
        def admit(self, slot, tokens, num_prompt, sampling, stopping, salt=b""):
            if 13 in tokens:
                raise ValueError("no 13 here")
            super().admit(slot, tokens, num_prompt, sampling, stopping, salt)

    executor = Picky(num_blocks=512, block_size=8, max_num_seqs=8, vocab_size=VOCAB)
    with InProcess(executor=executor) as world:
        world.send(admit(0, 0, [13], [0]), admit(1, 0, [12], [1]))
        assert world.loops[0].run_once()
        closing, step = world.reports()
        assert closing.closings[0].reason is CloseReason.ERROR
        assert "no 13 here" in closing.closings[0].message
        assert list(array("i", step.slots)) == [1]


def test_a_log_hands_out_only_what_it_has_collected():
    ring = create_ring(1024, 1)
    writer, log = RingWriter(ring), CommandLog(RingReader(ring, 0))
    for sequence in (1, 2, 3):
        writer.write(COMMANDS.encode(CommandBatch(sequence, [Preempt(0, sequence)])))
    assert log.has_news()
    assert log.collect()
    assert not log.has_news()
    assert [command.epoch for command in log.take(2)] == [1, 2]
    assert log.applied == 2
    assert list(log.take(2)) == []
    with pytest.raises(CommandLogBroken, match="batch 4"):
        list(log.take(4))


def test_last_reports_have_a_deadline():
    ring = create_ring(64, 1)
    writer, bell = RingWriter(ring), Doorbell.create()
    writer.append(b"x" * 500)
    bell.ring()
    assert not flush_reports(writer, bell, 0.05)
    reader = RingReader(ring, 0, bell)
    got = []

    def read():
        give_up = time.monotonic() + 60.0
        while not got and time.monotonic() < give_up:
            got.extend(reader.records())
            time.sleep(0.001)

    thread = threading.Thread(target=read)
    thread.start()
    assert flush_reports(writer, bell, 60.0)
    thread.join()
    assert got == [b"x" * 500]
