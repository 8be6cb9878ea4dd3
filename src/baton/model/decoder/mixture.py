"""The second half of a block: an MLP, or a mixture of experts, each of which is one.

Theory.  A mixture's router gives each token to some of its experts.  The pairs (token, expert) are sorted by
expert; each expert is then two ordinary products, of the rows of all of its tokens; and a token's results are
added up in the order of the experts' ids, in float32, the shared experts' last.  So what a token gets depends
on nothing else in the step.  The sum is rounded once, to the model's dtype.

Under tensor parallelism every expert is cut along its inner size, as an MLP is: each rank has a part of each
expert, chooses as the others do, and one sum over the ranks completes the routed and the shared results.

An expert's matrices are layers of their own, so a checkpoint is read, quantized and packed expert by expert.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from baton.model.checkpoint.config import ModelConfig
from baton.model.cpu.experts import NativeExperts, NativeMixture, NativeRouter
from baton.model.cpu.library import Native, native
from baton.model.cpu.linear import NativeProduct
from baton.model.cpu.steps import NativeOps
from baton.model.description.model import MixtureNames, MlpConfig, MoeConfig, Names
from baton.model.layers.layers import Layer, Linear, Module, RowParallelLinear
from baton.model.layers.piece import Piece
from baton.model.layers.placement import Placement, Product
from baton.model.ops.device import DeviceExperts, DeviceKernels, DevicePlain
from baton.model.ops.fused import PLAIN, Activations, Form, Result
from baton.model.ops.routing import Routed, in_order, route, sigmoid
from baton.model.weights.group_rows import GroupRows
from baton.model.weights.grouped import InGroups
from baton.model.weights.quantized import Quantized


@dataclass(frozen=True)
class MlpNames:
    """Whole names of an MLP's tensors, without their last part."""

    gate: str
    up: str
    down: str
    gate_up: str = ""
    """Both in one tensor, gates first."""

    @classmethod
    def of_layer(cls, number: int, names: Names) -> MlpNames:
        name = f"{names.layers}.{number}."
        fused = names.gate_up and name + names.gate_up
        return cls(name + names.gate, name + names.up, name + names.down, fused)

    @classmethod
    def within(cls, name: str, names: MixtureNames) -> MlpNames:
        return cls(f"{name}.{names.gate}", f"{name}.{names.up}", f"{name}.{names.down}")


class MLP(Module):
    """down(activation(gate(x)) * up(x))"""

    def __init__(
        self, names: MlpNames, told: MlpConfig, hidden: int, placement: Placement, summed: bool = True
    ) -> None:
        """Not `summed`: as `RowParallelLinear`."""
        self.config, self.ops, parallel = told, placement.ops, placement.parallel
        share = told.size // parallel.size
        first, stop = parallel.rank * share, (parallel.rank + 1) * share
        if names.gate_up:
            fused, size = names.gate_up, told.size
            parts = [(fused, 2 * size, first, stop), (fused, 2 * size, size + first, size + stop)]
        else:
            parts = [(part, told.size, first, stop) for part in (names.gate, names.up)]
        self.gate_up = Linear(parts, hidden, told.bias, placement)
        self.down = RowParallelLinear(names.down, told.size, hidden, told.bias, placement, summed)

    @property
    def form(self) -> Form:
        """In which it takes activations."""
        return self.gate_up.form

    def __call__(self, x: Activations) -> Result:
        found = self.gate_up.multiply(x)
        return self.down.multiply(self.ops.gated_mul(found, self.down.form, self.config.activation))


class Router(Layer):
    """[T, hidden] → which experts each token goes to.  Its weights are float32, on every rank the same."""

    def __init__(self, name: str, told: MoeConfig, config: ModelConfig, placement: Placement) -> None:
        super().__init__()
        self.config, self._placement = told, placement.exact()
        names, hidden, experts = config.names.mixture, config.hidden_size, told.experts
        self._name = name + names.router
        self.weight = self._placement.parameter(f"{self._name}.weight", experts, hidden)
        self.pieces = [Piece(f"{self._name}.weight", (experts, hidden), "weight")]
        self.bias: Tensor | None = None
        """[experts]"""
        if told.bias:
            shape = (1, experts) if names.bias_is_row else (experts,)
            self._bias = self._placement.parameter(f"{self._name}.choice", *shape)
            self.bias = self._bias.view(experts)
            first, *others = (name + other for other in names.router_bias)
            self.pieces.append(Piece(first, shape, "_bias", others=tuple(others)))
        self.shared_gate: Tensor | None = None
        """[1, hidden]"""
        if told.shared_gate:
            source = f"{name}{names.shared_gate}.weight"
            self.shared_gate = self._placement.parameter(source, 1, hidden)
            self.pieces.append(Piece(source, (1, hidden), "shared_gate"))
        self.product: Product | None = None
        """Float32: logits of the experts, then the shared ones' gate."""
        kernels = placement.kernels
        self._row_sums = in_order if kernels is None else kernels.row_sums

    def close(self, filled: dict[str, Tensor | InGroups]) -> None:
        self.attach()

    def attach(self) -> None:
        self.product = self._placement.product(self._rows(), None, self._name)

    def native_product(self, library: Native) -> NativeProduct:
        """Its product, or one like it where native ones are not the fastest."""
        if isinstance(self.product, NativeProduct):
            return self.product
        return NativeProduct(library, self._rows(), None)

    def _rows(self) -> Tensor:
        return self.weight if self.shared_gate is None else torch.cat((self.weight, self.shared_gate))

    def __call__(self, x: Tensor) -> Routed:
        assert self.product is not None
        found = self.product.multiply(x.float())
        assert isinstance(found, Tensor)
        if self.shared_gate is None:
            return route(found, self.bias, self.config, self._row_sums)
        routed = route(found[:, :-1], self.bias, self.config, self._row_sums)
        return Routed(routed.ids, routed.weights, sigmoid(found[:, -1]))


class Mixture(Module):
    """A router, the experts, and the MLP that each token passes as well."""

    def __init__(self, number: int, told: MoeConfig, config: ModelConfig, placement: Placement) -> None:
        name, names, hidden = f"{config.names.layers}.{number}.", config.names.mixture, config.hidden_size
        self.config, self.parallel, self.ops = told, placement.parallel, placement.ops
        self.router = Router(name, told, config, placement)
        self.experts = [_expert(name, expert, told, config, placement) for expert in range(told.experts)]
        self.shared = (
            None
            if told.shared is None
            else MLP(MlpNames.within(name + names.shared, names), told.shared, hidden, placement, False)
        )
        self._kernels: DeviceKernels | None = placement.kernels
        self.tokens = torch.zeros(told.experts, dtype=torch.int64, device=placement.device)
        """That each expert got, ever."""
        self.record = False
        """Whether `chosen` is to be kept."""
        self.chosen: Tensor | None = None
        """[T, chosen] int32: the experts of each token of the last step with `record`."""
        self._dtype = placement.dtype
        self._native: NativeMixture | Literal[False] | None = None
        """None: not made yet."""
        self._on_device: DeviceExperts | Literal[False] | None = None
        """Likewise."""

    @property
    def gate_up(self) -> list[Linear]:
        """Of each expert."""
        return [expert.gate_up for expert in self.experts]

    @property
    def down(self) -> list[RowParallelLinear]:
        return [expert.down for expert in self.experts]

    @property
    def form(self) -> Form:
        """In which it takes activations: as they are, for the router."""
        return PLAIN

    def __call__(self, x: Activations, present: Tensor | None = None) -> Tensor:
        """`present`: int64 [T], below 0 for rows that are padding, which nobody reads; None: there are
        none."""
        assert isinstance(x, Tensor)
        if native := self.native():
            return self._at_once(native, x)
        routed, taken = self.router(x), _Taken(x)
        if self.record:
            self.chosen = routed.ids
        if experts := self.on_device():
            shared = self._shared(taken)
            return self.parallel.all_reduce(experts(x, routed, shared, self.tokens, present))
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        self._add_experts(total, taken, routed)
        if (shared := self._shared(taken)) is not None:
            found = shared.float()
            total += found if routed.shared is None else found * routed.shared.unsqueeze(1)
        return self.parallel.all_reduce(total.to(x.dtype))

    def native(self) -> NativeMixture | None:
        """One call for the router and one for all experts, where they have kernels."""
        if self._native is None:
            self._native = self._made() or False
        return self._native or None

    def on_device(self) -> DeviceExperts | None:
        """All experts by a few launches, where their device has kernels for them."""
        if self._on_device is None:
            self._on_device = False
            if self._kernels is not None:
                gate_up, down = ([matrix.product for matrix in part] for part in (self.gate_up, self.down))
                found = self._kernels.experts(gate_up, down, self.config.expert.activation)
                self._on_device = found or False
            if self._on_device:
                for matrix in (*self.gate_up, *self.down):
                    if matrix.weight is not None:  # a parameter: it is loaded where the product has it
                        assert isinstance(matrix.product, DevicePlain)
                        matrix.weight = matrix.product.weight
        return self._on_device or None

    def weights_change(self) -> None:
        """Weights are about to be loaded, into other places of memory."""
        self._native = self._on_device = None

    def _shared(self, taken: _Taken) -> Tensor | None:
        """What the MLP gives that all tokens pass."""
        if self.shared is None:
            return None
        return self.ops.dequantize(self.shared(taken.all(self.shared.form, self)))

    def _made(self) -> NativeMixture | None:
        library = native()
        if library is None or not isinstance(self.ops, NativeOps):
            return None
        experts = NativeExperts.of(
            [matrix.product for matrix in self.gate_up],
            [matrix.product for matrix in self.down],
            self.config.expert.activation,
            self._dtype,
        )
        if experts is None:
            return None
        return NativeMixture(
            NativeRouter(library, self.router.native_product(library), self.router.bias, self.config), experts
        )

    def _at_once(self, native: NativeMixture, x: Tensor) -> Tensor:
        routed, taken = native.router(x), _Taken(x)
        if self.record:
            self.chosen = routed.ids
        shared = self._shared(taken)
        found = native.experts(taken.all(native.experts.form, self), routed, shared, self.tokens)
        return self.parallel.all_reduce(found)

    def _add_experts(self, total: Tensor, taken: _Taken, routed: Routed) -> None:
        """To [T, hidden] in float32."""
        chosen = routed.ids.shape[1]
        pairs = routed.ids.flatten().sort(stable=True)
        counts = torch.bincount(pairs.values, minlength=self.config.experts)
        self.tokens += counts.to(self.tokens.device)
        weights = routed.weights.flatten()[pairs.indices].unsqueeze(1)
        rows = pairs.indices // chosen
        first = 0
        for expert, count in zip(self.experts, counts.tolist(), strict=True):
            if not count:
                continue
            part = slice(first, first + count)
            found = self.ops.dequantize(expert(taken.rows(expert.form, rows[part], self)))
            total.index_add_(0, rows[part], found.float() * weights[part])
            first += count


class _Taken:
    """Activations [T, hidden] in the forms that products take, each made once."""

    def __init__(self, x: Tensor) -> None:
        self._x = x
        self._made: dict[str, Activations] = {PLAIN.kind: x}

    def all(self, form: Form, mixture: Mixture) -> Activations:
        if form.order is not None:
            return mixture.ops.quantize(self._x, form)
        if form.kind not in self._made:
            self._made[form.kind] = mixture.ops.quantize(self._x, form)
        return self._made[form.kind]

    def rows(self, form: Form, rows: Tensor, mixture: Mixture) -> Activations:
        """Of some tokens."""
        if form.order is not None:
            return mixture.ops.quantize(self._x[rows], form)
        found = self.all(form, mixture)
        if isinstance(found, Tensor):
            return found[rows]
        if isinstance(found, Quantized):
            return Quantized(found.values[rows], found.scales[rows])
        return GroupRows(found.values[rows], found.factors[rows])


def _expert(name: str, number: int, told: MoeConfig, config: ModelConfig, placement: Placement) -> MLP:
    names = config.names.mixture
    called = MlpNames.within(f"{name}{names.experts}.{number}", names)
    if names.gate_up_of_all:
        called = replace(called, gate_up=f"{name}{names.experts}.{number}.gate_up")
    expert = MLP(called, told.expert, config.hidden_size, placement, summed=False)
    for matrix, of_all in ((expert.gate_up, names.gate_up_of_all), (expert.down, names.down_of_all)):
        if of_all:
            matrix.pieces = [
                replace(
                    piece,
                    source=f"{name}{of_all}.{piece.source.rsplit('.', 1)[1]}",
                    shape=(told.experts, *piece.shape),
                    index=number,
                )
                for piece in matrix.pieces
            ]
    return expert
