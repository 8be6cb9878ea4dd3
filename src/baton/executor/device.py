"""What computes between products, and what samples, on a rank's device: imported only if it is chosen."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from baton.model.cpu.sampling import SlotParameters
from baton.model.cpu.steps import fused_ops
from baton.model.ops import triton
from baton.model.ops.device import DeviceKernels
from baton.model.ops.fused import FusedOps
from baton.model.sampling.sampler import SlotSampling


def ops_of(dtype: torch.dtype, device: torch.device, longest_row: int, int8: bool = False) -> FusedOps:
    """See `cpu.steps.fused_ops`."""
    if triton.serve(device):
        from baton.model.cuda.ops import TritonOps

        return TritonOps(int8)
    return fused_ops(dtype, device, longest_row, int8)


def kernels_of(device: torch.device) -> DeviceKernels | None:
    """What makes the products of a device that has kernels for them; None: PyTorch, or a CPU's own."""
    if not triton.serve(device):
        return None
    from baton.model.cuda.products.kernels import TritonKernels

    return TritonKernels(device)


def device_sampling(device: torch.device) -> Callable[[SlotParameters, int], SlotSampling] | None:
    """What makes the sampling of a device that has kernels for it; None: `sampling_kernel` or PyTorch."""
    if not triton.serve(device):
        return None
    from baton.model.cuda.slot_sampling import TritonSampling

    return partial(TritonSampling, device=device)
