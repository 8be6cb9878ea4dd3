"""The torch executor's own duties: the pool, bf16, defaults, errors, clean-up."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.executor.base import StepBatch, StepResult
from baton.executor.devices import sizes
from baton.executor.kv_pool import KvPool, available_memory
from baton.executor.loading import create_executor
from baton.executor.results import prompt_logprobs
from baton.executor.streams import queue as queues
from baton.executor.torch_executor import ExecutorError, TorchExecutor
from baton.model.checkpoint.config import ModelNotFound, UnsupportedModel
from baton.protocol.params.sampling import Sampling, Stopping
from tests.executor.driver import Driver
from tests.executor.test_torch_parity import BLOCK, config_for, prompt_of, same_in_a_crowd
from tests.model.checkpoints import VOCAB, make_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3")
    make_checkpoint(directory, "qwen3")
    return directory


def test_bfloat16_stays_near_float32(checkpoint: Path) -> None:
    found = {}
    for dtype in ("float32", "bfloat16"):
        executor = create_executor(config_for(checkpoint, dtype=dtype), 0, "")
        driver = Driver(executor, chunk=13)
        wanted = Sampling(0, 0.0, prompt_logprobs=0)
        request = driver.add(prompt_of(50), 8, wanted)
        driver.add(prompt_of(9), 8)
        driver.run()
        assert all(0 <= token < VOCAB for token in request.tokens)
        found[dtype] = np.array([report.logprob for report in request.prompt_logprobs])
        executor.close()
    difference = np.abs(found["float32"] - found["bfloat16"])
    assert 1e-6 < difference.mean() < 0.2


def test_the_same_request_gives_the_same_tokens_in_any_batch(checkpoint: Path) -> None:
    executor = create_executor(config_for(checkpoint), 0, "")
    wanted = Sampling(7, temperature=0.8, top_p=0.9, top_k=30, repetition_penalty=1.1)
    alone = Driver(executor)
    first = alone.add(prompt_of(20), 40, wanted)
    alone.run()
    alone.remove(first)
    crowd = Driver(executor, chunk=7, seed=1)
    others = [
        crowd.add(prompt_of(10 + 9 * index, index), 25, Sampling(index, top_k=index)) for index in range(5)
    ]
    crowd.step()
    again = crowd.add(prompt_of(20), 40, wanted)
    crowd.run()
    assert again.tokens == first.tokens
    assert all(len(other.tokens) == 25 for other in others)
    executor.close()


def test_requested_logprobs_only(checkpoint: Path) -> None:
    executor = create_executor(config_for(checkpoint), 0, "")
    driver = Driver(executor)
    silent = driver.add(prompt_of(5), 3)
    some = driver.add(prompt_of(6), 3, Sampling(1, logprobs=2, prompt_logprobs=1))
    driver.run()
    assert silent.logprobs == silent.prompt_logprobs == []
    assert [len(report.top) for report in some.logprobs] == [2, 2, 2]
    assert [report.token for report in some.logprobs] == some.tokens
    assert [len(report.top) for report in some.prompt_logprobs] == [1] * 5
    executor.close()


def test_long_prompt_logprobs_are_computed_in_parts(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for size in (64 << 20, 5 * 4 * VOCAB):
        monkeypatch.setattr(prompt_logprobs, "_CHUNK_BYTES", size)
        executor = create_executor(config_for(checkpoint), 0, "")
        driver = Driver(executor)
        request = driver.add(prompt_of(43), 1, Sampling(0, 0.0, prompt_logprobs=3))
        driver.run()
        found.append([(report.token, report.rank) for report in request.prompt_logprobs])
        executor.close()
    assert found[0] == found[1]
    assert len(found[0]) == 42


def test_the_pool_is_readable_through_its_descriptor_and_blocks_hold_nothing_old(checkpoint: Path) -> None:
    config = config_for(checkpoint, num_blocks=6, peer_endpoint="ipc://*")
    executor = TorchExecutor.from_config(config, 0, "")
    info, pool = executor.info, executor.pool
    assert pool.fd is not None
    with mmap.mmap(pool.fd, 0, prot=mmap.PROT_READ) as memory:
        assert len(memory) == info.num_blocks * info.block_bytes
        assert not any(memory[:])  # the warm-up left nothing
        floats = np.frombuffer(pool.memory, np.float32)
        floats[:] = np.nan  # what an earlier request could have left
        driver = Driver(executor)
        request = driver.add(prompt_of(BLOCK + 3), 2)
        clean = driver.add(prompt_of(3), 20)
        driver.run()
        shape = (info.num_blocks, pool.num_layers, 2, pool.kv_heads, -1)
        tiles = np.frombuffer(memory, np.float32).reshape(shape)[request.blocks[1]]
        page = tiles.reshape(*tiles.shape[:-1], BLOCK, -1).copy()  # positions, then elements
        if info.tile.startswith("lanes"):  # keys have elements first
            page[:, 0] = tiles[:, 0].reshape(*tiles[:, 0].shape[:-1], -1, BLOCK).swapaxes(-1, -2)
        written = len(request.all_tokens) - 1 - BLOCK
        assert np.abs(page[..., :written, :]).min() > 0
        assert np.array_equal(page[..., written:, :], np.zeros_like(page[..., written:, :]))
        assert len(set(clean.tokens)) > 1
        del tiles
    executor.close()
    assert executor.pool.fd is None
    assert executor.pool.memory is None


def test_block_bytes_and_detail(checkpoint: Path) -> None:
    executor = TorchExecutor.from_config(config_for(checkpoint, dtype="bfloat16"), 0, "")
    info = executor.info
    assert info.block_bytes == 3 * 2 * 2 * BLOCK * 32 * 2  # layers, K/V, heads, positions, head_dim, bytes
    assert (info.num_blocks, info.block_size, info.vocab_size) == (200, BLOCK, VOCAB)
    assert "bfloat16" in info.tile
    for word in ("bfloat16", "1 threads", "MB", "200 blocks"):
        assert word in info.detail
    assert ("a step is one native call" in info.detail) == executor._model.is_program
    assert ("in PyTorch: " in info.detail) != executor._model.is_program
    executor.close()


def test_attention_of_pytorch_gives_the_same_tokens(checkpoint: Path) -> None:
    found = []
    for backend in ("auto", "torch"):
        config = config_for(checkpoint, dtype="float32", attention_backend=backend)
        executor = TorchExecutor.from_config(config, 0, "")
        if backend == "torch":
            assert "attention by PyTorch" in executor.info.detail
        driver = Driver(executor, chunk=7)
        request = driver.add(prompt_of(30), 8)
        driver.run()
        found.append(request.tokens)
        executor.close()
    assert found[0] == found[1]


def test_a_step_without_tokens_is_over_when_it_is_told_of(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages may be fetched then, straight from a device's memory, and nothing was read from there."""
    executor = TorchExecutor.from_config(config_for(checkpoint), 0, "")
    happened: list[str] = []
    monkeypatch.setattr(queues, "synchronize", lambda device: happened.append(device.type))
    run = executor._run
    monkeypatch.setattr(executor, "_run", lambda *given: happened.append("launched") or run(*given))
    driver = Driver(executor, chunk=7)
    request = driver.add(prompt_of(20), 1)
    driver.step()
    assert not request.tokens
    assert happened == ["launched", "cpu"]
    executor.close()


def test_the_pool_in_eight_bits(checkpoint: Path) -> None:
    """A byte a number and four for the scale of each position and KV head: more blocks of the same memory."""
    pool = {"num_blocks": None, "kv_cache_memory_bytes": 1 << 20}
    block_bytes = {}
    for kind in (None, "int8"):
        executor = TorchExecutor.from_config(config_for(checkpoint, kv_cache_dtype=kind, **pool), 0, "")
        block_bytes[kind] = executor.info.block_bytes
        assert executor.info.num_blocks == (1 << 20) // block_bytes[kind]
        assert ("int8" in executor.info.tile) == ("int8" in executor.info.detail) == (kind == "int8")
        assert executor.pool.block_bytes == block_bytes[kind]
        same_in_a_crowd(executor)
        executor.close()
    assert block_bytes == {None: 3 * 2 * 2 * BLOCK * 32 * 4, "int8": 3 * 2 * 2 * BLOCK * (32 + 4)}


def test_sizes_of_the_pool(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def blocks(**changes) -> int:
        executor = create_executor(config_for(checkpoint, num_blocks=None, **changes), 0, "")
        executor.close()
        return executor.info.num_blocks

    block_bytes = 3 * 2 * 2 * BLOCK * 32 * 4
    assert blocks(kv_cache_memory_bytes=10 * block_bytes + 5) == 10
    assert blocks(max_num_seqs=3, max_model_len=100) == 3 * 7  # never more than can be used
    with pytest.raises(ExecutorError, match="kv_cache_memory_bytes"):
        blocks(kv_cache_memory_bytes=block_bytes - 1)
    monkeypatch.setattr(sizes, "available_memory", lambda: 100 * block_bytes)
    assert blocks() == 40
    monkeypatch.setattr(sizes, "available_memory", lambda: 10 * block_bytes)
    with pytest.raises(ExecutorError, match="max_model_len 512"):
        blocks()


def test_available_memory_is_plausible() -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < available_memory() <= total


def test_what_cannot_run_says_so(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ExecutorError, match="float16"):
        create_executor(config_for(checkpoint, dtype="float16"), 0, "")
    with pytest.raises(ExecutorError, match="max_model_len 513"):
        create_executor(config_for(checkpoint, max_model_len=513), 0, "")
    with pytest.raises(UnsupportedModel, match="tensor_parallel_size 3"):
        create_executor(config_for(checkpoint, tensor_parallel_size=3), 0, str(tmp_path / "meet"))
    with pytest.raises(ModelNotFound):
        create_executor(config_for(tmp_path), 0, "")
    if not torch.cuda.is_available():
        with pytest.raises(ExecutorError, match="cuda"):
            create_executor(config_for(checkpoint, device="cuda"), 0, "")


def test_layers_are_final_when_they_are_reported(checkpoint: Path) -> None:
    """What the pool holds of a layer when it is reported is what it holds after the step."""
    executor = TorchExecutor.from_config(config_for(checkpoint, num_blocks=6), 0, "")
    pool = executor.pool
    driver = Driver(executor)
    driver.add(prompt_of(BLOCK + 3), 1)
    execute, seen = executor.execute, []

    def execute_and_watch(batch: StepBatch) -> StepResult:
        return execute(batch, lambda layers: seen.append((layers, pool.array()[:, :layers].copy())))

    executor.execute = execute_and_watch  # type: ignore[method-assign, assignment]
    driver.run()
    assert [layers for layers, _ in seen] == list(range(1, pool.num_layers + 1))
    after = pool.array()
    for layers, found in seen:
        assert found.any()
        assert np.array_equal(found, after[:, :layers])
    assert not np.array_equal(seen[0][1], np.zeros_like(seen[0][1]))
    executor.close()


def test_a_token_outside_the_vocabulary_is_refused_at_admission(checkpoint: Path) -> None:
    executor = create_executor(config_for(checkpoint), 0, "")
    for tokens in ([1, VOCAB], [-1, 2]):
        with pytest.raises(ValueError, match="outside the model's vocabulary"):
            executor.admit(0, np.array(tokens, np.int32), 2, Sampling(0), Stopping(1))
    executor.close()


def test_pool_memory_is_given_back() -> None:
    pool = KvPool(64, 2, 2, (16, 64), torch.float32, torch.device("cpu"))
    pool.tensor.fill_(1.0)
    size = 64 * pool.block_bytes

    def mapped() -> int:
        return sum("memfd:baton-kv" in line for line in Path("/proc/self/maps").read_text().splitlines())

    before = mapped()
    assert os.fstat(pool.fd or -1).st_size == size
    pool.close()
    pool.close()
    assert mapped() == before - 1


def test_a_pool_comes_into_use_block_by_block() -> None:
    pool = KvPool(100, 2, 2, (16, 64), torch.float32, torch.device("cpu"))  # blocks of 16 KiB
    pool.tensor[2].fill_(3.0)
    for table in ([], [2, 1], [7, 0], [3, 99], [5]):
        pool.use(np.array(table, np.int32).reshape(1, -1))
    assert (pool.tensor[2] == 3).all()
    assert pool.tensor.sum() == 3 * pool.tensor[0].numel()
    assert pool.view(0, 2).memory is not None
    assert len(pool.view(0, 2).memory or b"") == 100 * pool.block_bytes
    pool.close()


def test_the_worker_pays_for_no_transformers() -> None:
    code = "import sys, baton.executor.torch_executor\nsys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)
