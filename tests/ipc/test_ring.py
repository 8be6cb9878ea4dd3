"""The broadcast ring against a list model, with slow readers, dead readers, dead writers and torn bytes."""

import os
import signal
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.ipc.doorbell import Doorbell
from baton.ipc.processes.process import wait_any
from baton.ipc.ring import PUBLISHED_WORD, RETRY_S, RingCorrupted, RingReader, RingWriter, create_ring


def make(capacity=256, readers=1, **options):
    fd = create_ring(capacity, readers)
    writer = RingWriter(fd)
    ends = [RingReader(fd, i, **options) for i in range(readers)]
    return fd, writer, ends


def record(number, size):
    return bytes((number * 31 + i) & 0xFF for i in range(size))


sizes = st.one_of(
    st.integers(0, 20), st.integers(50, 70), st.sampled_from([55, 56, 57, 64, 192, 256, 257, 600, 2000])
)
ops = st.lists(
    st.one_of(
        st.tuples(st.just("append"), sizes),
        st.tuples(st.just("flush"), st.just(0)),
        st.tuples(st.just("read"), st.integers(0, 3)),
        st.tuples(st.just("drain"), st.integers(0, 3)),
    ),
    max_size=80,
)


@settings(max_examples=150, deadline=None)
@given(capacity=st.sampled_from([64, 128, 256, 1024]), readers=st.integers(1, 4), script=ops)
def test_every_reader_gets_every_record_in_order(capacity, readers, script):
    fd, writer, ends = make(capacity, readers)
    sent, got = [], [[] for _ in ends]
    for op, argument in script:
        if op == "append":
            sent.append(record(len(sent), argument))
            writer.append(sent[-1])
        elif op == "flush":
            assert writer.flush() == (not writer.pending)
        else:
            i = argument % readers
            for _ in range(1 if op == "read" else 1000):
                data = ends[i].read()
                if data is None:
                    break
                got[i].append(data)
        assert writer.bytes_queued <= sum(map(len, sent))
        for received in got:
            assert received == sent[: len(received)]
    for _ in range(10_000):
        done = writer.flush()
        for i, end in enumerate(ends):
            got[i].extend(end.records())
        if done and not any(end.has_news() for end in ends):
            break
    assert got == [sent] * readers
    assert writer.bytes_queued == 0
    assert not any(end.partial for end in ends)
    for end in ends:
        end.close()
    writer.close()
    os.close(fd)


def test_a_slow_reader_holds_the_space():
    _, writer, (quick, slow) = make(256, 2)
    sent = [record(i, 40) for i in range(50)]
    for data in sent:
        writer.append(data)
    got = []
    while not writer.flush():
        before = len(got)
        got.extend(quick.records())
        if len(got) == before:
            break
    assert writer.pending
    assert len(got) == 256 // 48
    assert slow.read() == sent[0]
    assert not writer.flush()
    assert list(quick.records()) == [sent[len(got)]]
    got.append(sent[len(got)])
    late = [sent[0]]
    while not writer.flush():
        got.extend(quick.records())
        late.extend(slow.records())
    got.extend(quick.records())
    late.extend(slow.records())
    assert got == late == sent


def test_freed_space_rings_the_writer_only_when_it_waits():
    fd = create_ring(256, 1)
    bell, news = Doorbell.create(), Doorbell.create()
    writer, reader = RingWriter(fd, [news]), RingReader(fd, 0, bell)
    assert writer.write(b"x" * 40)
    assert news.drain()
    assert reader.read() is not None
    assert not bell.drain()
    for _ in range(20):
        writer.append(b"y" * 40)
    assert not writer.flush()
    assert reader.read() is not None
    assert bell.drain()
    assert news.drain()
    while not writer.flush():
        list(reader.records())
    bell.drain()
    list(reader.records())
    assert not bell.drain()


def test_a_record_need_not_wake_anybody():
    fd = create_ring(256, 1)
    news = Doorbell.create()
    writer, reader = RingWriter(fd, [news]), RingReader(fd, 0)
    assert writer.write(b"quiet", ring=False)
    assert not news.drain()
    assert reader.has_news()
    assert reader.read() == b"quiet"
    writer.write(b"quiet", ring=False)
    writer.ring()
    assert news.drain()
    writer.write(b"loud")
    assert news.drain()
    assert list(reader.records()) == [b"quiet", b"loud"]
    while writer.write(b"x" * 40, ring=False):
        assert not news.drain()
    assert news.drain()  # what waits for space is somebody's business


def test_torn_bytes_are_not_there_yet():
    now = [0.0]
    _, writer, (reader,) = make(256, 1, deadline_s=1.0, clock=lambda: now[0])
    writer.write(b"first")
    writer.write(b"second record")
    data = reader._data
    assert reader.read() == b"first"
    for place in (16, 20, 24, 30):  # header (length, checksum) and payload of the second
        good = data[place]
        data[place] = good ^ 0x10
        assert reader.has_news()
        assert reader.read() is None
        data[place] = good
    assert reader.read() == b"second record"
    writer.write(b"third")
    data[48] ^= 1
    assert reader.read() is None
    now[0] = 0.9
    assert reader.read() is None
    now[0] = 1.1
    with pytest.raises(RingCorrupted, match="fragment 2"):
        reader.read()


def test_bytes_of_the_lap_before_are_not_taken_for_news():
    """The position is visible, the bytes are not: what lies there is a valid record, but an old one."""
    _, writer, (reader,) = make(64, 1)
    for _ in range(4):
        writer.write(b"same....")
        assert reader.read() == b"same...."
    writer.words[PUBLISHED_WORD] = writer._position + 16
    assert reader.has_news()
    assert reader.read() is None


def test_unpublished_bytes_are_invisible():
    _, writer, (reader,) = make(256, 1)
    writer._write_fragment(b"half-written", False)
    assert not reader.has_news()
    assert reader.read() is None


def test_misuse_is_refused():
    fd, writer, (reader,) = make(128, 1)
    with pytest.raises(ValueError, match="reader 1 of a ring with 1"):
        RingReader(fd, 1)
    writer.write(b"x")
    reader.read()
    with pytest.raises(ValueError, match="used already"):
        RingReader(fd, 0)
    with pytest.raises(ValueError, match="a writer already"):
        RingWriter(fd)
    with pytest.raises(ValueError, match="room and readers"):
        create_ring(0, 1)
    other = os.memfd_create("other")
    with pytest.raises(ValueError, match="not a ring"):
        RingReader(other, 0)
    os.ftruncate(other, 4096)
    with pytest.raises(ValueError, match="not a ring"):
        RingWriter(other)


CHILD = """
import sys
from baton.ipc.doorbell import Doorbell
from baton.ipc.processes.process import wait_any
from baton.ipc.ring import RETRY_S, RingWriter
ring, mine, theirs, total = map(int, sys.argv[1:])
bell = Doorbell(mine)
writer = RingWriter(ring, [Doorbell(theirs)])
number = 0
while total == 0 or number < total:
    for _ in range(200):
        writer.append(number.to_bytes(8, "little") * (1 + number % 3))
        number += 1
    while not writer.flush():
        wait_any([mine], RETRY_S)
        bell.drain()
"""


def start_writer(total, capacity=1 << 18):
    ring = create_ring(capacity, 1)
    mine, theirs = Doorbell.create(), Doorbell.create()
    fds = (ring, theirs.fileno(), mine.fileno())
    child = subprocess.Popen([sys.executable, "-c", CHILD, *map(str, fds), str(total)], pass_fds=fds)
    return child, RingReader(ring, 0, theirs), mine


def check(reader, expected):
    """Reads what is there; returns the number of the next record expected."""
    for data in reader.records():
        assert data == expected.to_bytes(8, "little") * (1 + expected % 3)
        expected += 1
    return expected


def test_a_million_records_between_processes():
    total = 1_000_000
    child, reader, bell = start_writer(total)
    expected = 0
    while expected < total:
        bell.drain()
        expected = check(reader, expected)
        if expected < total:
            assert wait_any([bell.fileno()], 60.0) or child.poll() is None
    assert child.wait(60) == 0
    assert expected == total


def test_a_killed_writer_leaves_only_whole_records():
    child, reader, bell = start_writer(0, capacity=1 << 12)
    expected = 0
    while expected < 20_000:
        bell.drain()
        expected = check(reader, expected)
        wait_any([bell.fileno()], RETRY_S)
    child.send_signal(signal.SIGKILL)
    child.wait(60)
    expected = check(reader, expected)
    assert not reader.has_news()
    assert reader.read() is None
