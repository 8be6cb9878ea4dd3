"""Attention over paged KV: `base` is the whole interface, one file an implementation."""

from __future__ import annotations

import logging
from typing import Literal

from baton.model.attention.base import AttentionBackend, AttentionShape, AttentionStep
from baton.model.attention.cpu_backend import CpuAttention, kernel_shape, supported
from baton.model.attention.torch_backend import TorchAttention
from baton.model.attention.torch_pieces import TorchPieces
from baton.model.cpu.kernels import Kernels, KernelShape
from baton.model.cpu.library import native
from baton.model.ops import flashinfer, triton

__all__ = [
    "AttentionBackend",
    "AttentionShape",
    "AttentionStep",
    "BackendName",
    "CpuAttention",
    "TorchAttention",
    "TorchPieces",
    "attention_backend",
]
logger = logging.getLogger(__name__)


BackendName = Literal["auto", "triton", "flashinfer", "torch"]
"""auto: Baton's own kernels for the device, else PyTorch."""


def attention_backend(shape: AttentionShape, wanted: BackendName = "auto") -> AttentionBackend:
    """The backend to use for these shapes on this machine.

    Raises `ValueError`, which says what to do, if the wanted one cannot be."""
    if wanted == "flashinfer":
        return _flashinfer(shape)
    if wanted != "torch" and triton.serve(shape.device):
        # (Importing it imports Triton.)
        from baton.model.attention.triton_backend import TritonAttention, why_not

        if not (reason := why_not(shape)):
            return TritonAttention(shape)
        if wanted == "triton":
            raise ValueError(f"{reason}; leave it away")
        logger.warning("%s: PyTorch computes attention, slower: %s", shape.device, reason)
    if wanted == "triton":
        raise ValueError(f"Triton does not serve {shape.device} (of a CUDA device the log says why)")
    if wanted == "torch":
        return _torch(shape)
    kernels = _kernels(kernel_shape(shape)) if supported(shape) else None
    if kernels is not None:
        return CpuAttention(shape, kernels)
    return _torch(shape)


def _torch(shape: AttentionShape) -> AttentionBackend:
    return TorchPieces(shape) if shape.device.type == "cpu" else TorchAttention(shape)


def _flashinfer(shape: AttentionShape) -> AttentionBackend:
    if not triton.serve(shape.device):
        raise ValueError(
            f"Triton does not serve {shape.device} (of a CUDA device the log says why), and Baton's kernels "
            "store what FlashInfer reads; leave it away"
        )
    version = flashinfer.installed()
    if reason := flashinfer.why_not(version, shape.head_dim, shape.dtype, shape.kv_int8, shape.sinks):
        raise ValueError(f"{reason}, or leave it away")
    # (Importing it imports FlashInfer, and Triton.)
    from baton.model.attention.flashinfer_backend import FlashInferAttention, library

    return FlashInferAttention(shape, library())


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
