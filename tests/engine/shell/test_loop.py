"""The engine's loop with real sockets, rings and worker processes (simulated executor)."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from baton.engine import standing
from baton.engine.shell.loop import EngineLoop
from baton.executor.simulated.executor import simulated_tokens
from baton.ipc.doorbell import Doorbell
from baton.ipc.ring import RingReader, RingWriter, create_ring
from baton.launch.planning.instance_config import instance_config
from baton.protocol.codec import pack_int32, unpack_int32, unpack_int64
from baton.protocol.messages.commands import COMMANDS
from baton.protocol.messages.reports import REPORTS, StepReport, WorkerReady
from baton.protocol.messages.requests import (
    Cancel,
    Failing,
    Hello,
    Outputs,
    Query,
    QueryReply,
    Submit,
    Welcome,
)
from baton.protocol.params.sampling import Sampling, Stopping
from baton.protocol.rules.proof import answer, claim
from tests.conftest import GENEROUS_S
from tests.engine.instance import Gateway, Instance

CONFIG = instance_config(
    model="",
    executor="simulated",
    vocab_size=1000,
    max_model_len=256,
    block_size=8,
    num_blocks=40,
    max_num_seqs=16,
    max_num_batched_tokens=64,
)


def submit(number: int, prompt: list[int], max_tokens: int) -> Submit:
    return Submit(
        number, f"r{number}", pack_int32(prompt), Sampling(seed=0, temperature=0.0), Stopping(max_tokens)
    )


def collect(gateway: Gateway, count: int) -> tuple[dict[int, list[int]], dict[int, str]]:
    """Reads until `count` requests have ended: (tokens, finish reasons) by id."""
    tokens: dict[int, list[int]] = {}
    ends: dict[int, str] = {}
    while len(ends) < count:
        message = gateway.receive()
        assert isinstance(message, Outputs), message
        for number, token in zip(unpack_int64(message.ids), unpack_int32(message.tokens), strict=True):
            assert number not in ends
            tokens.setdefault(number, []).append(token)
        for end in message.finished:
            assert end.id not in ends
            ends[end.id] = end.reason
    return tokens, ends


@pytest.fixture(scope="module")
def instance():
    instance = Instance(CONFIG)
    yield instance
    instance.close()
    assert instance.code == 0


@pytest.fixture
def gateway(instance):
    gateway = Gateway(instance.loop.endpoint)
    welcome = gateway.receive()
    assert isinstance(welcome, Welcome)
    yield gateway
    gateway.close()


def test_welcome_says_what_the_instance_is(instance):
    gateway = Gateway(instance.loop.endpoint)
    welcome = gateway.receive()
    gateway.close()
    assert (welcome.num_blocks, welcome.block_size, welcome.vocab_size) == (40, 8, 1000)
    assert welcome.workers == [worker.pid for worker in instance.workers]


def test_a_crowd_in_a_small_pool_gets_the_oracles_tokens(gateway):
    prompts = {number: list(range(number, number + 5 + number % 20)) for number in range(60)}
    for number, prompt in prompts.items():
        gateway.send(submit(number, prompt, 60))
    tokens, ends = collect(gateway, len(prompts))
    assert set(ends.values()) == {"length"}
    for number, prompt in prompts.items():
        assert tokens[number] == simulated_tokens(prompt, 60, 1000)
    gateway.send(Query(1, "ledger"))
    reply = gateway.receive()
    assert isinstance(reply, QueryReply)
    assert reply.body["held"] == 0


def test_two_gateways_may_use_the_same_ids(instance, gateway):
    other = Gateway(instance.loop.endpoint, "other")
    assert isinstance(other.receive(), Welcome)
    gateway.send(submit(1, [1, 2], 5))
    other.send(submit(1, [3, 4], 5))
    assert collect(gateway, 1)[0][1] == simulated_tokens([1, 2], 5, 1000)
    assert collect(other, 1)[0][1] == simulated_tokens([3, 4], 5, 1000)
    other.close()


def stats(gateway: Gateway) -> dict:
    gateway.send(Query(9, "stats"))
    while not isinstance(reply := gateway.receive(), QueryReply):
        pass
    return reply.body


def test_bytes_that_are_no_message_are_counted_and_harm_nobody(gateway):
    before = stats(gateway)["violations"]
    gateway.socket.send(b"\xc1 nonsense")
    gateway.socket.send_multipart([b"two", b"frames"])
    assert stats(gateway)["violations"] == before + 2


def test_the_requests_of_a_gateway_that_vanishes_are_cancelled(instance, gateway):
    leaving = Gateway(instance.loop.endpoint, "leaving")
    assert isinstance(leaving.receive(), Welcome)
    before = stats(gateway)["finished"].get("aborted", 0)
    gateway.send(Query(1, "pause"))
    assert isinstance(gateway.receive(), QueryReply)
    for number in range(20):
        leaving.send(submit(number, [1, 2, 3], 200))
    deadline = time.monotonic() + 60
    while stats(gateway)["waiting"] < 20:
        assert time.monotonic() < deadline
    leaving.close()
    while stats(gateway)["finished"].get("aborted", 0) < before + 20:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    gateway.send(Query(1, "resume"))  # only now: none of them can have ended by itself
    gateway.receive()
    assert stats(gateway)["blocks"]["held"] == 0


def test_cancel_is_answered(gateway):
    gateway.send(Query(1, "pause"))
    gateway.receive()
    gateway.send(submit(1, [1, 2, 3], 200))
    gateway.send(Cancel(1))
    assert collect(gateway, 1)[1] == {1: "aborted"}
    gateway.send(Query(1, "resume"))
    gateway.receive()


def test_idle_means_asleep(instance, gateway):
    status = Path(f"/proc/self/task/{instance._thread.native_id}/status")

    def sleeps():
        """How often the loop went to sleep so far."""
        lines = status.read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt"))

    for _ in range(40):  # what came before may take a while to end
        before = sleeps()
        time.sleep(0.5)
        if woken := sleeps() - before <= 1:
            break
    assert woken, "nothing happens, and the loop does not stay asleep"


def test_tcp_works_too_and_several_ranks():
    instance = Instance(
        instance_config(
            model="",
            executor="simulated",
            vocab_size=1000,
            max_model_len=64,
            num_blocks=9,
            tensor_parallel_size=2,
        ),
        "tcp://127.0.0.1:*",
    )
    try:
        gateway = Gateway(instance.loop.endpoint)
        assert len(gateway.receive().workers) == 2
        gateway.send(submit(1, [1, 2], 20))
        assert collect(gateway, 1)[0][1] == simulated_tokens([1, 2], 20, 1000)
        gateway.close()
    finally:
        instance.close()
    assert instance.code == 0


def test_a_killed_worker_is_named_in_failing_with_its_signal():
    instance = Instance(CONFIG)
    gateway = Gateway(instance.loop.endpoint)
    try:
        assert isinstance(gateway.receive(), Welcome)
        gateway.send(submit(1, [1], 200))
        os.kill(instance.workers[0].pid, signal.SIGKILL)
        while isinstance(message := gateway.receive(), Outputs):
            pass
        assert isinstance(message, Failing)
        assert f"worker rank 0 (process {instance.workers[0].pid}) was killed by SIGKILL" in message.message
        assert instance.wait() == 1
    finally:
        gateway.close()
        instance.close()


def test_a_worker_that_cannot_start_is_named_with_what_it_said():
    config = instance_config(model="", executor="simulated", vocab_size=0, max_model_len=64, num_blocks=9)
    instance = Instance(config)
    gateway = Gateway(instance.loop.endpoint)
    try:
        message = gateway.receive()
        assert isinstance(message, Failing)
        assert "worker rank 0" in message.message
        assert "exited with status 1" in message.message
        assert "vocab_size" in message.message
        assert instance.wait() == 1
    finally:
        gateway.close()
        instance.close()


class Puppet:
    """A loop whose one worker is a process that does nothing and whose rings the test writes itself."""

    def __init__(self, tmp_path, registration_secret="", **changes):
        self.process = subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
        )
        self.bell = Doorbell.create()
        command_fd, report_fd = create_ring(4096, 1), create_ring(1 << 16, 1)
        self.reports = RingWriter(report_fd, [self.bell])
        self.commands = RingReader(command_fd, 0, self.bell)
        config = instance_config(model="", max_model_len=2048, **changes)
        self.loop = EngineLoop(
            config,
            incarnation="i",
            endpoint=f"ipc://{tmp_path}/s",
            commands=RingWriter(command_fd),
            reports=[RingReader(report_fd, 0)],
            doorbell=self.bell,
            worker_pids=[self.process.pid],
            registration_secret=registration_secret,
        )
        self.code = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self):
        self.code = self.loop.run()

    def report(self, report):
        self.reports.write(REPORTS.encode(report))

    def close(self):
        self.loop.stop()
        self.process.stdin.close()
        self.process.wait()
        self.thread.join(60)
        assert not self.thread.is_alive()


@pytest.fixture
def puppet(tmp_path):
    puppets = []

    def make(**changes):
        puppets.append(Puppet(tmp_path, **changes))
        return puppets[-1]

    yield make
    for one in puppets:
        one.close()


READY = WorkerReady(0, 1000, 32, "t", 1, 100)


def failed_alone(one: Puppet) -> None:
    """Its worker dies before anybody has said `Hello`."""
    one.process.kill()
    deadline = time.monotonic() + GENEROUS_S
    while one.loop.core.failure is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_who_comes_to_an_instance_that_has_failed_already_is_told_why(puppet, tmp_path, monkeypatch):
    monkeypatch.setattr(standing, "UNHEARD_S", 3600.0)
    one = puppet()
    failed_alone(one)
    gateway = Gateway(f"ipc://{tmp_path}/s")
    try:
        message = gateway.receive()
        assert isinstance(message, Failing)
        assert "killed by SIGKILL" in message.message
        one.thread.join(GENEROUS_S)
        assert one.code == 1
    finally:
        gateway.close()


@pytest.mark.parametrize(("patience", "stopped"), [(3600.0, True), (0.01, False)])
def test_an_instance_that_failed_alone_leaves_when_told_to_and_when_nobody_comes(
    puppet, monkeypatch, patience, stopped
):
    monkeypatch.setattr(standing, "UNHEARD_S", patience)
    one = puppet()
    failed_alone(one)
    if stopped:
        one.loop.stop()
    one.thread.join(GENEROUS_S)
    assert one.code == 1


def test_who_does_not_know_the_secret_of_the_registration_is_not_answered(puppet, tmp_path):
    one = puppet(registration_secret="s" * 32)
    one.report(READY)
    stranger, server = Gateway(f"ipc://{tmp_path}/s"), Gateway(f"ipc://{tmp_path}/s", "server")
    try:
        stranger.send(Query(1, "stats"))
        server.send(Hello("server", b"nonce", claim("s" * 32, b"nonce", "server", "i")))
        welcome = server.receive()
        assert isinstance(welcome, Welcome)
        assert welcome.proof == answer("s" * 32, b"nonce", "server", "i")
        server.send(Query(2, "stats"))
        stats = server.receive()
        assert stats.id == 2
        with pytest.raises(TimeoutError):
            stranger.receive(0.05)  # (all of it was read before the questions of the other)
    finally:
        stranger.close()
        server.close()


def test_silence_fails_the_instance_within_the_timeout(puppet):
    one = puppet(step_timeout_s=0.3)
    one.report(READY)
    gateway = Gateway(one.loop.endpoint)
    assert isinstance(gateway.receive(), Welcome)
    gateway.send(submit(1, [1], 5))
    message = gateway.receive()
    assert isinstance(message, Failing)
    assert "nothing was reported" in message.message
    one.thread.join(60)
    assert one.code == 1
    gateway.close()


def test_reports_that_come_fast_are_all_passed_on_and_a_death_meanwhile_is_noticed(puppet):
    """While the loop rests between reports its workers' doorbell wakes nobody; everything else does."""
    one = puppet()
    one.report(READY)
    gateway = Gateway(one.loop.endpoint)
    assert isinstance(gateway.receive(), Welcome)
    count = 300
    gateway.send(submit(1, [1], count + 1))
    while not isinstance(commands := one.commands.read(), bytes):
        time.sleep(0.001)
    (admit,) = COMMANDS.decode(commands).commands
    slot, epoch = pack_int32([admit.slot]), pack_int32([admit.epoch])
    tokens: list[int] = []
    for step in range(count):
        one.report(StepReport(step + 1, 1, slot, epoch, pack_int32([step % 100])))
        time.sleep(0.0002)
    while len(tokens) < count:
        message = gateway.receive()
        if isinstance(message, Outputs):
            tokens += unpack_int32(message.tokens)
    assert tokens == [step % 100 for step in range(count)]
    one.report(StepReport(count + 1, 1, slot, epoch, pack_int32([5])))
    one.process.kill()
    while not isinstance(message := gateway.receive(), Failing):
        pass
    assert "killed by SIGKILL" in message.message
    gateway.close()


def test_a_full_command_ring_blocks_nobody(puppet):
    one = puppet(max_num_batched_tokens=20_000)
    one.report(READY)
    gateway = Gateway(one.loop.endpoint)
    assert isinstance(gateway.receive(), Welcome)
    for number in range(20):
        gateway.send(submit(number, [number] * 1000, 5))  # 80 kB through a ring of 4 kB
    taken = stats(gateway)
    assert taken["running"] + taken["waiting"] == 20, "the engine goes on while nobody reads its ring"
    sequence, admits = 0, 0
    deadline = time.monotonic() + 60
    while admits < 20:
        assert time.monotonic() < deadline
        for record in one.commands.records():
            batch = COMMANDS.decode(record)
            assert batch.sequence == sequence + 1
            sequence, admits = batch.sequence, admits + len(batch.commands)
        time.sleep(0.001)
    gateway.close()


@pytest.mark.parametrize("record", [b"\xc1", REPORTS.encode(StepReport(1, 1, slots=b"abc"))])
def test_a_report_that_cannot_be_read_is_loud(puppet, record):
    one = puppet()
    one.report(READY)
    gateway = Gateway(one.loop.endpoint)
    assert isinstance(gateway.receive(), Welcome)
    one.reports.write(record)
    message = gateway.receive()
    assert isinstance(message, Failing)
    assert "cannot be read" in message.message
    one.thread.join(60)
    assert one.code == 1
    gateway.close()


def test_a_defect_in_the_engine_is_told_and_ends_it(puppet, monkeypatch):
    one = puppet()
    one.report(READY)
    gateway = Gateway(one.loop.endpoint)
    assert isinstance(gateway.receive(), Welcome)
    monkeypatch.setattr(one.loop.core, "on_message", lambda *_: 1 / 0)
    gateway.send(submit(1, [1], 1))
    message = gateway.receive()
    assert isinstance(message, Failing)
    assert "ZeroDivisionError" in message.message
    one.thread.join(60)
    assert one.code == 1
    gateway.close()


def test_an_endpoint_that_is_taken_is_named(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(OSError, match=f"cannot listen on {endpoint}"):
            EngineLoop(
                CONFIG,
                incarnation="i",
                endpoint=endpoint,
                commands=None,
                reports=[],
                doorbell=None,
                worker_pids=[],
            )


def test_sigterm_ends_the_process_with_0(tmp_path):
    """In a process of its own, where the loop is in the main thread."""
    program = f"""
import subprocess, sys
from baton.engine.shell.loop import EngineLoop
from baton.launch.planning.instance_config import instance_config
from baton.worker.wiring import GroupWiring, worker_argv
config = instance_config(model="", executor="simulated", vocab_size=9, max_model_len=64, num_blocks=9)
group = GroupWiring(config, "{tmp_path}/r")
wiring = group.worker(0)
worker = subprocess.Popen(worker_argv(wiring), pass_fds=wiring.descriptors())
group.close_worker_ends()
loop = EngineLoop(config, incarnation="i", endpoint="ipc://{tmp_path}/s", commands=group.commands,
                  reports=group.reports, doorbell=group.doorbell, worker_pids=[worker.pid])
code = loop.run()
sys.exit(code * 10 + worker.wait())
"""
    process = subprocess.Popen([sys.executable, "-c", program])
    gateway = Gateway(f"ipc://{tmp_path}/s")
    try:
        assert isinstance(gateway.receive(), Welcome)
        gateway.send(submit(1, [1], 60))
        process.send_signal(signal.SIGTERM)
        while isinstance(message := gateway.receive(), Outputs):
            pass
        assert message == Failing("the instance is shutting down")
        assert process.wait(60) == 0
    finally:
        gateway.close()
        process.kill()
        process.wait()
