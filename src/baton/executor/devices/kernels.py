"""What computes between products, and what samples, on a rank's device: imported only if it is chosen."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from baton.executor.weights.forms import ExecutorError
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
