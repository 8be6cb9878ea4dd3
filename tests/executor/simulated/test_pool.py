"""The simulated pool in the shape of a model's: the oracle holds, and each missing piece shows."""

import os

import msgspec
import numpy as np
import pytest

from baton.executor.loading import create_executor
from baton.executor.simulated.executor import SimulatedExecutor, simulated_tokens
from baton.executor.simulated.pool import TokenPool
from baton.launch.planning.instance_config import instance_config
from baton.protocol.config import CostModel
from tests.executor.driver import Driver

VOCAB = 1 << 20
CONFIG = instance_config(
    model="", executor="simulated", max_model_len=256, block_size=8, num_blocks=64, vocab_size=VOCAB
)
PROMPT = [17, 0, 3, 999, 5, 4, 3, 2, 1, 0, VOCAB - 1, 8, 8, 8, 7, 6, 5, 4, 3]


def shaped(**changes):
    return msgspec.structs.replace(CONFIG, **changes)


@pytest.mark.parametrize("block_size", [1, 3, 8])
@pytest.mark.parametrize(
    ("layers", "heads", "tile_bytes", "ranks"), [(1, 1, 0, 1), (3, 4, 0, 2), (2, 2, 64, 1), (4, 2, 0, 4)]
)
def test_every_rank_gives_the_oracles_tokens(layers, heads, tile_bytes, ranks, block_size):
    config = shaped(
        simulated_layers=layers,
        simulated_kv_heads=heads,
        simulated_tile_bytes=tile_bytes,
        tensor_parallel_size=ranks,
        block_size=block_size,
        num_blocks=128,
    )
    for rank in range(ranks):
        executor = create_executor(config, rank, "")
        pool = executor.pool
        assert (pool.num_layers, pool.total_kv_heads, pool.kv_heads) == (
            layers,
            heads,
            max(1, heads // ranks),
        )
        assert pool.block_bytes == executor.info.block_bytes == pool.array()[0].nbytes
        assert pool.tile_bytes >= tile_bytes
        driver = Driver(executor, chunk=7)
        requests = [driver.add(PROMPT[:n], 20) for n in (1, 8, 19)]
        driver.run()
        assert [r.tokens for r in requests] == [simulated_tokens(r.prompt, 20, VOCAB) for r in requests]
        executor.close()


def test_the_smallest_pool_costs_four_bytes_a_token_and_its_tokens_can_be_read():
    pool = TokenPool(4, 8)
    assert pool.view.block_bytes == 32
    positions = np.arange(5)
    pool.write(np.full(5, 2, np.int32), positions, np.array([9, 0, 7, 6, 5], np.int32))
    assert pool.tokens_in(2) == [9, 0, 7, 6, 5, -1, -1, -1]
    assert pool.tokens_in(1) == [-1] * 8


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("part", [0, 1])
def test_a_tile_that_is_missing_or_another_heads_changes_the_tokens(layer, part):
    for heads in (1, 2):
        config = shaped(simulated_layers=3, simulated_kv_heads=heads)
        for head in range(heads):
            executor = SimulatedExecutor.from_config(config)
            driver = Driver(executor)
            request = driver.add(PROMPT, 8)
            driver.step()
            tiles = executor.pool.array()[request.blocks[0], layer, part]
            tiles[head] = tiles[1 - head] if heads == 2 else 0
            driver.run()
            assert request.tokens != simulated_tokens(PROMPT, 8, VOCAB)


def test_layers_are_written_one_after_the_other():
    executor = SimulatedExecutor.from_config(
        shaped(simulated_layers=4, simulated_cost=CostModel(base=0.08), simulated_real_time=True)
    )
    driver, seen = Driver(executor), []
    execute = executor.execute

    def watching(batch):
        return execute(
            batch, lambda n: seen.append((n, executor.pool.array().any(axis=(0, 2, 3, 4)).tolist()))
        )

    executor.execute = watching
    request = driver.add(PROMPT, 1)
    driver.run()
    assert seen == [(n, [layer < n for layer in range(4)]) for n in (1, 2, 3, 4)]
    assert request.tokens == simulated_tokens(PROMPT, 1, VOCAB)


def test_shared_memory_is_given_back():
    before = len(os.listdir("/proc/self/fd"))
    executor = SimulatedExecutor.from_config(CONFIG, shared=True)
    assert os.fstat(executor.pool.fd).st_size == 64 * 32
    descriptor = executor.pool.fd
    executor.close()
    executor.close()
    with pytest.raises(OSError):
        os.fstat(descriptor)
    del executor
    assert len(os.listdir("/proc/self/fd")) == before
    assert SimulatedExecutor.from_config(CONFIG).pool.fd is None
