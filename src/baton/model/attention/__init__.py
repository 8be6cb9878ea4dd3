"""Attention over paged KV: `base` is the whole interface, one file an implementation."""

from __future__ import annotations

from baton.model.attention.base import AttentionBackend, AttentionShape, AttentionStep
from baton.model.attention.cpu_backend import CpuAttention, kernel_shape, supported
from baton.model.attention.torch_backend import TorchAttention
from baton.model.attention.torch_pieces import TorchPieces
from baton.model.cpu.kernels import Kernels, KernelShape
from baton.model.cpu.library import native
from baton.model.ops import triton

__all__ = [
    "AttentionBackend",
    "AttentionShape",
    "AttentionStep",
    "CpuAttention",
    "TorchAttention",
    "TorchPieces",
    "attention_backend",
]


def attention_backend(shape: AttentionShape) -> AttentionBackend:
    """The backend to use for these shapes on this machine."""
    if triton.serve(shape.device):
        # (Importing it imports Triton.)
        from baton.model.attention.triton_backend import TritonAttention, serves

        if serves(shape):
            return TritonAttention(shape)
    kernels = _kernels(kernel_shape(shape)) if supported(shape) else None
    if kernels is not None:
        return CpuAttention(shape, kernels)
    return TorchPieces(shape) if shape.device.type == "cpu" else TorchAttention(shape)


def _kernels(shape: KernelShape) -> Kernels | None:
    """C++ where it was built, else numba, where it is installed; only what is chosen is imported."""
    library = native()
    if library is not None:
        from baton.model.cpu.native_kernels import NativeKernels

        return NativeKernels(shape, library)
    if shape.soft_cap:
        return None
    try:
        from baton.model.cpu.numba.kernels import NumbaKernels
    except ImportError:
        return None
    return NumbaKernels(shape)
