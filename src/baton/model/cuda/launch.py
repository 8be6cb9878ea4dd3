"""What is launched, as data: the kernel, its grid and arguments.

Theory.  A wrapper checks its arguments and makes a `Launch`, which `run` starts.  So the tests that compile
kernels without a device (tests/model/cuda/compiled.py) take the arguments, constants and numbers of warps
from the same place as a step does: what is compiled there is what would run.

Triton compiles a kernel anew where a number becomes 1 or (no longer) a multiple of 16, and where a tensor
begins at a multiple of 16 bytes or not: at the first such batch, while requests wait.  So each kernel names
what differs from batch to batch (`do_not_specialize`, `…_on_alignment`), of which nothing else depends.

Triton fuses a * b + c unless it is told not to, and what it does by default changes with its version (3.10).
So each launch says it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Launch:
    """One start of a kernel."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    """By name: tensors, numbers, None for a tensor that there is not, and constants of the compilation."""
    warps: int = 4
    stages: int = 1
    """Of loads that are under way while a loop computes."""
    fused: bool = True
    """a * b + c may be rounded once.  False where results are to be those of other code, bit for bit."""

    def run(self) -> None:
        if 0 in self.grid:
            return
        self.kernel[self.grid](
            **self.arguments, num_warps=self.warps, num_stages=self.stages, enable_fp_fusion=self.fused
        )


def next_power(number: int, least: int = 1) -> int:
    """The smallest power of two that is at least `number` and `least`: what Triton's tiles measure."""
    return max(least, 1 << (number - 1).bit_length())


def check(name: str, tensor: Tensor, shape: tuple[int | None, ...], *dtypes: torch.dtype) -> None:
    """Raises `ValueError` unless `tensor` has this shape (None: any size), one of these dtypes (none given:
    any), and elements of its last dimension side by side."""
    told = f"{name} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    fits = tensor.dim() == len(shape) and all(
        size is None or size == have for size, have in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{told}: the kernel takes [{wanted}]")
    if dtypes and tensor.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{told}: the kernel takes {names}")
    if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{told} has strides {list(tensor.stride())}: the last one must be 1")
