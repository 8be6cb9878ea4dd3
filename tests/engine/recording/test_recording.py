"""Recordings: what is written, what can be read again, and that a replay tells equal from different."""

import asyncio
import errno
import logging
import os
import random
import signal
import threading
import time
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from baton.cli.main import app
from baton.engine.core import EngineCore
from baton.engine.recording.recorder import (
    EVENTS,
    HEADER,
    Ended,
    Flushed,
    FlushRaised,
    Header,
    PeerLost,
    PeerSaid,
    RecordingCore,
    create_core,
    tape,
)
from baton.engine.recording.replay import describe, find_recordings, replay
from baton.engine.recording.tape import MAGIC, DamagedRecording, TapeReader, TapeWriter, segment
from baton.engine.scheduling.room import Room
from baton.engine.scheduling.scheduler import Scheduler
from baton.engine.workers.handshake import DYING_S
from baton.launch.planning.instance_config import instance_config
from baton.protocol.codec import pack_int32
from baton.protocol.messages.handover import Taken
from baton.protocol.messages.reports import StepReport, WorkerFailed, WorkerReady
from baton.protocol.messages.requests import Cancel, Hello, Query, Submit
from baton.protocol.params.sampling import Sampling, Stopping
from tests.conftest import GENEROUS_S
from tests.e2e.server import Server
from tests.e2e.test_kill import wait_metric
from tests.e2e.workload import make_jobs, together
from tests.engine.world import World

CONFIG = instance_config(
    model="", executor="simulated", max_model_len=64, block_size=4, max_num_seqs=4, step_timeout_s=10.0
)
READY = WorkerReady(0, num_blocks=16, block_size=4, tile="t", block_bytes=64, vocab_size=100)


def record_a_world(directory: Path, monkeypatch, seed: int = 0, **changes) -> World:
    """A crowd in a small pool, with cancels, queries and a gateway that leaves, recorded."""
    monkeypatch.setattr("tests.engine.world.EngineCore", RecordingCore)
    options = {"num_blocks": 14, "max_num_seqs": 6, "admission_headroom": 0, **changes}
    world = World(record=str(directory), **options)
    rng = random.Random(seed)
    world.hello(b"g")
    world.hello(b"h")
    clients = []
    for turn in range(60):
        world.now += rng.random() * 0.01
        gateway = b"g" if turn % 3 else b"h"
        if turn < 40:
            prompt = [rng.randrange(50) for _ in range(rng.randint(1, 12))]
            submitted = world.submit(prompt, rng.randint(1, 24), gateway=gateway, priority=rng.randint(0, 1))
            clients.append((submitted, gateway))
        if turn % 7 == 6:
            world.cancel(*rng.choice(clients))
        world.apply(rng.randint(0, 3))
        world.step()
        world.read_reports(rng.randint(0, 2))
    world.query("stats")
    world.lose(b"h")
    world.drain()
    return world


@pytest.fixture
def recording(tmp_path, monkeypatch):
    """The directory of one recording."""
    world = record_a_world(tmp_path / "tapes", monkeypatch)
    assert world.core.counters.preemptions > 0
    world.core.close()
    (found,) = find_recordings(tmp_path / "tapes")
    return found


def test_the_same_decisions_byte_for_byte(recording):
    result = replay(recording)
    assert result.identical
    assert result.ended == "the engine left"
    assert result.cut_off == 0
    counts = result.counts
    assert counts["messages"] > 40
    assert counts["reports"] > 50
    assert counts["tokens"] > 100
    assert counts["commands"] > 50
    assert counts["gateways lost"] == 1
    assert 0.1 < result.seconds < 1.0  # (of the world's own clock, which moves by what the seed says)
    assert result.header.config.num_blocks == 14
    assert result.header.baton
    assert replay(recording).digest == result.digest


def test_what_an_engine_left_that_was_killed_at_its_start_is_left_out(recording):
    for name, content in (("nothing", b""), ("magic", MAGIC), ("half", MAGIC + b"\1")):
        (recording.parent / name).mkdir()
        segment(recording.parent / name, 1).write_bytes(content)
    assert find_recordings(recording.parent) == [recording]
    assert find_recordings(recording.parent / "magic") == [recording.parent / "magic"]
    with pytest.raises(DamagedRecording, match="the recording is empty"):
        replay(recording.parent / "magic")


def test_other_runs_have_other_digests(recording, tmp_path, monkeypatch):
    world = record_a_world(tmp_path / "other", monkeypatch, seed=1)
    world.core.close()
    (other,) = find_recordings(tmp_path / "other")
    assert replay(other).identical
    assert replay(other).digest != replay(recording).digest


def test_a_recording_is_for_its_owner_only(recording):
    assert recording.stat().st_mode & 0o777 == 0o700
    assert segment(recording, 1).stat().st_mode & 0o777 == 0o600


def test_a_command_that_differs_is_shown_with_its_place(recording, monkeypatch):
    original = Room.target
    monkeypatch.setattr(Room, "target", lambda self, request: original(self, request) + 1)
    result = replay(recording)
    assert not result.identical
    difference = result.difference
    assert difference is not None
    assert difference.frame > 2
    assert difference.recorded.startswith("batch 1: Admit(slot=")
    assert difference.replayed.startswith("batch 1: Admit(slot=")
    assert difference.recorded != difference.replayed
    shown = CliRunner().invoke(app, ["replay", str(recording)])
    assert shown.exit_code == 1
    assert "DIFFERENT" in shown.output
    assert difference.replayed in shown.output


def test_a_message_that_differs_is_shown(recording, monkeypatch):
    original = EngineCore.stats
    monkeypatch.setattr(EngineCore, "stats", lambda self, now: {**original(self, now), "steps": -1})
    difference = replay(recording).difference
    assert difference is not None
    assert "'steps': -1" in difference.replayed
    assert difference.recorded.startswith("messages with digest ")


def test_every_kind_of_call_is_replayed(tmp_path):
    """Also those that the core makes itself, which must not be replayed twice."""
    core = make_core(tmp_path)
    core.on_report(0, READY, 0.1)
    core.on_message(b"g", Hello("one"), 0.2)
    core.on_message(b"g", submit(1), 0.3)
    core.on_message(b"g", Hello("two"), 0.4)  # the core itself says that the first one is gone
    core.flush(0.4)
    core.violation("gateway 67", "no message")
    core.refused("handshake", 2)
    core.on_report(1, StepReport(1, 1), 0.5)  # the core itself finds a violation
    core.on_message(b"g", Query(1, "stats"), 0.6)
    core.flush(0.6)
    core.on_clock(0.7)
    core.on_report(0, WorkerFailed(0, "no memory"), 1.0)
    core.flush(1.0)
    core.on_clock(1.0 + DYING_S)  # the core itself fails
    core.gateway_lost(b"nobody")
    core.shut_down()
    core.flush(9.0)
    core.close()
    (found,) = find_recordings(tmp_path)
    result = replay(found)
    assert result.identical, result
    expected = {
        "messages": 4, "refusals": 1, "reports": 3, "malformed messages": 1, "deadlines": 1,
        "gateways lost": 1, "shutdowns": 1, "decisions": 4, "commands": 1,
    }  # fmt: skip
    assert {name: result.counts[name] for name in expected} == expected
    assert result.counts["failures"] == 0


def test_a_failure_and_defects_are_replayed_at_their_places(tmp_path, monkeypatch):
    decide, enqueue = Scheduler.decide, Scheduler.enqueue

    def broken_decide(self):
        if self.num_waiting == 2:
            raise KeyError("a defect")
        return decide(self)

    def broken_enqueue(self, request):
        enqueue(self, request)
        if request.id == 3:
            raise KeyError("another one")

    monkeypatch.setattr(Scheduler, "decide", broken_decide)
    monkeypatch.setattr(Scheduler, "enqueue", broken_enqueue)
    core = make_core(tmp_path)
    core.on_report(0, READY, 0.0)
    core.on_message(b"g", Hello("one"), 0.0)
    core.on_message(b"g", submit(1), 0.0)
    core.on_message(b"g", submit(2), 0.0)
    with pytest.raises(KeyError):
        core.flush(0.1)
    with pytest.raises(KeyError):
        core.on_message(b"g", submit(3), 0.1)
    core.fail("a defect in the engine")
    core.flush(0.2)
    core.close()
    (found,) = find_recordings(tmp_path)
    result = replay(found)
    assert result.identical, result
    assert result.counts["failures"] == 1
    assert result.counts["decisions that raised"] == 1
    assert result.counts["defects"] == 2


def make_core(directory: Path, incarnation: str = "i1", **changes) -> RecordingCore:
    config = msgspec.structs.replace(CONFIG, record=str(directory), **changes)
    core = create_core(config, incarnation=incarnation, workers=[1], now=0.0)
    assert isinstance(core, RecordingCore)
    return core


def submit(number: int) -> Submit:
    return Submit(number, f"r{number}", pack_int32([1, 2, 3]), Sampling(seed=0), Stopping(4))


# -- what happened to the files


def test_a_recording_that_is_cut_off_replays_up_to_there(recording):
    path = segment(recording, 1)
    whole = path.read_bytes()
    decisions = replay(recording).counts["decisions"]
    header_end = len(MAGIC) + 8 + int.from_bytes(whole[len(MAGIC) : len(MAGIC) + 4], "little")
    rng = random.Random(0)
    lengths = [
        *range(len(whole) - 30, len(whole)),
        *(rng.randrange(header_end, len(whole)) for _ in range(30)),
    ]
    for length in lengths:
        path.write_bytes(whole[:length])
        result = replay(recording)
        assert result.identical
        assert result.ended is None
        assert result.counts["decisions"] <= decisions
        assert result.cut_off < length
    path.write_bytes(whole[: header_end - 1])
    with pytest.raises(DamagedRecording, match="empty"):
        replay(recording)
    path.write_bytes(whole[:5])
    with pytest.raises(DamagedRecording, match="empty"):
        replay(recording)


def test_a_changed_byte_is_found_wherever_it_is(recording):
    path = segment(recording, 1)
    whole = path.read_bytes()
    rng = random.Random(1)
    for _ in range(60):
        place = rng.randrange(len(whole))
        changed = bytearray(whole)
        changed[place] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        try:
            result = replay(recording)
        except DamagedRecording:
            continue  # the beginning
        # A length that points behind the end looks like a recording that is cut off.
        assert result.damage is not None or result.cut_off, f"byte {place}"
        assert result.difference is None
    path.write_bytes(bytes(whole[:-3]) + b"xyz")
    shown = CliRunner().invoke(app, ["replay", str(recording)])
    assert shown.exit_code == 1
    assert "DAMAGED" in shown.output
    assert "the checksum of a frame is wrong" in shown.output


def test_another_version_another_file_or_none_at_all(recording, tmp_path):
    path = segment(recording, 1)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(MAGIC, b"BATONTAPE\x07\r\n", 1))
    with pytest.raises(DamagedRecording, match="the format has version 7, this Baton reads version 2"):
        replay(recording)
    path.write_bytes(b"something else entirely")
    with pytest.raises(DamagedRecording, match="no recording of Baton"):
        replay(recording)
    path.write_bytes(MAGIC)
    writer_content = b"\x93no header"
    with path.open("ab") as file:
        import struct
        import zlib

        file.write(struct.pack("<II", len(writer_content), zlib.crc32(writer_content)) + writer_content)
    with pytest.raises(DamagedRecording, match="the header cannot be read"):
        replay(recording)
    empty = tmp_path / "empty"
    empty.mkdir()
    shown = CliRunner().invoke(app, ["replay", str(empty)])
    assert shown.exit_code == 2
    assert "there is no recording" in shown.output


def test_another_version_of_baton_is_noted(recording):
    contents = list(TapeReader(recording))
    header = msgspec.structs.replace(HEADER.decode(contents[0]), baton="0.0.1")
    segment(recording, 1).unlink()
    writer = TapeWriter(recording)
    for content in (HEADER.encode(header), *contents[1:]):
        writer.write(content)
    assert writer.close()
    shown = CliRunner().invoke(app, ["replay", str(recording)])
    assert shown.exit_code == 0
    assert "Baton 0.0.1" in shown.output
    assert "another version may decide differently" in shown.output


# -- writing


def test_segments_are_rotated_and_read_in_order(tmp_path):
    writer = TapeWriter(tmp_path, segment_bytes=1000)
    contents = [bytes([number]) * (number * 7 % 300) for number in range(100)] + [b"x" * 5000]
    for content in contents:
        assert writer.write(content)
    assert writer.close()
    assert not writer.write(b"late")
    segments = sorted(tmp_path.glob("*.tape"))
    assert len(segments) > 10
    assert all(path.stat().st_size <= 1000 for path in segments[:-1])
    assert list(TapeReader(tmp_path)) == contents
    cut = segments[3].read_bytes()[:-1]
    segments[3].write_bytes(cut)
    with pytest.raises(DamagedRecording, match=r"000004.tape, byte \d+: a frame goes beyond"):
        list(TapeReader(tmp_path))
    segments[3].unlink()
    with pytest.raises(DamagedRecording, match=r"000004.tape: this segment is missing"):
        TapeReader(tmp_path)


def test_what_is_written_is_on_disk_soon_and_an_idle_writer_sleeps(tmp_path, monkeypatch):
    writer = TapeWriter(tmp_path)
    wakes = []
    original = writer._take
    monkeypatch.setattr(writer, "_take", lambda: wakes.append(1) or original())
    writer.write(b"one")
    deadline = time.monotonic() + 60
    while list(TapeReader(tmp_path)) != [b"one"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    before = len(wakes)
    time.sleep(3 * tape.WINDOW_S)
    assert len(wakes) == before, "nothing was written, so nobody has a reason to wake"
    assert writer.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "recording"]


def test_at_the_limit_recording_ends_and_the_engine_goes_on(tmp_path, monkeypatch, caplog):
    world = record_a_world(tmp_path, monkeypatch, record_max_bytes=6000)
    world.check_end()
    world.core.close()
    said = [record.message for record in caplog.records if "recording" in record.message]
    assert [line.partition(":")[0] for line in said] == ["recording stops"]
    (found,) = find_recordings(tmp_path)
    assert segment(found, 1).stat().st_size <= 6000
    result = replay(found)
    assert result.identical
    assert result.ended == "the limit of 6000 bytes was reached"
    assert result.counts["decisions"] > 10
    again = make_core(tmp_path, record_max_bytes=6000)
    again.close()
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*.tape")) <= 6000


def test_instances_that_record_into_one_directory_share_its_limit(tmp_path, monkeypatch, caplog):
    first = make_core(tmp_path, incarnation="one", record_max_bytes=6000)
    deadline = time.monotonic() + 60
    while not list(TapeReader(find_recordings(tmp_path)[0])):  # its header comes to the disk
        assert time.monotonic() < deadline
        time.sleep(0.01)
    world = record_a_world(tmp_path, monkeypatch, record_max_bytes=6000)
    world.core.close()
    for number in range(200):  # it began when the directory was empty, and the other one has filled it since
        first.violation("somebody", f"says nothing of use {number}")
        first.flush(float(number))
    first.close()
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*.tape")) <= 6000 + 2 * 256
    stopped = [record for record in caplog.records if "recording stops" in record.message]
    assert len(stopped) == 2


def test_a_full_disk_ends_the_recording_with_one_line_and_whole_frames(tmp_path, monkeypatch, caplog):
    real, written = os.write, 0

    def write(file: int, data) -> int:
        nonlocal written
        if threading.current_thread().name != "recording":
            return real(file, data)
        if written >= 3000:
            raise OSError(errno.ENOSPC, "No space left on device")
        written += (count := real(file, data[:1000]))
        return count

    monkeypatch.setattr(tape.os, "write", write)
    monkeypatch.setattr(tape, "WINDOW_S", 0.01)
    world = record_a_world(tmp_path, monkeypatch)
    deadline = time.monotonic() + 60
    while not world.core._tape.stopped:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    world.submit([1, 2], 5)
    world.drain()
    world.check_end()
    world.core.close()
    errors = [record.message for record in caplog.records if record.levelno >= logging.ERROR]
    (found,) = find_recordings(tmp_path)
    assert errors == [f"recording stops: cannot write to {found}: No space left on device"]
    result = replay_if_any(found)
    assert result is None or (result.identical and result.cut_off == 0 and result.ended is None)


def replay_if_any(found: Path):
    try:
        return replay(found)
    except DamagedRecording as error:
        assert "empty" in str(error)  # noqa: PT017
        return None


def test_a_slow_disk_never_holds_the_engine_up(tmp_path, monkeypatch, caplog):
    release, real = threading.Event(), os.write

    def write(file: int, data) -> int:
        if threading.current_thread().name == "recording":
            release.wait(120)
        return real(file, data)

    monkeypatch.setattr(tape.os, "write", write)
    monkeypatch.setattr(tape, "BACKLOG_BYTES", 100_000)
    monkeypatch.setattr(tape, "WINDOW_S", 0.01)
    writer = TapeWriter(tmp_path)
    began = time.monotonic()
    for _ in range(100_000):
        if not writer.write(bytes(1000)):
            break
        time.sleep(0.0005)
    else:
        pytest.fail("the backlog grows without a bound")
    assert time.monotonic() - began < GENEROUS_S
    assert "the disk is too slow" in caplog.text
    release.set()
    assert not writer.close()


def test_a_directory_that_cannot_be_made_is_an_error_in_the_log_and_the_engine_runs(caplog):
    config = msgspec.structs.replace(CONFIG, record="/dev/null/tapes")
    core = create_core(config, incarnation="i1", workers=[1], now=0.0)
    assert type(core) is EngineCore
    assert "recording is off: --record /dev/null/tapes" in caplog.text
    plain = create_core(CONFIG, incarnation="i1", workers=[1], now=0.0)
    assert type(plain) is EngineCore


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--record", "/dev/null/tapes"), "--record /dev/null/tapes: cannot make this directory"),
        (("--record-max-bytes", "much"), "--record-max-bytes much: give a number of bytes"),
    ],
)
def test_wrong_flags_are_one_line_that_names_them(flags, said):
    shown = CliRunner().invoke(app, ["serve", "--executor", "simulated", *flags])
    assert shown.exit_code == 2
    assert said in shown.output


def test_events_survive_their_encoding():
    header = Header("0", "3", 1.0, CONFIG, "i1", [1], 2.0, "ipc://p")
    assert HEADER.decode(HEADER.encode(header)) == header
    events = [
        PeerSaid(1.0, "p", Taken(1, 2)),
        PeerLost(1.0, "p", True),
        Flushed(1.0, None, b"", b"x"),
        Ended("why"),
        FlushRaised(2.0),
    ]
    assert EVENTS.decode(msgspec.msgpack.encode(events)) == events
    assert describe(None) == "no commands"


# -- the real thing


def test_a_server_under_load_is_replayed_byte_for_byte_also_after_a_kill(tmp_path):
    flags = (
        "--executor simulated --simulated-cost 0.0005 --max-model-len 512 --block-size 8 --max-num-seqs 16 "
        "--num-gpu-blocks-override 40 --admission-headroom 0"
    ).split()
    with Server(*flags, "--record", str(tmp_path)) as server:
        server.wait_ready()
        jobs = make_jobs(60, 1, longest_prompt=60, longest_output=80, cut_share=0.3)
        for job in jobs:
            job.delay_s = 0.0
        asyncio.run(_load_at_once(server, jobs))
        (first,) = find_recordings(tmp_path)
        deadline = time.monotonic() + 60
        while (found := _recorded_tokens(first)) <= 1000:  # the tape is written a moment later
            assert time.monotonic() < deadline, f"only {found} tokens were recorded"
            time.sleep(0.1)
        (engine,) = server.children()["engine"]
        os.kill(engine, signal.SIGKILL)
        while len(list(tmp_path.iterdir())) < 2:
            assert time.monotonic() < deadline + 60
            time.sleep(0.1)
        server.wait_ready()
        asyncio.run(_load(server, jobs[:20]))
    killed, left = find_recordings(tmp_path)
    results = [replay(killed), replay(left)]
    assert [result.identical for result in results] == [True, True]
    assert [result.ended for result in results] == [None, "the engine left"]
    assert results[0].counts["tokens"] > 1000
    assert results[0].counts["preemptions"] > 0
    assert results[1].counts["tokens"] > 200
    shown = CliRunner().invoke(app, ["replay", str(tmp_path)])
    assert shown.exit_code == 0
    assert shown.output.count("identical, byte for byte") == 2
    assert "without saying why" in shown.output


def _recorded_tokens(directory: Path) -> int:
    """Those that are in the file by now: none before its first frame is."""
    try:
        return replay(directory).counts["tokens"]
    except DamagedRecording:
        return 0


async def _load_at_once(server: Server, jobs) -> None:
    """All of them wait before the first begins, so that the pool is too small for certain."""
    server.http.post("/pause").raise_for_status()
    load = asyncio.create_task(_load(server, jobs))
    await asyncio.to_thread(wait_metric, server, "baton:num_requests_waiting", len(jobs))
    server.http.post("/resume").raise_for_status()
    await load


async def _load(server: Server, jobs) -> None:
    """The answers are other tests' business; here only the traffic counts."""
    async with server.async_client() as client:
        await together(client, jobs)


def test_a_cancel_of_nothing_is_recorded_too(tmp_path):
    core = make_core(tmp_path)
    core.on_message(b"g", Cancel(9), 0.0)
    core.flush(0.0)
    core.close()
    (found,) = find_recordings(tmp_path)
    assert replay(found).counts["messages"] == 1
