"""What a class of transformers computes, seen by running it without weights (on PyTorch's device "meta").

Its attention comes to the library's interface with shapes, a scale and a mask, of which Baton needs the same
for all layers but the windows.  Everything else must be of one token alone: each operation of PyTorch is
looked at, and one that is not known to be so is a reason to refuse the model, by the name of its module.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from baton.model.adapted.steady import FUNCTIONS
from baton.model.description.fields import UnsupportedModel

_TOKENS = 7
_SAME = frozenset(
    "view _unsafe_view _reshape_alias reshape transpose t permute slice select unsqueeze squeeze expand "
    "alias detach clone copy copy_ _to_copy contiguous cat stack split split_with_sizes chunk unbind "
    "unflatten flatten add sub rsub mul div neg abs sign sqrt reciprocal relu clamp clamp_min clamp_max "
    "maximum minimum where masked_fill add_ sub_ mul_ div_ neg_ relu_ clamp_ masked_fill_ leaky_relu "
    "hardtanh threshold square floor ceil round trunc fmod remainder floor_divide exp sin cos tanh erf "
    "log log1p expm1 embedding arange zeros ones full empty empty_like zeros_like ones_like full_like "
    "new_empty new_zeros new_ones new_full scalar_tensor lift_fresh lift_fresh_copy repeat "
    "repeat_interleave fill_ zero_ movedim eq ne lt le gt ge logical_and logical_or logical_not "
    "bitwise_and bitwise_or bitwise_not addcmul lerp native_layer_norm layer_norm _fused_rms_norm "
    "rms_norm dropout empty_strided outer view_as_complex view_as_real polar index_select".split()
)
"""Each element of the result is of elements at its place, or of one row, and does not depend on the rest."""
_OVER_ONE_DIM = frozenset("mean sum var var_mean amax amin linalg_vector_norm norm index".split())
"""So if it is the last dimension over which they go (`index`: the first, by rows)."""
_STEADY_POWERS = (2, 3, 1)
_PRODUCTS = frozenset("mm addmm linear".split())


@dataclass(frozen=True)
class Mask:
    """What a layer sees; windows count the position itself."""

    window: int | None


@dataclass(frozen=True)
class Seen:
    """One layer's attention."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    soft_cap: float | None
    window: int | None


@dataclass
class Probe:
    """What was seen."""

    name: str
    """Of the model, for messages."""
    attention: list[tuple[nn.Module, Seen]] = field(default_factory=list)
    """In the order of calls."""
    unsteady: list[nn.Module] = field(default_factory=list)
    """Modules that call functions of `steady.FUNCTIONS` themselves."""

    def refused(self, what: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.name!r} cannot be computed through transformers: {what}")


class _Running(threading.local):
    probe: Probe | None = None
    looking: bool = False
    """At operations."""


_RUNNING = _Running()


def mask_told(
    *args: Any, mask_function: Callable[..., Any] | None = None, local_size: int | None = None, **other: Any
) -> Mask:
    """In the place of a mask: registered with the library for probes."""
    probe = _RUNNING.probe
    assert probe is not None
    if mask_function is None:
        raise probe.refused("it makes masks of its own")
    _RUNNING.looking = False
    try:
        with torch.device("cpu"):
            return Mask(_window_of(probe, mask_function, local_size))
    finally:
        _RUNNING.looking = True


def _window_of(probe: Probe, mask_function: Callable[..., Any], local_size: int | None) -> int | None:
    """By what the function says of some positions.  Raises `UnsupportedModel` if that is another mask."""
    size = local_size or 0
    at = torch.tensor(0)
    for query in (0, 5, size - 1, size, 2 * size + 3, 3 * size + 1):
        if query < 0:
            continue
        keys = torch.arange(max(0, query - size - 8), query + 3)
        seen = torch.as_tensor(mask_function(at, at, torch.tensor(query), keys)).expand(keys.shape)
        expected = keys <= query
        if size:
            expected &= keys > query - size
        if not torch.equal(seen.bool(), expected):
            raise probe.refused("its masks are neither causal nor sliding windows")
    return local_size


def attention_told(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """In the place of attention: registered with the library for probes."""
    probe = _RUNNING.probe
    assert probe is not None
    where = type(module).__name__
    if not isinstance(attention_mask, Mask):
        raise probe.refused(f"{where} has no causal mask, or one of its own")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise probe.refused(f"{where} sees what comes after a token too")
    if s_aux is not None and s_aux.shape != query.shape[1:2]:
        raise probe.refused(f"the sinks of {where} are not one of each head")
    for argument in ("position_bias", "head_mask", "alibi", "sinks", "score_mod"):
        if other.get(argument) is not None:
            raise probe.refused(f"{where} gives attention {argument!r}, which Baton does not compute there")
    _, heads, tokens, head_dim = query.shape
    if tokens != _TOKENS or key.shape[2] != _TOKENS:
        raise probe.refused(f"{where} attends over {key.shape[2]} positions of {_TOKENS} tokens")
    if value.shape != key.shape or key.shape[3] != head_dim:
        raise probe.refused(
            f"the heads of {where} differ in size: queries {head_dim}, keys {key.shape[3]}, values "
            f"{value.shape[3]}"
        )
    if heads % key.shape[1]:
        raise probe.refused(f"{where} has {heads} heads for {key.shape[1]} KV heads")
    scale = float(getattr(module, "scaling", head_dim**-0.5) if scaling is None else scaling)
    seen = Seen(heads, key.shape[1], head_dim, scale, softcap, attention_mask.window)
    probe.attention.append((module, seen))
    return torch.empty(1, tokens, heads, value.shape[3], dtype=query.dtype, device=query.device), None


def run_probe(model: nn.Module, name: str, products: set[nn.Module]) -> Probe:
    """Runs a model whose attention is `attention_told`.  `products`: modules that Baton will multiply.

    Raises `UnsupportedModel`.
    """
    probe, operations = Probe(name), _Operations(name, products)
    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(operations.entered))
        handles.append(module.register_forward_hook(operations.left))
    _RUNNING.probe = probe
    try:
        with torch.no_grad(), torch.device("meta"), operations:
            tokens = torch.zeros((1, _TOKENS), dtype=torch.int64)
            positions = torch.zeros((1, _TOKENS), dtype=torch.int64)
            # With a mask of ones nobody looks at positions to find out where sequences begin.
            ones = torch.ones((1, _TOKENS), dtype=torch.bool)
            _RUNNING.looking = True
            model(input_ids=tokens, position_ids=positions, attention_mask=ones, use_cache=False)
    except UnsupportedModel:
        raise
    except Exception as error:
        # Whatever the class stumbles over: it cannot be seen what it computes.
        reason = str(error).partition("\n")[0][:120]
        raise probe.refused(f"its class does not run without weights ({reason})") from error
    finally:
        _RUNNING.probe, _RUNNING.looking = None, False
        for handle in handles:
            handle.remove()
    probe.unsteady = operations.unsteady
    _check(probe)
    return probe


def _check(probe: Probe) -> None:
    if not probe.attention:
        raise probe.refused("none of its modules uses the attention interface")
    _, first = probe.attention[0]
    if len({id(module) for module, _ in probe.attention}) < len(probe.attention):
        raise probe.refused("layers share a module of attention, and so keys")
    for module, seen in probe.attention:
        for what in ("heads", "kv_heads", "head_dim", "scale", "soft_cap"):
            mine, theirs = getattr(seen, what), getattr(first, what)
            if mine != theirs:
                raise probe.refused(
                    f"layers of {type(module).__name__} differ in {what} ({theirs} and {mine}); Baton needs "
                    "one of all"
                )


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at each operation, and at the module whose own code calls it."""

    def __init__(self, name: str, products: set[nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unsteady: list[nn.Module] = []
        self._name, self._products = name, products
        self._within: list[nn.Module] = []

    def entered(self, module: nn.Module, _: Any) -> None:
        self._within.append(module)

    def left(self, module: nn.Module, _: Any, result: Any) -> None:
        self._within.pop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _RUNNING.looking and self._within:
            self._look(func.overloadpacket.__name__, args)
        return func(*args, **(kwargs or {}))

    def _look(self, name: str, args: tuple[Any, ...]) -> None:
        module = self._within[-1]
        if name in _SAME or (name in _PRODUCTS and module in self._products):
            return
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if name in _OVER_ONE_DIM and first is not None and _is_of_rows(name, first, args):
            return
        if name == "bmm" and first is not None and first.shape[2] == 1:
            return  # one product an element, as of positions and frequencies
        plain = {"log_sigmoid_forward": "logsigmoid"}.get(name, name.rstrip("_"))
        if plain == "pow" and (args[1] if len(args) > 1 else None) in _STEADY_POWERS:
            return
        if plain == "rsqrt" and first is not None and first.dtype == torch.float32:
            return
        if plain in FUNCTIONS:
            if module not in self.unsteady:
                self.unsteady.append(module)
            return
        raise UnsupportedModel(
            f"{self._name!r} cannot be computed through transformers: {type(module).__name__} computes "
            f"{name!r} outside of attention and products"
        )


def _is_of_rows(name: str, first: Tensor, args: tuple[Any, ...]) -> bool:
    if name == "index":  # a table by positions
        return len(args[1]) == 1 and args[1][0] is not None and not args[1][0].is_floating_point()
    place = 2 if name in ("linalg_vector_norm", "norm") else 1
    given: Any = args[place] if len(args) > place else None
    dims = [given] if isinstance(given, int) else list(given or ())
    last = first.dim() - 1
    return bool(dims) and all(dim % first.dim() == last for dim in dims) and first.dim() > 2
