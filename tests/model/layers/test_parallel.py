"""What several ranks add up, gather and tell each other: in memory that they share, and by gloo."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.model.cpu.library import rank_functions
from baton.model.layers import shared_ranks
from baton.model.layers.parallel import TensorParallel
from baton.model.layers.shared_ranks import SharedRanks

SHARED = pytest.mark.skipif(rank_functions() is None, reason="the native library is not built")
WAYS = [pytest.param("shared memory", marks=SHARED), "gloo"]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "gloo":
        monkeypatch.setattr(shared_ranks, "rank_functions", lambda: None)
    found: str = request.param
    return found


def together(size: int, directory: Path, work: Callable[[TensorParallel], object]) -> list[object]:
    """What `work` returns on each rank, a thread each."""
    found: list[object] = [None] * size

    def run(rank: int) -> None:
        parallel = TensorParallel.connect(rank, size, str(directory / "meet"), "cpu", 60)
        try:
            found[rank] = work(parallel)
        except Exception as error:
            found[rank] = error
        finally:
            parallel.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    for one in found:
        if isinstance(one, Exception):
            raise one
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_sum_does_not_depend_on_what_is_summed_beside_it(
    size: int, dtype: torch.dtype, way: str, tmp_path: Path
) -> None:
    parts = torch.randn(size, 50, 64).to(dtype)
    pieces = (slice(0, 50), slice(0, 1), slice(7, 8), slice(7, 20), slice(3, 49))

    def work(parallel: TensorParallel) -> list[Tensor]:
        assert (parallel._shared is None) == (way == "gloo")
        return [parallel.all_reduce(parts[parallel.rank, piece].clone()) for piece in pieces]

    found = together(size, tmp_path, work)
    whole = found[0][0]
    torch.testing.assert_close(whole.float(), parts.float().sum(0), atol=0.1, rtol=0.02)
    for sums in found:
        for piece, part in zip(pieces, sums, strict=True):
            assert torch.equal(part, whole[piece])


@SHARED
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_shared_memory_gives_the_bits_of_gloo(
    size: int, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_ranks, "_SLOT", 1 << 14)
    monkeypatch.setattr(shared_ranks, "_AT_ONCE", 1 << 11)
    parts = torch.randn(size, 30_000).to(dtype)

    def work(parallel: TensorParallel) -> list[Tensor]:
        return [parallel.all_reduce(parts[parallel.rank, :count].clone()) for count in (30_000, 1, 4_097)]

    shared = together(size, tmp_path, work)
    monkeypatch.setattr(shared_ranks, "rank_functions", lambda: None)
    (tmp_path / "meet").unlink(missing_ok=True)
    for ours, theirs in zip(shared, together(size, tmp_path, work), strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_collectives_of_all_kinds_one_after_another(
    size: int, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many sizes, with ranks that come late by turns: what is in a slot is read before it is written."""
    monkeypatch.setattr(shared_ranks, "_SLOT", 1 << 12)
    monkeypatch.setattr(shared_ranks, "_AT_ONCE", 1 << 9)

    def work(parallel: TensorParallel) -> None:
        plan, late = random.Random(5), random.Random(parallel.rank)
        ranks = range(size)
        for turn in range(300):
            if late.random() < 0.1:
                time.sleep(late.random() / 500)
            kind = plan.choice(("sum", "sum", "sum", "lowest", "broadcast", "gather"))
            dtype = plan.choice((torch.float32, torch.bfloat16, torch.int64))
            rows, width = plan.choice(((1, 1), (1, 700), (3, 50), (40, 90), (2, 5_000)))

            def of(rank: int) -> Tensor:
                count = rows * width  # noqa: B023 (called in this turn)
                base = torch.arange(count).view(rows, width) % 7  # noqa: B023
                return (base + 3 * rank + turn % 5).to(dtype)  # noqa: B023

            mine = of(parallel.rank)
            if kind == "sum":
                assert torch.equal(parallel.all_reduce(mine), sum(map(of, ranks)))
            elif kind == "broadcast":
                assert torch.equal(parallel.broadcast(mine), of(0))
            elif kind == "gather":
                found = parallel.gather_columns(mine)
                assert (found is None) == (parallel.rank > 0)
                if found is not None:
                    assert torch.equal(found, torch.cat([of(rank) for rank in ranks], -1))
            else:
                few = torch.tensor([turn + parallel.rank, turn - parallel.rank])
                assert parallel.lowest(few).tolist() == [turn, turn - size + 1]
                assert parallel.minimum(7 + parallel.rank) == 7

    together(size, tmp_path, work)


@SHARED
def test_if_one_rank_cannot_map_the_memory_all_meet_by_gloo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_ = SharedRanks._open.__func__

    def open_unless_last(cls: type, path: str, rank: int, *given: object) -> SharedRanks | None:
        return None if rank == 2 else open_(cls, path, rank, *given)

    monkeypatch.setattr(SharedRanks, "_open", classmethod(open_unless_last))

    def work(parallel: TensorParallel) -> int:
        assert parallel._shared is None
        return parallel.minimum(parallel.rank + 4)

    assert together(3, tmp_path, work) == [4, 4, 4]


def _one_rank(rank: int, path: str, timeout_s: float, pipe: Connection) -> None:
    parallel = TensorParallel.connect(rank, 2, path, "cpu", timeout_s)
    pipe.send(parallel.all_reduce(torch.ones(3)).tolist())
    pipe.recv()
    try:
        parallel.all_reduce(torch.ones(3))
    except RuntimeError as error:
        pipe.send(repr(error))


@SHARED
@pytest.mark.parametrize("dies", [True, False], ids=["dies", "does not come"])
def test_a_rank_that_waits_for_another_says_why_it_stops(dies: bool, tmp_path: Path) -> None:
    """In processes of their own, one of which is killed, or stays away."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        for rank in range(2):
            ours, theirs = context.Pipe()
            arguments = rank, str(tmp_path / "meet"), 60.0 if dies else 1.0, theirs
            processes.append(context.Process(target=_one_rank, args=arguments))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        for pipe in pipes:
            assert pipe.poll(100)
            assert pipe.recv() == [2.0, 2.0, 2.0]
        pipes[0].send("go on")
        if dies:
            assert not pipes[0].poll(0.2)
            os.kill(processes[1].pid, signal.SIGKILL)
        assert pipes[0].poll(50)
        assert pipes[0].recv() == (
            "PeerDied('the process of rank 1 died while this rank waited for its part of a sum')"
            if dies
            else "RuntimeError('rank 1 did not come to what the ranks compute together within 1 s')"
        )
    finally:
        for process in processes:
            process.kill()
            process.join()
        for pipe in pipes:
            pipe.close()


@SHARED
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("other", ["kind", "size", "large"])
def test_ranks_that_compute_different_things_are_told(size: int, other: str, tmp_path: Path) -> None:
    """No rank goes on with nonsense."""

    def work(parallel: TensorParallel) -> str:
        for _ in range(5):
            parallel.all_reduce(torch.ones(3))
        odd = parallel.rank == 1
        collective = parallel.broadcast if odd and other == "kind" else parallel.all_reduce
        count = (30_000 if other == "large" else 3) + (odd and other != "kind")
        with pytest.raises(RuntimeError, match="ranks must compute the same") as told:
            collective(torch.ones(count))
        return str(told.value)

    found = together(size, tmp_path, work)
    assert str(found[0]).startswith("rank 1 computes something else than rank 0:")


@SHARED
def test_nothing_stays_open(tmp_path: Path) -> None:
    def work(parallel: TensorParallel) -> None:
        parallel.all_reduce(torch.ones(5))

    def mapped() -> int:
        gc.collect()  # (other tests' failures hold what they saw)
        return Path("/proc/self/maps").read_text().count("memfd:baton-ranks")

    together(3, tmp_path, work)
    (tmp_path / "meet").unlink(missing_ok=True)
    before = mapped(), len(os.listdir("/proc/self/fd"))
    together(3, tmp_path, work)
    assert (mapped(), len(os.listdir("/proc/self/fd"))) == before
