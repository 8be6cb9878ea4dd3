"""How much of a device's memory is for the KV cache: measured, not guessed.

Theory.  An instance may take a share u of the device's memory (`--gpu-memory-utilization`).  Before there is
a pool, the largest step is computed once: as many tokens as a step may have, in one block, whose content
nobody reads.  PyTorch then says how much it held at the most (weights and activations), the driver how much
is taken beside it (contexts, cuBLAS, NCCL).  What is left of the share is the pool's.

Memory that was taken before this process began is not the instance's: it must only leave the share free.
(An instance is started again as soon as it is killed, and a driver takes a moment to free what its workers
had.)
Where several instances start on one device at a time, what the driver says is of all of them, so each
reckons `_BESIDE` in its place.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from baton.executor.devices.sizes import sizes_itself
from baton.executor.kv_pool import KvPool
from baton.executor.weights.forms import ExecutorError
from baton.model.attention import AttentionStep
from baton.model.decoder.decoder import Decoder
from baton.model.loader import AnyDecoder
from baton.protocol.config import InstanceConfig

_BESIDE = 1 << 30
_FREED_S = 10.0
"""How long a start waits for its share to become free."""
_LOOK_S = 0.1


@dataclass(frozen=True)
class Taken:
    """Bytes of one device."""

    total: int
    free: int
    """As the driver says."""
    peak: int
    """Held by PyTorch at the most."""
    reserved: int
    """Kept by PyTorch, held or not."""
    before: int
    """Taken when this process began to use the device."""


def kv_budget(taken: Taken, utilization: float, shares: int) -> int:
    """Bytes for the KV cache, perhaps less than 0.  `shares`: instances on the device."""
    share = int(taken.total * utilization) // shares
    beside = max(taken.total - taken.free - taken.reserved - taken.before, 0)
    return share - taken.peak - (beside if shares == 1 else _BESIDE)


def taken_at_start(config: InstanceConfig, device: torch.device) -> int:
    """Bytes of a CUDA device that are not free; it becomes the process's device, and its products of float32
    are of float32.  Elsewhere 0.

    Raises `ExecutorError` if the instance's share is not free, and does not get free in a moment."""
    if device.type != "cuda":
        return 0
    torch.cuda.set_device(device)
    # (NVIDIA's containers set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE: 10 bits, of a router's logits too.)
    torch.set_float32_matmul_precision("highest")
    until = time.monotonic() + _FREED_S
    while True:
        free, total = torch.cuda.mem_get_info(device)
        if not sizes_itself(config):
            return total - free
        try:
            check_free(config, total - free, total)
            return total - free
        except ExecutorError:
            if time.monotonic() >= until:
                raise
        time.sleep(_LOOK_S)


def check_free(config: InstanceConfig, taken: int, total: int) -> None:
    """Raises `ExecutorError` unless the instance's share is free."""
    share = int(total * config.gpu_memory_utilization) // config.memory_shares
    if config.memory_shares == 1 and total - taken < share:
        raise ExecutorError(
            f"gpu_memory_utilization {config.gpu_memory_utilization:g}: that is {share / 1e9:.1f} GB, but "
            f"only {(total - taken) / 1e9:.1f} GB of the device are free; give less, or end what else uses it"
        )


def largest_step(config: InstanceConfig, model: AnyDecoder) -> None:
    """Computes as many tokens as a step may have, and as many logits; its pool is gone afterwards."""
    backend = model.backend
    shape = backend.shape
    sizes = shape.num_layers, shape.num_kv_heads, backend.tile_shape
    pool = KvPool(1, *sizes, backend.pool_dtype, shape.device)
    backend.bind(pool.tensor)
    counts = chunks_of(config)
    width = -(-int(counts.max()) // config.block_size)
    step = AttentionStep(np.zeros_like(counts), counts, np.zeros((len(counts), width), np.int32), 0)
    tokens = np.zeros(int(counts.sum()), np.int32)
    wanted = np.cumsum(counts, dtype=np.int64) - 1
    with torch.inference_mode():
        model(tokens, step, wanted)
    backend.bind(torch.empty((0, *pool.tensor.shape[1:]), dtype=pool.tensor.dtype, device=shape.device))
    pool.close()


def chunks_of(config: InstanceConfig) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """[R] tokens of each row of the largest step: all rows, and all tokens."""
    rows = min(config.max_num_seqs, config.max_num_batched_tokens)
    counts = np.full(rows, config.max_num_batched_tokens // rows, np.int32)
    counts[: config.max_num_batched_tokens % rows] += 1
    return np.minimum(counts, np.int32(config.max_model_len))


def measured_budget(config: InstanceConfig, model: AnyDecoder, before: int) -> int | None:
    """Bytes for the KV cache on the model's CUDA device, `before` of which were taken at the start; None
    elsewhere, and where the cache's size is given."""
    device = model.backend.shape.device
    if device.type != "cuda" or not sizes_itself(config):
        return None
    if isinstance(model, Decoder):
        for mixture in model.mixtures:
            mixture.on_device()  # (to stack experts takes more memory than is kept)
        for rotary in model.rotaries:
            rotary.reach(config.max_model_len)  # (as graphs have it)
    torch.cuda.reset_peak_memory_stats(device)
    largest_step(config, model)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    taken = Taken(total, free, peak, torch.cuda.memory_reserved(device), before)
    return kv_budget(taken, config.gpu_memory_utilization, config.memory_shares)
