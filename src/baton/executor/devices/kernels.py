"""What computes between products, and what samples, on a rank's device: imported only if it is chosen."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from baton.executor.weights.forms import ExecutorError
from baton.model import attention
from baton.model.attention import AttentionBackend, AttentionShape, TorchAttention
from baton.model.cpu.sampling import SlotParameters
from baton.model.cpu.steps import fused_ops
from baton.model.ops import triton
from baton.model.ops.device import DeviceKernels
from baton.model.ops.fused import FusedOps
from baton.model.sampling.sampler import DeviceSlotSampling
from baton.protocol.config import InstanceConfig


def ops_of(dtype: torch.dtype, device: torch.device, longest_row: int, int8: bool = False) -> FusedOps:
    """See `cpu.steps.fused_ops`."""
    if triton.serve(device):
        from baton.model.cuda.ops import TritonOps

        return TritonOps(int8)
    return fused_ops(dtype, device, longest_row, int8)


def attention_backend(config: InstanceConfig, shape: AttentionShape) -> AttentionBackend:
    """What computes the model's attention.

    Raises `ExecutorError` where `--attention-backend` asks for what is not to be had, or where what is there
    does not compute each row by itself, as `--deterministic` wants it."""
    wanted = config.attention_backend
    try:
        found = attention.attention_backend(shape, wanted)
    except ValueError as error:
        if wanted == "auto":
            raise
        raise ExecutorError(f"attention_backend {wanted}: {error}") from None
    if config.deterministic and isinstance(found, TorchAttention):
        raise ExecutorError(
            f"deterministic: Baton's kernels do not take heads of {shape.head_dim} elements on "
            f"{shape.device}, and PyTorch's attention depends on the batch; leave it away"
        )
    return found


def kernels_of(config: InstanceConfig, device: torch.device) -> DeviceKernels | None:
    """What makes the products of a device that has kernels for them; None: PyTorch, or a CPU's own.

    Raises `ExecutorError` where cuBLAS would make products that must not depend on the batch."""
    if not triton.serve(device):
        if config.deterministic and config.device != "cpu":
            raise ExecutorError(
                f"deterministic: only Triton's kernels compute so on {device}, and here they do not serve "
                "(the log says why); leave it away"
            )
        return None
    from baton.model.cuda.products.kernels import TritonKernels

    return TritonKernels(device, config.deterministic)


def device_sampling(device: torch.device) -> Callable[[SlotParameters, int], DeviceSlotSampling] | None:
    """What makes the sampling of a device that has kernels for it; None: `sampling_kernel` or PyTorch."""
    if not triton.serve(device):
        return None
    from baton.model.cuda.slot_sampling import TritonSampling

    return partial(TritonSampling, device=device)
