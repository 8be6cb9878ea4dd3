"""Functions of single elements whose last bit depends on where an element lies, made the same anywhere.

PyTorch computes them with vectors, and the last elements of a thread's share, fewer than a vector, by another
formula.  So a token's result would depend on how many are computed with it.  Here what they get is made as
long as whole vectors for each thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

FUNCTIONS = frozenset(
    {"silu", "gelu", "sigmoid", "softplus", "mish", "elu", "hardswish", "hardsigmoid", "rsqrt", "pow"}
    | {"logsigmoid", "selu", "celu", "exp2", "log2"}
)
"""By their names in PyTorch, as functions and methods."""
_CALLED = FUNCTIONS | {f"{name}_" for name in FUNCTIONS} | {"__pow__", "__ipow__"}
_VECTOR = 64
"""Elements; a multiple of all that PyTorch takes at once."""
_GRAIN = 32_768
"""Elements that are a thread's share at least."""
_MANY = 20_000
"""Of more, some functions give each thread a share."""


class Steady(TorchFunctionMode):
    """While it is entered."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name not in _CALLED or not args or not _matters(args[0]):
            return func(*args, **kwargs)
        x: Tensor = args[0]
        written = (name.endswith("_") and not name.startswith("__")) or name == "__ipow__"
        written = written or bool(kwargs.get("inplace"))
        found = _at_whole_vectors(func, x, args[1:], kwargs)
        return x.copy_(found) if written else found


def steadied(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a module, with `Steady`."""

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with Steady():
            return forward(*args, **kwargs)

    return run


def make_steady(module: nn.Module) -> None:
    """From now on it computes so.

    By another class: a forward of its own would refer to the module, and such a circle keeps the weights in
    it until the garbage collector comes.
    """
    kind: Any = type(module)
    module.__class__ = _steady_class(kind)


@cache
def _steady_class(kind: Any) -> Any:
    return type(kind.__name__, (kind,), {"forward": steadied(kind.forward), "__module__": kind.__module__})


def _matters(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.device.type == "cpu"


def _at_whole_vectors(func: Any, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    count = x.numel()
    length = _length(count, torch.get_num_threads())
    if length == count and x.is_contiguous():
        found: Tensor = func(x, *args, **kwargs)
        return found
    flat = x.new_ones(length)  # (of 0 some have no value)
    flat[:count] = x.reshape(-1)
    found = func(flat, *args, **kwargs)
    return found[:count].view(x.shape)


def _length(count: int, threads: int) -> int:
    """At least `count`: whole vectors for each of the threads that compute so many."""
    length = max(count, 1)
    while True:
        several = threads if length > _MANY else 1
        share = _VECTOR * math.lcm(several, min(threads, -(-length // _GRAIN)))
        rounded = -(-length // share) * share
        if rounded == length:
            return length
        length = rounded
