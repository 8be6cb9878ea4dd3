"""The KV cache's share of a device's memory, by numbers; a device is not needed for that."""

from __future__ import annotations

import pytest
import torch

from baton.executor.devices import memory
from baton.executor.devices.memory import (
    Taken,
    check_free,
    chunks_of,
    kv_budget,
    largest_step,
    taken_at_start,
)
from baton.executor.devices.sizes import num_blocks_of, sizes_itself
from baton.executor.torch_executor import TorchExecutor
from baton.executor.weights.forms import ExecutorError
from baton.launch.planning.instance_config import instance_config
from baton.model.checkpoint.hub import EMBEDDED_MODEL, resolve_model

GB = 10**9


def test_the_pool_has_what_the_others_leave_of_the_share():
    taken = Taken(total=80 * GB, free=50 * GB, peak=20 * GB, reserved=17 * GB, before=10 * GB)
    # 30 are taken: 10 by others, 17 by PyTorch, so 3 beside it; of the 72, 20 and 3 are used.
    assert kv_budget(taken, 0.9, 1) == 49 * GB
    assert kv_budget(taken, 0.9, 2) == 36 * GB - 20 * GB - (1 << 30)
    assert kv_budget(Taken(80 * GB, 60 * GB, 75 * GB, 10 * GB, 0), 0.9, 1) < 0


def test_a_share_that_is_not_free_is_refused():
    config = instance_config(model="m", max_model_len=64, gpu_memory_utilization=0.5)
    check_free(config, 40 * GB, 80 * GB)
    with pytest.raises(ExecutorError, match=r"gpu_memory_utilization 0.5: that is 40.0 GB, but only 39.0 GB"):
        check_free(config, 41 * GB, 80 * GB)


def test_a_share_that_a_killed_process_still_has_is_waited_for(monkeypatch: pytest.MonkeyPatch):
    config = instance_config(model="m", max_model_len=64, gpu_memory_utilization=0.9, device="cuda")
    device, now, free = torch.device("cuda", 1), [0.0], {0.0: 3 * GB, 0.5: 40 * GB, 1.2: 79 * GB}
    used = []

    def info(of: torch.device) -> tuple[int, int]:
        assert used == [of] == [device]
        return free[max(at for at in free if at <= now[0])], 80 * GB

    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    monkeypatch.setattr(torch.cuda, "mem_get_info", info)
    monkeypatch.setattr(memory.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(memory.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    assert taken_at_start(config, device) == 1 * GB
    assert 1.2 <= now[0] < 1.4
    free[1.2], now[0], used[:] = 71 * GB, 0.0, []
    with pytest.raises(ExecutorError, match=r"only 71.0 GB of the device are free"):
        taken_at_start(config, device)
    assert 10 <= now[0] < 11


def test_products_of_float32_are_not_those_of_tf32(monkeypatch: pytest.MonkeyPatch):
    """Which the environment of NVIDIA's containers makes of them."""
    config = instance_config(model="m", max_model_len=64, device="cuda", num_blocks=4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (79 * GB, 80 * GB))
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        taken_at_start(config, torch.device("cpu"))
        assert torch.get_float32_matmul_precision() == "high"
        taken_at_start(config, torch.device("cuda", 0))
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.set_float32_matmul_precision(before)


def test_the_largest_step_has_all_rows_and_all_tokens():
    config = instance_config(model="m", max_model_len=64, max_num_seqs=3, max_num_batched_tokens=100)
    assert chunks_of(config).tolist() == [34, 33, 33]
    short = instance_config(model="m", max_model_len=16, max_num_seqs=3, max_num_batched_tokens=100)
    assert chunks_of(short).tolist() == [16, 16, 16]


def test_it_is_computed_and_leaves_nothing():
    sizes = dict(max_model_len=64, num_blocks=8, max_num_seqs=2, max_num_batched_tokens=40, num_threads=1)
    config = instance_config(model=str(resolve_model(EMBEDDED_MODEL)), block_size=16, **sizes)
    assert not sizes_itself(config)
    executor = TorchExecutor.from_config(config, 0, "")
    model, pool = executor._model, executor._pool.tensor
    largest_step(config, model)
    assert len(model.backend.pool) == 0
    model.backend.bind(pool)
    assert not torch.count_nonzero(pool)
    executor.close()


def test_no_room_for_one_request_names_the_flag():
    sizes = dict(max_model_len=64, max_num_seqs=2, num_threads=1)
    config = instance_config(model=str(resolve_model(EMBEDDED_MODEL)), block_size=16, **sizes)
    executor = TorchExecutor.from_config(config, 0, "")
    backend = executor._model.backend
    assert num_blocks_of(config, backend, measured=5 * backend.block_bytes) == 5
    with pytest.raises(ExecutorError, match="more --gpu-memory-utilization"):
        num_blocks_of(config, backend, measured=3 * backend.block_bytes)
    executor.close()
