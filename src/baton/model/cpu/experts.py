"""The router and the experts of a mixture by `native/experts.cpp`, which explains the arithmetic."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.model.cpu.grouped import NativeGroupedProduct
from baton.model.cpu.library import INT, POINTER, Native, native
from baton.model.cpu.linear import NativeProduct
from baton.model.cpu.products import NativeWeight, ProductTwin, twin_of
from baton.model.description.model import Activation, MoeConfig
from baton.model.ops.fused import ACTIVATIONS, Activations, Form, addresses
from baton.model.ops.routing import Routed

MOST_CHOSEN = 64
"""Experts of a token, at most: `kMostChosen` of native/experts.h."""
_SCORES = ("softmax", "sigmoid", "chosen_softmax")
_STAGES = 5
_ROOM = threading.local()


class RouterTwin(ctypes.Structure):
    """`Router` of native/experts.h."""

    _fields_ = (
        ("product", ProductTwin),
        ("experts", INT),
        ("chosen", INT),
        ("scores", INT),
        ("choice_bias", POINTER),
        ("groups", INT),
        ("chosen_groups", INT),
        ("normalized", INT),
        ("shared_gate", INT),
        ("least_sum", ctypes.c_double),
        ("factor", ctypes.c_double),
    )


class ExpertsTwin(ctypes.Structure):
    """`Experts` of native/experts.h."""

    _fields_ = (
        ("count", INT),
        ("chosen", INT),
        ("gate_up", POINTER),
        ("down", POINTER),
        ("activation", INT),
    )


class _RoutedTwin(ctypes.Structure):
    """`Routed` of native/experts.h."""

    _fields_ = (("ids", POINTER), ("weights", POINTER), ("shared", POINTER))


class _Mixing(ctypes.Structure):
    """`Mixing` of native/experts.h."""

    _fields_ = (
        ("is_bf16", INT),
        ("experts", POINTER),
        ("tokens", INT),
        ("x", POINTER),
        ("factors", POINTER),
        ("routed", _RoutedTwin),
        ("y", POINTER),
        ("adds", INT),
        ("room", POINTER),
        ("counts", POINTER),
    )


class MixtureTwin(ctypes.Structure):
    """`Mixture` of native/program.cpp."""

    _fields_ = (
        ("router", RouterTwin),
        ("experts", ExpertsTwin),
        ("shared", INT),
        ("number", INT),
        ("counts", POINTER),
    )


class NativeRouter:
    """[T, hidden] → `Routed`.  A token's choice depends on its row only, whatever T is."""

    def __init__(
        self, library: Native, product: NativeProduct, bias: Tensor | None, config: MoeConfig
    ) -> None:
        """`product` in float32, [experts, hidden], or a row more: the gate of the MLP that all tokens pass.
        `bias` [experts] float32, as `config.bias` says.

        Raises `ValueError` (one line) for what the kernel has no room for.
        """
        self.experts, self.chosen = config.experts, config.chosen
        if not 1 <= self.chosen <= min(MOST_CHOSEN, self.experts):
            raise ValueError(
                f"{self.chosen} of {self.experts} experts for each token; "
                f"Baton's kernel chooses up to {MOST_CHOSEN}"
            )
        if config.groups > 1 and (self.experts % config.groups or config.chosen_groups > MOST_CHOSEN):
            raise ValueError(f"{self.experts} experts in {config.groups} groups, which are not of one size")
        self._product = product
        self.shared_gate = product.weight.out_features > self.experts
        if bias is not None:
            bias = F.pad(bias.float(), (0, product.weight.out_features - self.experts)).contiguous()
        self._bias = bias
        address = None if bias is None else bias.data_ptr()
        described = twin_of(product)
        described.bias = address if config.bias == "logits" else None
        self.twin = RouterTwin(
            product=described,
            experts=self.experts,
            chosen=self.chosen,
            scores=_SCORES.index(config.scores),
            choice_bias=address if config.bias == "choice" else None,
            groups=config.groups,
            chosen_groups=config.chosen_groups,
            normalized=config.normalized,
            shared_gate=self.shared_gate,
            least_sum=config.least_sum,
            factor=config.factor,
        )
        self._route = library.function("route", INT, *[POINTER] * 4, INT)

    def __call__(self, x: Tensor) -> Routed:
        """x: [T, hidden] in float32 or bfloat16, as the norm gives it."""
        tokens, hidden = x.shape
        x = x.contiguous()
        room = torch.empty(tokens * (hidden + self._product.weight.out_features), dtype=torch.float32)
        ids = torch.empty((tokens, self.chosen), dtype=torch.int32)
        weights = torch.empty((tokens, self.chosen), dtype=torch.float32)
        shared = torch.empty(tokens, dtype=torch.float32) if self.shared_gate else None
        found = _RoutedTwin(ids.data_ptr(), weights.data_ptr(), None if shared is None else shared.data_ptr())
        self._route(
            int(x.dtype == torch.bfloat16),
            ctypes.addressof(self.twin),
            x.data_ptr(),
            room.data_ptr(),
            ctypes.addressof(found),
            tokens,
        )
        return Routed(ids, weights, shared)


class NativeExperts:
    """Activations in `form` [T, …] → the weighted sum of what each token's experts give, [T, hidden].

    A row depends on its row of x only.  `of` tells whether experts can be computed so.
    """

    def __init__(
        self,
        library: Native,
        gate_up: Sequence[NativeWeight],
        down: Sequence[NativeWeight],
        activation: Activation,
        dtype: torch.dtype,
    ) -> None:
        self._products = (list(gate_up), list(down))  # the arrays have their addresses only
        self.gate_up, self.down = (
            (ProductTwin * len(products))(*map(twin_of, products)) for products in self._products
        )
        self.form: Form = gate_up[0].form
        self._dtype = dtype
        self.twin = ExpertsTwin(
            count=len(gate_up),
            gate_up=ctypes.addressof(self.gate_up),
            down=ctypes.addressof(self.down),
            activation=ACTIVATIONS.index(activation),
        )
        self._bytes = library.function("mixing_bytes", POINTER, POINTER)
        self._mix = library.function("mix", POINTER, INT, INT)

    @staticmethod
    def of(
        gate_up: Sequence[object], down: Sequence[object], activation: Activation, dtype: torch.dtype
    ) -> NativeExperts | None:
        """None where not all are native products of one form and size, without an order of inputs."""
        library = native()
        if library is None or not _alike(gate_up) or not _alike(down):
            return None
        gates = [product for product in gate_up if isinstance(product, NativeWeight)]
        downs = [product for product in down if isinstance(product, NativeWeight)]
        return NativeExperts(library, gates, downs, activation, dtype)

    def __call__(
        self, x: Activations, routed: Routed, shared: Tensor | None = None, counts: Tensor | None = None
    ) -> Tensor:
        """`shared` [T, hidden]: what the MLP that all tokens pass gives; the result takes its place.
        `counts` [experts] int64: tokens that each expert had are added to it.
        """
        tokens = len(routed.ids)
        hidden = self.down[0].n
        y = torch.empty((tokens, hidden), dtype=self._dtype) if shared is None else shared.contiguous()
        self.twin.chosen = routed.ids.shape[1]
        values, factors = addresses(x)
        gate = None if routed.shared is None else routed.shared.data_ptr()
        call = _Mixing(
            is_bf16=self._dtype == torch.bfloat16,
            experts=ctypes.addressof(self.twin),
            tokens=tokens,
            x=values,
            factors=factors,
            routed=_RoutedTwin(routed.ids.data_ptr(), routed.weights.data_ptr(), gate),
            y=y.data_ptr(),
            adds=shared is not None,
            counts=None if counts is None else counts.data_ptr(),
        )
        needed = ctypes.c_int64()
        self._bytes(ctypes.addressof(call), ctypes.addressof(needed))
        call.room = _room(needed.value).data_ptr()
        self._mix(ctypes.addressof(call), 0, _STAGES)
        return y


def _room(size: int) -> Tensor:
    """For a call of this thread; the next call has the same.  Anew for each, it would be mapped each time."""
    found: Tensor | None = getattr(_ROOM, "memory", None)
    if found is None or len(found) < size:
        _ROOM.memory = None  # the old one goes before the new one comes
        found = _ROOM.memory = torch.empty(size, dtype=torch.uint8)
    return found


@dataclass(frozen=True)
class NativeMixture:
    """The router and the experts of a layer."""

    router: NativeRouter
    experts: NativeExperts

    def twin(self, number: int, shared: bool, counts: Tensor) -> MixtureTwin:
        """It holds addresses.  `number`: among the mixtures; `shared`: there is an MLP that all tokens
        pass; `counts` [experts] int64: tokens that each expert had are added to it."""
        experts = ExpertsTwin.from_buffer_copy(self.experts.twin)
        experts.chosen = self.router.chosen
        return MixtureTwin(self.router.twin, experts, shared, number, counts.data_ptr())

    @property
    def sizes(self) -> tuple[object, ...]:
        """Mixtures with the same take the same room."""
        router, experts = self.router, self.experts
        gate_up, down = experts.gate_up[0], experts.down[0]
        products = (gate_up.form, gate_up.n, gate_up.k, down.form, down.n, down.k)
        return (router.experts, router.chosen, router.shared_gate, *products)


def _alike(products: Sequence[object]) -> bool:
    shapes = set()
    for product in products:
        if not isinstance(product, NativeWeight):
            return False
        if isinstance(product, NativeGroupedProduct) and len(product.parts) > 1:
            return False
        twin = twin_of(product)
        shapes.add((twin.form, twin.n, twin.k, twin.order))
    return len(shapes) == 1 and shapes.pop()[-1] is None
