"""What every transport promises, with real processes on both sides."""

import importlib.util
import os
import signal
import subprocess
import sys
import time

import msgspec
import numpy as np
import pytest

from .pools import Geometry, Reader, Source, content, resources, wait_until

NIXL = any(importlib.util.find_spec(name) for name in ("nixl_cu13", "nixl_cu12"))
TRANSPORTS = [
    "shared_memory",
    "tcp",
    pytest.param("nixl", marks=pytest.mark.skipif(not NIXL, reason="the extra nixl is not installed")),
]
BIG = Geometry(num_blocks=64, num_layers=4, total_heads=4, tile_bytes=32768)
"""A page is a megabyte."""


@pytest.fixture(params=TRANSPORTS)
def transfer(request):
    return request.param


def of(geometry, transfer, **changes):
    return msgspec.structs.replace(geometry, transfer=transfer, **changes)


def test_scattered_pages_and_layers(transfer):
    geometry = of(Geometry(), transfer)
    rng = np.random.default_rng(7)
    with Source(geometry) as source, Reader(geometry) as reader:
        expected = np.zeros_like(reader.pool.array)
        pages = content(geometry)
        free = rng.permutation(64).tolist()
        for count, first, layers in [(10, 0, -1), (9, 1, -1), (8, 0, 2), (7, 2, 1), (6, 0, 3), (0, 0, -1)]:
            from_, to = rng.permutation(64)[:count].tolist(), [free.pop() for _ in range(count)]
            if count == 10:  # neighbours too
                from_, to = [5, 6, 7, 20, 21, 3, 9, 8, 30, 31], sorted(to)
            found = reader.fetch(source.instance, from_, to, first, layers)
            assert (found.error, found.dropped) == ("", False)
            assert found.transport == (transfer if count else "")
            upto = 3 if layers == -1 else first + layers
            expected[to, first:upto] = pages[from_, first:upto]
            assert found.num_bytes == expected[to, first:upto].nbytes
            assert np.array_equal(reader.pool.array, expected)


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (2, 4), (4, 2), (4, 1), (2, 2)])
def test_any_tensor_parallel_sizes(transfer, sizes, heads):
    """With fewer heads than ranks several ranks hold the same one."""
    there = of(Geometry(num_blocks=16, total_heads=heads), transfer, ranks=sizes[0])
    here = of(there, transfer, ranks=sizes[1])
    with Source(there) as source:
        for rank in range(sizes[1]):
            with Reader(here, rank) as reader:
                assert reader.fetch(source.instance, [3, 4, 9], [1, 2, 15]).error == ""
                assert reader.fetch(source.instance, [11], [7], 1, 2).error == ""
                wanted = content(here, rank)
                assert np.array_equal(reader.pool.array[[1, 2, 15]], wanted[[3, 4, 9]])
                assert np.array_equal(reader.pool.array[7, 1:], wanted[11, 1:])
                assert not reader.pool.array[7, :1].any()


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"num_layers": 2}, "same model"),
        ({"tile_bytes": 256}, "same model"),
        ({"total_heads": 2}, "same model"),
    ],
)
def test_another_geometry_is_refused(transfer, changes, error):
    geometry = of(Geometry(), transfer)
    with Source(of(geometry, transfer, **changes)) as source, Reader(geometry) as reader:
        assert error in reader.fetch(source.instance, [1], [1]).error
        assert not reader.pool.array.any()


def test_a_thousand_fetches_leave_nothing(transfer):
    geometry = of(Geometry(), transfer)
    rng = np.random.default_rng(3)
    with Source(geometry) as source:
        before = resources()
        with Reader(geometry) as reader:
            assert reader.fetch(source.instance, [1], [1]).error == ""
            settled, there = resources(), source.descriptors()
            for round_ in range(100):
                ids = [
                    reader.begin(source.instance, rng.permutation(64)[:9], rng.permutation(64)[:9])
                    for _ in range(10)
                ]
                if round_ % 4 == 0:
                    reader.drop(*ids[round_ % 7 :: 3])
                assert sorted(reader.end().id for _ in ids) == ids
            assert reader.service._fetcher.under_way == 0
            assert resources()[1:] == settled[1:]
            assert resources()[0] <= settled[0] + 2
            wait_until(lambda: source.descriptors() <= there + 2)
        del reader
        assert resources() == before


def test_the_source_dies(transfer):
    """Before a fetch and in the middle of one: it ends soon, and what was mapped is given back."""
    before = resources()[1]  # other tests of this process may hold pools of theirs
    with Reader(of(BIG, transfer)) as reader:
        for delay_s in (0.0, 0.002, 0.01, 0.03):
            with Source(of(BIG, transfer)) as source:
                assert reader.fetch(source.instance, [1], [1]).error == ""
                reader.begin(source.instance, list(range(64)), list(range(64)))
                time.sleep(delay_s)
                source.kill()
                found = reader.end()
                assert "nothing for" not in found.error, "it ends by the death, not by the silence after it"
                if not found.error:
                    assert np.array_equal(reader.pool.array, content(BIG))
                found = reader.fetch(source.instance, [1], [1])
                if transfer == "tcp":
                    assert "page server" in found.error
        wait_until(lambda: resources()[1] == before + 1)  # the reader's own pool


def test_the_source_stops_and_wakes_after_the_lease(transfer):
    """A fetch ends within its limit, and nothing lands in the blocks after that."""
    geometry = of(BIG, transfer)
    with Source(geometry) as source, Reader(geometry) as reader:
        assert reader.fetch(source.instance, [1], [1]).error == ""
        source.stop()
        found = reader.fetch(source.instance, list(range(64)), list(range(64)))
        if transfer == "shared_memory":
            assert found.error == ""  # memory needs nobody to answer
        elif transfer == "tcp":
            assert "nothing for 3.0 s" in found.error
        else:  # it depends on what NIXL's backend uses
            assert not found.error or "within the deadline" in found.error
        reader.pool.array[:] = 7
        source.wake()
        time.sleep(0.3)
        assert (reader.pool.array == 7).all()
        assert reader.fetch(source.instance, [5], [6]).error == ""
        assert np.array_equal(reader.pool.array[6], content(geometry)[5])


def test_a_dropped_fetch_stops_at_once(transfer):
    geometry = of(BIG, transfer)
    with Source(geometry) as source, Reader(geometry) as reader:
        everything = list(range(64))
        for delay_s in (0.0, 0.001, 0.004, 0.01):
            first, second = (reader.begin(source.instance, everything, everything) for _ in range(2))
            time.sleep(delay_s)
            reader.drop(first, second)
            ends = [reader.end(), reader.end()]
            assert sorted(end.id for end in ends) == [first, second]
            assert all(end.dropped or not end.error for end in ends), "they end by the drop"
            reader.pool.array[:] = 9
            time.sleep(0.05)
            assert (reader.pool.array == 9).all()
        assert reader.fetch(source.instance, [5], [6]).error == ""


def test_a_drop_while_the_source_hangs():
    geometry = of(BIG, "tcp")
    with Source(geometry) as source, Reader(geometry) as reader:
        source.stop()
        id_ = reader.begin(source.instance, [1], [1])
        time.sleep(0.1)
        reader.drop(id_)
        assert reader.end().dropped, "by the drop, not by the silence of the source"


def test_a_source_that_hangs_delays_no_other():
    geometry = of(BIG, "tcp")
    with Source(geometry) as bad, Source(geometry) as good, Reader(geometry) as reader:
        bad.stop()
        stuck = [reader.begin(bad.instance, [1], [1]) for _ in range(5)]
        id_ = reader.begin(good.instance, list(range(10)), list(range(10)))
        found = reader.end()
        assert (found.id, found.error) == (id_, ""), "it is over before those that began before it"
        reader.drop(*stuck)
        assert all(reader.end().dropped for _ in stuck)


def test_the_reader_dies(transfer):
    """The source serves others, and keeps nothing of the dead one."""
    geometry = of(BIG, transfer)
    code = (
        "import sys, msgspec\n"
        "from tests.transfer.pools import *\n"
        "geometry = msgspec.json.decode(sys.argv[1], type=Geometry)\n"
        "source = msgspec.json.decode(sys.argv[2], type=InstanceSource)\n"
        "reader = Reader(geometry)\n"
        "print('fetching', flush=True)\n"
        "while True:\n"
        "    reader.fetch(source, list(range(64)), list(range(64)))\n"
    )
    with Source(geometry) as source:
        before = source.descriptors()
        arguments = [msgspec.json.encode(thing).decode() for thing in (geometry, source.instance)]
        for _ in range(3):
            dying = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE)
            dying.stdout.readline()
            time.sleep(0.05)
            dying.send_signal(signal.SIGKILL)
            dying.wait(60)
            dying.stdout.close()
        slack = 8 if transfer == "nixl" else 0  # UCX closes the sockets of the dead when it likes
        wait_until(lambda: source.descriptors() <= before + slack)
        with Reader(geometry) as reader:
            assert reader.fetch(source.instance, [5], [6]).error == ""


@pytest.mark.parametrize("transfer", ["shared_memory", "tcp"])
def test_a_page_that_changes_while_it_is_copied_is_noticed(transfer):
    geometry = of(BIG, transfer, checksums=True)
    with Source(geometry) as still, Reader(geometry) as reader:
        everything = list(range(64))
        assert reader.fetch(still.instance, everything, everything).error == ""
        assert np.array_equal(reader.pool.array, content(geometry))
        with Source(of(geometry, transfer, scribble=True)) as source:
            errors = {reader.fetch(source.instance, everything, everything).error for _ in range(20)}
        assert any("differ" in error or "checksum" in error for error in errors)


def test_no_transport_reaches_a_source_on_another_host():
    geometry = of(Geometry(), "shared_memory")
    with Source(geometry) as source, Reader(geometry) as reader:
        elsewhere = [msgspec.structs.replace(one, host="other") for one in source.instance.ranks]
        there = msgspec.structs.replace(source.instance, ranks=elsewhere)
        assert "another host" in reader.fetch(there, [1], [1]).error


def test_automatic_choice_falls_back_to_tcp():
    geometry = of(Geometry(), "auto")
    with Source(geometry) as source, Reader(geometry) as reader:
        rank = source.instance.ranks[0]
        pid, fd, device, inode = rank.shared_memory.split(":")
        for changes in (
            {"host": "other"},
            {"shared_memory": f"{pid}:{fd}:{device}:{int(inode) + 1}"},
            {"shared_memory": f"{pid}:{int(fd) + 200}:{device}:{inode}"},
            {"shared_memory": "nonsense"},
            {},
        ):
            there = msgspec.structs.replace(source.instance, ranks=[msgspec.structs.replace(rank, **changes)])
            reader.pool.array[:] = 0
            assert reader.fetch(there, [5], [6]).error == ""
            assert np.array_equal(reader.pool.array[6], content(geometry)[5])
        assert reader.service._transports[1]._pipes  # a connection was used


@pytest.mark.parametrize("transfer", ["shared_memory", "tcp"])
def test_another_process_at_the_same_place_is_not_the_source(transfer):
    """Neither a reused address nor a reused process id: the pages of the old one are gone."""
    geometry = of(Geometry(), transfer)
    other = of(geometry, transfer, grant=b"of other readers")
    with Source(geometry) as old, Source(other) as new, Reader(geometry) as reader:
        was, is_ = old.instance.ranks[0], new.instance.ranks[0]
        memory = ":".join([*is_.shared_memory.split(":")[:2], *was.shared_memory.split(":")[2:]])
        mixed = msgspec.structs.replace(was, tcp=was.tcp and is_.tcp, shared_memory=memory)
        there = msgspec.structs.replace(old.instance, ranks=[mixed])
        assert "another" in reader.fetch(there, [1], [1]).error
        assert not reader.pool.array.any()
        assert os.path.exists(f"/proc/{new.process.pid}")


def test_a_name_of_nonsense_fails_its_fetch_and_nothing_else():
    geometry = of(Geometry(), "shared_memory")
    with Source(geometry) as source, Reader(geometry) as reader:
        rank = source.instance.ranks[0]
        for name in ("9" * 30 + ":1:1:1", "-1:1:1:1", "0:0:0:0", "a:b", "1:" + "9" * 30 + ":1:1"):
            wrong = msgspec.structs.replace(rank, shared_memory=name, tcp="")
            there = msgspec.structs.replace(source.instance, ranks=[wrong])
            assert reader.fetch(there, [1], [1]).error, name
        assert reader.fetch(source.instance, [1], [1]).error == ""
