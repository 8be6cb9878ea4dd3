"""Whether FlashInfer can compute a model's attention.  Nothing of FlashInfer is imported here.

It is a package of its own (`pip install flashinfer-python`), chosen by `--attention-backend flashinfer`.  Its
kernels are compiled when they are first needed, by nvcc and ninja, unless their wheels are installed too.
"""

from __future__ import annotations

import importlib.metadata
from typing import Final

import torch

_PACKAGE: Final = "flashinfer-python"
_FIRST: Final = (0, 6)
_HEAD_DIMS: Final = (64, 128, 256)
_DTYPES: Final = (torch.bfloat16, torch.float16)


def installed() -> str:
    """The version that is installed, or ""."""
    try:
        return importlib.metadata.version(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return ""


def why_not(version: str, head_dim: int, dtype: torch.dtype, kv_int8: bool, sinks: bool) -> str:
    """Why this version ("": there is none) does not compute such attention here, with what to do, or ""."""
    if not version:
        return f"FlashInfer is not installed (pip install {_PACKAGE})"
    try:
        numbers = tuple(int(part) for part in version.split(".")[:2])
    except ValueError:
        return f"FlashInfer {version} is of no known version; install 0.6 or newer"
    if numbers < _FIRST:
        return f"FlashInfer is {version}; install 0.6 or newer"
    if kv_int8:
        return "FlashInfer does not know Baton's KV cache in 8 bits; leave --kv-cache-dtype away"
    if dtype not in _DTYPES:
        name = str(dtype).removeprefix("torch.")
        return f"FlashInfer computes in bfloat16 and float16, not {name}; give --dtype bfloat16"
    if head_dim not in _HEAD_DIMS:
        return f"the model's heads have {head_dim} elements, FlashInfer's kernels take 64, 128 or 256"
    if sinks:
        return "the model has attention sinks, which FlashInfer's kernels for paged KV leave out"
    return ""
