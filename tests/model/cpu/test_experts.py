"""The router and the experts' products on every instruction set: what products one by one give, bit for bit,
and the same for a token whatever else is in the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from baton.model.cpu.experts import NativeExperts, NativeRouter, Routed
from baton.model.cpu.grouped import NativeGroupedProduct
from baton.model.cpu.library import instruction_sets, load
from baton.model.cpu.linear import NativeInt8Product, NativeProduct, serves
from baton.model.cpu.products import NativeWeight
from baton.model.cpu.steps import NativeOps
from baton.model.description.model import Activation, MlpConfig, MoeConfig
from baton.model.ops.fused import Activations
from baton.model.weights.group_rows import GroupRows
from baton.model.weights.quantize import quantize
from baton.model.weights.quantized import Quantized

BF16, F32 = torch.bfloat16, torch.float32
FORMS = (
    ("plain", F32),
    ("plain", BF16),
    ("int8", F32),
    ("int8", BF16),
    ("int4 g32", BF16),
    ("int4 g64", F32),
    ("int4 g64", BF16),
    ("int8 g64", BF16),
)
cases = pytest.mark.parametrize("isa", instruction_sets() or [pytest.param("", marks=pytest.mark.skip)])
forms = pytest.mark.parametrize(("form", "dtype"), FORMS)


def config_of(experts: int, chosen: int, **more: object) -> MoeConfig:
    return MoeConfig(experts, chosen, MlpConfig(64), **more)  # type: ignore[arg-type]


class Layer:
    """The experts of a layer, and what they compute one by one."""

    def __init__(
        self,
        isa: str,
        form: str,
        dtype: torch.dtype,
        experts: int = 7,
        hidden: int = 128,
        size: int = 192,
        bias: bool = False,
        activation: Activation = "silu",
    ) -> None:
        self.library, self.form, self.dtype = load(isa), form, dtype
        self.activation: Activation = activation
        self.hidden = hidden
        self.exact: list[tuple[Tensor, Tensor]] = []
        self.gate_up, self.down = [], []
        for _ in range(experts):
            up, exact_up = self._product(2 * size, hidden, bias)
            down, exact_down = self._product(hidden, size, bias)
            self.gate_up.append(up)
            self.down.append(down)
            self.exact.append((exact_up, exact_down))
        self.ops = NativeOps(self.library, dtype)
        self.native = NativeExperts(self.library, self.gate_up, self.down, activation, dtype)

    def _product(self, out: int, inputs: int, bias: bool) -> tuple[NativeWeight, Tensor]:
        weight = (torch.randn(out, inputs) / inputs**0.5).to(self.dtype)
        added = torch.randn(out).to(self.dtype) if bias else None
        if " g" in self.form:
            bits, group = int(self.form[3]), int(self.form.partition(" g")[2])
            grouped = quantize(weight.float(), bits, group)
            exact = grouped.dequantized()
            return NativeGroupedProduct(self.library, grouped, added, self.dtype), exact
        if not serves(self.library, torch.int8 if self.form == "int8" else self.dtype):
            pytest.skip(f"no native products of {self.form} in {self.dtype} here")
        kind = NativeInt8Product if self.form == "int8" else NativeProduct
        return kind(self.library, weight, added), weight.float()

    def one_by_one(self, x: Tensor, routed: Routed, shared: Tensor | None = None) -> Tensor:
        """A product for each expert, results added in the order of experts."""
        taken = self.ops.quantize(x, self.native.form)
        sums = torch.zeros(len(x), self.hidden)
        for expert, (first, second) in enumerate(zip(self.gate_up, self.down, strict=True)):
            rows, places = torch.nonzero(routed.ids == expert, as_tuple=True)
            found = first.multiply(rows_of(taken, rows))
            found = second.multiply(self.ops.gated_mul(found, second.form, self.activation))
            sums[rows] += found.float() * routed.weights[rows, places].unsqueeze(1)
        if shared is not None:
            gate = 1.0 if routed.shared is None else routed.shared.unsqueeze(1)
            sums += shared.float() * gate
        return sums.to(self.dtype)

    def __call__(self, x: Tensor, routed: Routed, shared: Tensor | None = None) -> Tensor:
        shared = None if shared is None else shared.clone()
        return self.native(self.ops.quantize(x, self.native.form), routed, shared)


def rows_of(x: Activations, rows: Tensor) -> Activations:
    if isinstance(x, Tensor):
        return x[rows]
    if isinstance(x, GroupRows):
        return GroupRows(x.values[rows], x.factors[rows])
    return Quantized(x.values[rows], x.scales[rows])


def chosen_at_random(tokens: int, among: Sequence[int], chosen: int, shared: bool = False) -> Routed:
    ids = torch.stack([torch.tensor(among)[torch.randperm(len(among))[:chosen]] for _ in range(tokens)])
    weights = torch.rand(tokens, chosen)
    return Routed(ids.int().sort(dim=1).values, weights, torch.rand(tokens) if shared else None)


@cases
@forms
def test_experts_give_what_their_products_give_one_by_one(isa: str, form: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    layer = Layer(isa, form, dtype)
    for tokens, among, chosen in (
        (1, range(7), 3),
        (2, range(7), 7),
        (13, [2], 1),  # one busy, all others idle
        (14, [0, 6], 2),
        (300, range(7), 3),
        (150, [5, 6], 1),
    ):
        x = torch.randn(tokens, layer.hidden).to(dtype)
        for gate in (None, False, True):
            routed = chosen_at_random(tokens, list(among), chosen, bool(gate))
            shared = None if gate is None else torch.randn(tokens, layer.hidden).to(dtype)
            found, expected = layer(x, routed, shared), layer.one_by_one(x, routed, shared)
            assert found.dtype == dtype
            assert torch.equal(found, expected), (tokens, chosen, gate)


@cases
@forms
def test_experts_multiply_their_weights(isa: str, form: str, dtype: torch.dtype) -> None:
    """Against float32 with the same weights: what remains is the rounding of activations and results."""
    torch.manual_seed(2)
    layer = Layer(isa, form, dtype)
    x = torch.randn(40, layer.hidden).to(dtype)
    routed = chosen_at_random(40, range(7), 2)
    sums = torch.zeros(40, layer.hidden)
    for token in range(40):
        for expert, weight in zip(routed.ids[token].tolist(), routed.weights[token], strict=True):
            up, down = layer.exact[expert]
            gate, value = (up @ x[token].float()).chunk(2)
            sums[token] += weight * (down @ (torch.nn.functional.silu(gate) * value))
    error = (layer(x, routed).float() - sums).norm() / sums.norm()
    assert error < (1e-5 if form == "plain" and dtype == F32 else 0.03)


@cases
@forms
def test_a_token_does_not_depend_on_its_company(isa: str, form: str, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    layer = Layer(isa, form, dtype, experts=5, hidden=64, size=64)
    x = torch.randn(300, layer.hidden).to(dtype)
    routed = chosen_at_random(300, range(5), 2)
    whole = layer(x, routed)
    for first, stop in [(token, token + 1) for token in range(0, 300, 37)] + [(3, 5), (100, 113), (7, 290)]:
        some = Routed(routed.ids[first:stop].contiguous(), routed.weights[first:stop].contiguous())
        assert torch.equal(layer(x[first:stop], some), whole[first:stop])


@cases
@pytest.mark.parametrize("form", ["plain", "int8", "int4 g32"])
def test_biases_odd_sizes_and_another_activation(isa: str, form: str) -> None:
    torch.manual_seed(4)
    hidden, size = (96, 96) if " g" in form else (72, 107)
    layer = Layer(isa, form, F32, 4, hidden, size, bias=True, activation="gelu_tanh")
    for tokens in (1, 31):
        x, routed = torch.randn(tokens, hidden), chosen_at_random(tokens, range(4), 2)
        shared = torch.randn(tokens, hidden)
        assert torch.equal(layer(x, routed, shared), layer.one_by_one(x, routed, shared))


@cases
def test_tokens_of_each_expert_are_counted(isa: str) -> None:
    layer = Layer(isa, "int4 g32", F32, 6, 32, 32)
    counts = torch.tensor([100, 0, 0, 0, 0, 0])
    routed = Routed(torch.tensor([[0, 2], [2, 5], [0, 2]], dtype=torch.int32), torch.rand(3, 2))
    for _ in range(2):
        layer.native(layer.ops.quantize(torch.randn(3, 32), layer.native.form), routed, None, counts)
    assert counts.tolist() == [104, 0, 6, 0, 0, 2]


def test_what_is_not_alike_is_not_one_call() -> None:
    if not instruction_sets():
        pytest.skip("no native library here")
    layer = Layer(instruction_sets()[0], "int4 g32", BF16, 2, 64, 64)
    other = Layer(instruction_sets()[0], "int4 g32", BF16, 2, 64, 96)
    assert NativeExperts.of(layer.gate_up, layer.down, "silu", BF16) is not None
    assert NativeExperts.of([layer.gate_up[0], other.gate_up[0]], layer.down, "silu", BF16) is None
    assert NativeExperts.of([object(), object()], layer.down, "silu", BF16) is None
    ordered = quantize(torch.randn(128, 64), 4, 32)
    ordered = replace(ordered, order=torch.randperm(64).int())
    product = NativeGroupedProduct(layer.library, ordered, None, BF16)
    assert NativeExperts.of([layer.gate_up[0], product], layer.down, "silu", BF16) is None


def router_of(isa: str, rows: Tensor, config: MoeConfig, bias: Tensor | None = None) -> NativeRouter:
    return NativeRouter(load(isa), NativeProduct(load(isa), rows, None), bias, config)


ROUTERS = {
    "softmax": config_of(64, 6, least_sum=1e-12),
    "not normalized": config_of(16, 4, normalized=False, factor=2.5),
    "choice bias": config_of(64, 6, bias="choice", least_sum=1e-12),
    "sigmoid": config_of(33, 8, scores="sigmoid", bias="choice", factor=1.5),
    "groups": config_of(32, 4, scores="sigmoid", bias="choice", groups=8, chosen_groups=3),
    "groups of one": config_of(6, 2, groups=6, chosen_groups=4),
    "logits bias": config_of(32, 4, scores="chosen_softmax", bias="logits"),
    "all": config_of(5, 5),
    "one": config_of(7, 1),
}


def expected_choice(config: MoeConfig, logits: Tensor, bias: Tensor | None) -> tuple[list[int], list[float]]:
    """Of one token, in float64."""
    values = logits.double()
    if config.bias == "logits" and bias is not None:
        values = values + bias
    scores = {"softmax": values.softmax(0), "sigmoid": values.sigmoid(), "chosen_softmax": values}[
        config.scores
    ]
    choice = scores + bias if config.bias == "choice" and bias is not None else scores
    allowed = list(range(config.experts))
    if config.groups > 1:
        size = config.experts // config.groups
        sums = choice.view(config.groups, size).topk(min(2, size)).values.sum(1)
        best = sorted(range(config.groups), key=lambda group: (-sums[group], group))[: config.chosen_groups]
        allowed = [expert for expert in allowed if expert // size in best]
    ids = sorted(sorted(allowed, key=lambda expert: (-choice[expert], expert))[: config.chosen])
    weights = scores[ids]
    if config.scores == "chosen_softmax":
        weights = weights.softmax(0)
    elif config.normalized:
        weights = weights / max(float(weights.sum()), config.least_sum)
    return ids, (weights * config.factor).tolist()


@cases
@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_router_chooses(isa: str, name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(len(name))
    config = ROUTERS[name]
    weight, hidden = torch.randn(config.experts, 72) / 4, 72
    bias = torch.randn(config.experts) / 4 if config.bias else None
    gate = torch.randn(hidden) / 4 if name in ("softmax", "logits bias") else None
    rows = weight if gate is None else torch.cat((weight, gate.unsqueeze(0)))
    router = router_of(isa, rows, config, bias)
    x = torch.randn(70, hidden).to(dtype)
    found = router(x)
    for token, row in enumerate(x.double()):
        ids, weights = expected_choice(config, weight.double() @ row, bias)
        assert found.ids[token].tolist() == ids
        assert found.weights[token].tolist() == pytest.approx(weights, rel=1e-4, abs=1e-7)
        if gate is not None and found.shared is not None:
            expected = 1 / (1 + math.exp(-float(gate.double() @ row)))
            assert float(found.shared[token]) == pytest.approx(expected, rel=1e-4)
    assert (found.shared is None) == (gate is None)
    for first, stop in ((0, 1), (69, 70), (3, 16)):
        part = router(x[first:stop])
        assert torch.equal(part.ids, found.ids[first:stop])
        assert torch.equal(part.weights, found.weights[first:stop])


@cases
def test_of_equal_scores_the_lowest_expert_is_chosen(isa: str) -> None:
    weight = torch.ones(40, 8)
    weight[[7, 30, 39]] = 2.0
    router = router_of(isa, weight, config_of(40, 5))
    found = router(torch.ones(2, 8))
    assert found.ids.tolist() == [[0, 1, 7, 30, 39]] * 2
    saturated = router_of(isa, 100 * weight, config_of(40, 5, scores="sigmoid"))
    assert saturated(torch.ones(1, 8)).ids.tolist() == [[0, 1, 2, 3, 4]]


def test_a_router_refuses_what_it_has_no_room_for() -> None:
    if not instruction_sets():
        pytest.skip("no native library here")
    isa, weight = instruction_sets()[0], torch.ones(80, 8)
    with pytest.raises(ValueError, match="70 of 80 experts for each token"):
        router_of(isa, weight, config_of(80, 70))
    with pytest.raises(ValueError, match="80 experts in 3 groups"):
        router_of(isa, weight, config_of(80, 2, groups=3, chosen_groups=1))
