"""What a worker says of itself when it is ready, in a line."""

from __future__ import annotations

import torch

from baton.executor.kv_pool import KvPool
from baton.executor.weights.forms import form_told
from baton.executor.weights.images import WeightMemory
from baton.model.adapted.decoder import AdaptedDecoder
from baton.model.decoder.coverage import in_pytorch, why_apart
from baton.model.decoder.decoder import Decoder
from baton.model.loader import AnyDecoder
from baton.protocol.config import InstanceConfig


def banner(
    config: InstanceConfig,
    model: AnyDecoder,
    pool: KvPool,
    device: torch.device,
    memory: WeightMemory,
) -> str:
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    kv = pool.num_blocks * pool.block_bytes
    cells = f"{config.kv_cache_dtype}, " if config.kv_cache_dtype else ""
    rounded = model.placement.rounded.told()
    attention = model.backend.kernel_name
    computed = ""
    if isinstance(model, AdaptedDecoder):
        computed = (
            f", all else by {model.config.architecture} of transformers, which is slower than a native family"
        )
    elif device.type == "cpu":
        computed = f", {_steps_told(model)}"
    return (
        f"torch {torch.__version__} on {device}, {config.dtype}{threads}, "
        f"weights {model.weight_bytes() / 1e6:.0f} MB ({form_told(config, model)}; "
        f"{memory.told()}), "
        f"{rounded + ', ' if rounded else ''}KV {kv / 1e6:.0f} MB "
        f"({cells}{pool.num_blocks} blocks of {config.block_size} tokens), attention by {attention}{computed}"
    )


def _steps_told(model: Decoder) -> str:
    """Whether a step is one native call, and what has no kernel."""
    slow = in_pytorch(model)
    if slow:
        return f"in PyTorch: {', '.join(slow)}"
    why = why_apart(model)
    return f"layers one by one ({why})" if why else "a step is one native call"
