"""A prompt computed on a device that delays, gone on with on another one: pages through mirrors in main
memory."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from baton.engine.handover.reservation import _incompatible
from baton.executor.base import StepBatch, StepResult
from baton.executor.streams.mirror import shown_by
from baton.executor.torch_executor import TorchExecutor
from baton.executor.torch_late import LateTorchExecutor
from baton.launch.planning.instance_config import instance_config
from baton.model.attention import AttentionShape, CpuAttention, TorchAttention
from baton.protocol.codec import pack_int32
from baton.protocol.config import InstanceConfig
from baton.protocol.messages.commands import DropFetch, Fetch, Grant
from baton.protocol.messages.handover import InstanceSource, PoolSource
from baton.protocol.messages.reports import Fetched
from baton.protocol.params.sampling import Sampling
from baton.transfer import fetcher
from baton.transfer.service import TransferService
from tests.conftest import GENEROUS_S
from tests.executor.delayed import DelayedEvent, DelayedQueue, on_a_delayed_device
from tests.executor.driver import Driver
from tests.model.checkpoints import VOCAB, make_checkpoint

CPU = torch.device("cpu")
DEADLINE_S = 60.0
SIZES = dict(max_model_len=64, block_size=4, num_blocks=24, max_num_seqs=4)
PROMPT = np.random.default_rng(7).integers(3, VOCAB, 23).tolist()
TOKEN = b"of this request."
SAMPLED = Sampling(seed=5, temperature=0.8, top_p=0.95)


class Overlapped:
    """A late executor as one that waits: what is launched is collected."""

    def __init__(self, executor: LateTorchExecutor) -> None:
        self.executor = executor
        self.info, self.admit, self.release = executor.info, executor.admit, executor.release

    def execute(self, batch: StepBatch) -> StepResult:
        self.executor.launch(batch)
        return self.executor.collect()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path, "llama3")
    return tmp_path


@pytest.fixture
def pair(directory: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """Two executors on two devices, and their transfers."""
    found = []
    transfer = getattr(request, "param", "shared_memory")
    changes = dict(peer_endpoint="ipc://unused", transfer=transfer)
    reports: queue.Queue[Any] = queue.Queue()
    for _ in range(2):
        device = DelayedQueue(eager=1.0)  # (while it is made)
        executor = on_a_delayed_device(
            monkeypatch, directory, device, graphs=False, mirrored=True, **SIZES, **changes
        )
        for each in (device, *device.others):
            each.eager = 0.0
        executor._pool.tensor.fill_(float("nan"))
        config = instance_config(model=str(directory), dtype="float32", speculation=None, **SIZES, **changes)
        found.append((executor, TransferService(0, executor.pool, config, reports.put)))
    for _, service in found:
        service.start()
    yield *found, reports
    for executor, service in found:
        service.close()
        executor.close()


def expected(directory: Path, count: int) -> list[int]:
    config: InstanceConfig = instance_config(
        model=str(directory), dtype="float32", speculation=None, num_threads=1, **SIZES
    )
    executor = TorchExecutor.from_config(config, 0, "")
    driver = Driver(executor)
    request = driver.add(PROMPT, count, SAMPLED)
    driver.run()
    executor.close()
    return request.tokens


def source_of(executor: LateTorchExecutor, service: TransferService) -> InstanceSource:
    assert service.source is not None
    return InstanceSource(executor.info.tile, SIZES["block_size"], [service.source])


def go_on(pair: Any, count: int, fetches: list[tuple[int, int]]) -> list[int]:
    """P computes the prompt, D fetches these layers (first, number) and goes on."""
    (at_p, ours), (at_d, theirs), reports = pair
    prefill = Driver(Overlapped(at_p), chunk=9)
    decode = Driver(Overlapped(at_d), seed=5)
    first = prefill.add(PROMPT, 1, SAMPLED)
    prefill.run()
    request = decode.add(PROMPT, count, SAMPLED, generated=first.tokens)
    request.blocks = [int(decode.free.pop()) for _ in first.blocks]
    pages = pack_int32(first.blocks), pack_int32(request.blocks)
    ours.grant(Grant(TOKEN, "d", [b""], pack_int32(first.blocks), DEADLINE_S))
    for number, (layer, layers) in enumerate(fetches):
        theirs.fetch(Fetch(number, source_of(at_p, ours), *pages, layer, layers, grant=TOKEN))
    for _ in fetches:
        report = reports.get(timeout=DEADLINE_S)
        assert isinstance(report, Fetched)
        assert not report.error, report.error
    request.computed = len(PROMPT)
    decode.run()
    return request.tokens


@pytest.mark.parametrize("pair", ["shared_memory", "tcp"], indirect=True)
@pytest.mark.parametrize("fetches", [[(0, -1)], [(0, 2), (2, -1)]], ids=["whole", "layer by layer"])
def test_a_request_goes_on_from_pages_that_were_on_a_device(pair, fetches, directory, monkeypatch):
    tokens = go_on(pair, 9, fetches)
    monkeypatch.undo()
    assert tokens == expected(directory, 9)


def test_pages_that_did_not_land_are_not_there(pair, directory, monkeypatch):
    """That the tests before would see it."""

    def land(blocks: np.ndarray, first: int, layers: int) -> DelayedEvent:
        event = DelayedEvent(DelayedQueue())
        event.recorded = True
        return event

    (_, _), (_, theirs), _ = pair
    monkeypatch.setattr(theirs._fetcher, "_pool", replace(theirs._fetcher._pool, land=land))
    tokens = go_on(pair, 9, [(0, -1)])
    monkeypatch.undo()
    assert tokens != expected(directory, 9)


def test_pages_whose_landing_is_recorded_before_they_are_copied_are_not_there(pair, directory, monkeypatch):
    """That the tests before would see it."""
    (_, _), (_, theirs), _ = pair
    pool = theirs._fetcher._pool

    def land(blocks: np.ndarray, first: int, layers: int) -> DelayedEvent:
        event = pool.land(blocks, first, layers)
        copy = event.queue.works.pop()
        event.queue.works.append(lambda: (event.record(), copy()))
        return event

    monkeypatch.setattr(theirs._fetcher, "_pool", replace(pool, land=land))
    tokens = go_on(pair, 9, [(0, -1)])
    monkeypatch.undo()
    assert tokens != expected(directory, 9)


class Landing:
    """A fetch whose pages are in main memory, of a device that does not take them."""

    def __init__(self, pair: Any) -> None:
        (self.at_p, ours), (at_d, self.theirs), self.reports = pair
        self.device = at_d._pool.mirror._inwards
        self.device.hangs = True
        driver = Driver(Overlapped(self.at_p), chunk=9)
        first = driver.add(PROMPT, 1, SAMPLED)
        driver.run()
        self.pages = pack_int32(first.blocks)
        self.blocks = np.arange(3, 3 + len(first.blocks), dtype=np.int32)
        self.pool = at_d._pool.tensor
        self.source = source_of(self.at_p, ours)
        ours.grant(Grant(TOKEN, "d", [b""], self.pages, DEADLINE_S))
        self.fetch(1)
        self.wait_for(lambda: self.device.works)

    def fetch(self, number: int, **changes: Any) -> None:
        command = Fetch(number, self.source, self.pages, pack_int32(self.blocks), 1, 2, grant=TOKEN)
        self.theirs.fetch(msgspec.structs.replace(command, **changes))

    def wait_for(self, happened: Callable[[], Any]) -> None:
        deadline = time.monotonic() + GENEROUS_S
        while not happened():
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def report(self) -> Fetched:
        report = self.reports.get(timeout=GENEROUS_S)
        assert isinstance(report, Fetched)
        return report

    def is_heard_while_the_device_hangs(self) -> None:
        """Nothing is said of the fetch, whose blocks are still to be written; others go on."""
        self.fetch(2, pages=b"no whole number")
        report = self.report()
        assert (report.id, "pages of the fetch" in report.error) == (2, True)
        assert self.reports.empty()
        assert self.pool[self.blocks].isnan().all()

    def is_over_when_the_device_is_done(self) -> Fetched:
        self.device.hangs = False
        report = self.report()
        assert report.id == 1
        assert not self.device.works, "it may write when others have the blocks"
        assert not self.pool[self.blocks][:, 1:3].isnan().any()
        assert self.pool[self.blocks][:, :1].isnan().all()
        assert self.theirs._fetcher.under_way == 0
        return report


def test_a_fetch_that_is_dropped_while_it_lands_is_over_when_the_device_is_done(pair):
    landing = Landing(pair)
    landing.theirs.drop(DropFetch([1]))
    landing.is_heard_while_the_device_hangs()
    assert landing.is_over_when_the_device_is_done().dropped


def test_a_device_that_does_not_take_pages_fails_their_fetch_and_keeps_their_blocks(
    pair, monkeypatch, caplog
):
    monkeypatch.setattr(fetcher, "LANDS_S", 0.01)
    landing = Landing(pair)
    said = f"the device has not taken {len(landing.blocks)} pages within 0.01 s"
    landing.wait_for(lambda: f"fetch 1 failed: {said}" in caplog.text)
    landing.is_heard_while_the_device_hangs()
    assert len(landing.theirs._fetcher._lanes) == 0, "others from the same source need not wait"
    report = landing.is_over_when_the_device_is_done()
    assert (report.error, report.dropped) == (said, False)


def test_a_device_that_hangs_does_not_keep_the_transfer_thread(pair, monkeypatch, caplog):
    monkeypatch.setattr(fetcher, "LEAVES_S", 0.01)
    landing = Landing(pair)
    landing.theirs.close()
    assert not landing.theirs._thread.is_alive()
    assert "the device has not taken pages within 0.01 s" in caplog.text
    assert landing.reports.empty()


def test_what_a_step_shows():
    tables = np.arange(40, dtype=np.int32).reshape(4, 10)

    def ints(*values: int) -> np.ndarray:
        return np.array(values, np.int32)

    # Fills a block; does not; a piece of a prompt; the end of one, whose last block is not full.
    batch = StepBatch(
        1,
        ints(0, 1, 2, 3),
        starts=ints(7, 8, 2, 4),
        counts=ints(1, 1, 9, 9),
        tokens=np.zeros(20, np.int32),
        samples=np.array([True, True, False, True]),
        block_tables=tables,
        num_decodes=2,
    )
    assert shown_by(batch, 4).tolist() == [1, 20, 21, 31, 32, 33]


@pytest.mark.parametrize("kv_int8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_instance_on_a_cpu_and_one_on_a_gpu_refuse_each_others_pages(dtype, kv_int8):
    """By the names of their tiles: kernels of CPUs lay them out otherwise."""
    shape = AttentionShape(2, 4, 2, 64, 16, 0.125, frozenset({None}), dtype, CPU, kv_int8)
    rows, kernels = TorchAttention(shape).tile_name, CpuAttention.tile_name.fget
    on_cpu = kernels(SimpleNamespace(shape=shape))
    assert rows.startswith("rows:")
    source = PoolSource(0, "", 8, 4096, 2, 2, 0, 2)
    here, there = InstanceSource(rows, 16, [source]), InstanceSource(on_cpu, 16, [source])
    assert _incompatible(here, there) == f"tile is {on_cpu!r} there and {rows!r} here"
    assert _incompatible(here, here) == ""
