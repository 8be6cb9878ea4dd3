"""Where a rank computes, on how many threads, and how large its KV pool is."""

from __future__ import annotations

import torch

from baton.executor.kv_pool import available_memory
from baton.executor.weights.forms import ExecutorError
from baton.ipc.processes.cores import usable_cores
from baton.model.attention import AttentionBackend, AttentionShape
from baton.model.checkpoint.config import ModelConfig
from baton.protocol.config import InstanceConfig

_DEFAULT_KV_BYTES = 4 << 30


def device_of(config: InstanceConfig, rank: int) -> torch.device:
    if config.device == "cpu":
        if config.dtype == "float16":
            raise ExecutorError("dtype float16 is not for CPUs; give bfloat16 or float32")
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ExecutorError("device cuda: PyTorch finds no CUDA device here; give --device cpu")
    ranks, devices = config.ranks_per_host, torch.cuda.device_count()
    if ranks > devices:
        raise ExecutorError(
            f"tensor_parallel_size {config.tensor_parallel_size}: {ranks} ranks are on this host, which has "
            f"only {devices} CUDA device{'' if devices == 1 else 's'}; give at most "
            f"{devices * config.nodes.count}"
        )
    return torch.device("cuda", rank % ranks)


def num_threads_of(config: InstanceConfig) -> int:
    if config.num_threads is not None:
        return config.num_threads
    return max(1, usable_cores() // config.ranks_per_host)


def attention_shape(
    config: InstanceConfig, model: ModelConfig, rank: int, dtype: torch.dtype, device: torch.device
) -> AttentionShape:
    first, stop = model.kv_heads_of_rank(rank, config.tensor_parallel_size)
    layers = range(model.num_layers)
    return AttentionShape(
        num_layers=model.num_layers,
        num_heads=model.num_attention_heads // config.tensor_parallel_size,
        num_kv_heads=stop - first,
        head_dim=model.head_dim,
        block_size=config.block_size,
        scale=model.layers[0].attention.scale,
        windows=frozenset(model.window_of(layer, config.max_model_len) for layer in layers),
        dtype=dtype,
        device=device,
        kv_int8=config.kv_cache_dtype == "int8",
        soft_cap=model.layers[0].attention.soft_cap,
        sinks=any(layer.attention.sinks for layer in model.layers),
    )


def sizes_itself(config: InstanceConfig) -> bool:
    """Whether the pool's size is chosen by what is free."""
    return config.num_blocks is None and config.kv_cache_memory_bytes is None


def num_blocks_of(
    config: InstanceConfig,
    backend: AttentionBackend,
    beside: int = 0,
    fixed: int = 0,
    measured: int | None = None,
) -> int:
    """Blocks of the pool; the same on each rank once the smallest is agreed on.  `beside`: bytes that a draft
    model needs for each, and `fixed` for all.  `measured`: what there is on a device
    (`memory.measured_budget`)."""
    if config.num_blocks is not None:
        return config.num_blocks
    size, shape = config.tensor_parallel_size, backend.shape
    block_bytes = backend.block_bytes + beside
    if config.kv_cache_memory_bytes is not None:
        blocks = (config.kv_cache_memory_bytes // size - fixed) // block_bytes
        if blocks < 1:
            raise ExecutorError(
                f"kv_cache_memory_bytes {config.kv_cache_memory_bytes}: one block of {shape.block_size} "
                f"tokens takes {block_bytes * size + fixed} bytes; give more"
            )
        if (
            shape.device.type == "cpu"
            and config.kv_cache_memory_bytes // config.nodes.count > available_memory()
        ):
            raise ExecutorError(
                f"kv_cache_memory_bytes {config.kv_cache_memory_bytes}: only {available_memory()} bytes of "
                "memory are free; give less"
            )
        return blocks
    if measured is not None:
        budget = measured
    else:
        budget = (
            min(_DEFAULT_KV_BYTES, available_memory() * 40 // 100 // config.memory_shares)
            // config.ranks_per_host
        )
    budget -= fixed
    blocks_of_one = -(-config.max_model_len // shape.block_size)
    blocks = min(budget // block_bytes, config.max_num_seqs * blocks_of_one)
    if blocks < blocks_of_one:
        raise ExecutorError(
            f"max_model_len {config.max_model_len}: one request needs {blocks_of_one * block_bytes * size} "
            f"bytes of KV cache, but only {max(budget, 0) * size} are to spare; lower max_model_len or give "
            + ("--kv-cache-memory-bytes" if measured is None else "more --gpu-memory-utilization")
        )
    return blocks
