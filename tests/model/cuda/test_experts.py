"""Products of experts in Triton's interpreter, against one expert after the other in PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.executor.torch_executor import TorchExecutor
from baton.launch.planning.instance_config import instance_config
from baton.model.cuda.products import pairs
from baton.model.cuda.products.experts import experts_of
from baton.model.cuda.products.layout import INT4
from baton.model.cuda.products.linear import TritonGroups, TritonInt8, TritonPlain
from baton.model.ops.fused import FusedOps
from baton.model.ops.routing import Routed
from baton.model.weights.grouped import Grouped
from tests.executor.driver import Driver
from tests.model.checkpoints import VOCAB, make_checkpoint
from tests.model.cuda.test_products import TOLERANCES, a_weight
from tests.model.cuda.where import DEVICE, serve

EXPERTS, HIDDEN, INNER = 5, 64, 32


def here(tensor: Tensor) -> Tensor:
    return tensor.to(DEVICE)


def routed_of(tokens: int, chosen: int, experts: int = EXPERTS) -> Routed:
    ids = torch.stack([torch.randperm(experts)[:chosen].sort().values for _ in range(tokens)])
    return Routed(here(ids.int()), here(torch.rand(tokens, chosen)))


@pytest.mark.parametrize(("tokens", "chosen", "rows"), [(1, 2, 16), (40, 3, 16), (700, 2, 64), (0, 2, 16)])
@pytest.mark.parametrize("padded", [False, True])
def test_pairs_are_sorted_by_expert(tokens: int, chosen: int, rows: int, padded: bool):
    torch.manual_seed(tokens)
    routed = routed_of(tokens, chosen) if tokens else Routed(here(torch.zeros(0, 2).int()), torch.zeros(0, 2))
    present = torch.arange(tokens) - tokens * 2 // 3 if padded else None
    counts = here(torch.arange(EXPERTS))
    found = pairs.sort(routed.ids, EXPERTS, rows, counts, None if present is None else here(present))
    ids = routed.ids.cpu().flatten()
    there = torch.ones(len(ids), dtype=torch.bool)
    if present is not None:
        there = (present >= 0).repeat_interleave(chosen)
    expected = torch.where(there, ids, EXPERTS).sort(stable=True).indices[: int(there.sum())]
    order, places, tiles = (part.cpu() for part in found)
    assert torch.equal(order[: len(expected)].long(), expected)
    assert torch.equal(places[expected].long(), torch.arange(len(expected)))
    assert (places[~there] == -1).all()
    assert torch.equal(counts.cpu(), torch.arange(EXPERTS) + torch.bincount(ids[there], minlength=EXPERTS))
    covered = [
        (first + row, expert)
        for expert, first, count in tiles.tolist()
        for row in range(count)
        if count <= rows
    ]
    assert sorted(covered) == list(enumerate(ids[expected].tolist()))


def plains(dtype: torch.dtype, outputs: int, inputs: int) -> tuple[list[TritonPlain], list[Tensor]]:
    made = [torch.randn(outputs, inputs).to(dtype) / inputs**0.5 for _ in range(EXPERTS)]
    return [TritonPlain(here(weight), None, False) for weight in made], [weight.float() for weight in made]


def grouped(
    dtype: torch.dtype, outputs: int, inputs: int, bits: int, biased: bool
) -> tuple[list[TritonGroups], list[Tensor], list[Tensor]]:
    kinds = ["eighths", "whole", "any", "symmetric", "eighths"]
    made = [a_weight(outputs, inputs, 32, bits, kind) for kind in kinds]
    biases = [torch.randn(outputs).to(dtype) * biased for _ in made]
    products = [
        TritonGroups(weight, here(bias) if biased else None, dtype, DEVICE, False)
        for weight, bias in zip(made, biases, strict=True)
    ]
    return products, [weight.dequantized() for weight in made], [bias.float() for bias in biases]


def reference(
    x: Tensor, routed: Routed, weights: list[list[Tensor]], biases: list[list[Tensor]], activation: str
) -> Tensor:
    """[T, hidden], float32 throughout."""
    total = torch.zeros(x.shape)
    for token in range(len(x)):
        for expert, weight in zip(routed.ids[token].tolist(), routed.weights[token].tolist(), strict=True):
            both = x[token : token + 1].float() @ weights[0][expert].t() + biases[0][expert]
            inner = FusedOps().gated_mul(both, activation=activation)  # type: ignore[arg-type]
            assert isinstance(inner, Tensor)
            total[token] += weight * (inner @ weights[1][expert].t() + biases[1][expert])[0]
    return total


def none_of(outputs: int) -> list[Tensor]:
    return [torch.zeros(outputs)] * EXPERTS


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("form", ["plain", "4 bits", "8 bits"])
def test_experts(form: str, dtype: torch.dtype):
    """With biases and gpt-oss's gate where weights are in groups; zero points of several kinds meet."""
    torch.manual_seed(1)
    if form == "plain":
        (first, one), (second, two) = plains(dtype, 2 * INNER, HIDDEN), plains(dtype, HIDDEN, INNER)
        biases, activation = [none_of(2 * INNER), none_of(HIDDEN)], "silu"
    else:
        bits = int(form[0])
        first, one, of_first = grouped(dtype, 2 * INNER, HIDDEN, bits, True)
        second, two, of_second = grouped(dtype, HIDDEN, INNER, bits, True)
        biases, activation = [of_first, of_second], "swiglu_oai"
    experts = experts_of(first, second, activation, False)
    assert experts is not None
    x, routed = torch.randn(4, HIDDEN).to(dtype) / 4, routed_of(4, 2)
    counts = here(torch.zeros(EXPERTS, dtype=torch.int64))
    shared = torch.randn(4, HIDDEN).to(dtype)
    routed.shared = here(torch.rand(4))
    found = experts(here(x), routed, here(shared), counts).cpu()
    assert found.dtype == dtype
    plain_routed = Routed(routed.ids.cpu(), routed.weights.cpu())
    expected = reference(x, plain_routed, [one, two], biases, activation)
    expected += shared.float() * routed.shared.cpu().unsqueeze(1)
    tolerance = 3 * TOLERANCES[dtype]
    torch.testing.assert_close(
        found.float(), expected, atol=tolerance * float(expected.abs().max()), rtol=tolerance
    )
    assert counts.sum() == 8


def test_a_token_depends_on_itself_alone_and_padding_on_nothing():
    """In tiles of few rows and of many, beside others and beside rows of padding."""
    torch.manual_seed(2)
    (first, _), (second, _) = plains(torch.float16, 2 * INNER, HIDDEN), plains(torch.float16, HIDDEN, INNER)
    experts = experts_of(first, second, "silu", False)
    assert experts is not None
    x, routed = here(torch.randn(50, HIDDEN).half()), routed_of(50, 2)
    counts = here(torch.zeros(EXPERTS, dtype=torch.int64))

    def of(part: slice, present: Tensor | None = None) -> Tensor:
        some = Routed(routed.ids[part].contiguous(), routed.weights[part].contiguous())
        return experts(x[part], some, None, counts, present)

    whole = of(slice(0, 50))
    assert counts.sum() == 100
    assert torch.equal(of(slice(7, 8))[0], whole[7])
    counts.zero_()
    some = of(slice(5, 9), here(torch.tensor([-1, 3, 0, -1])))
    assert torch.equal(some[1:3], whole[6:8])
    assert some[[0, 3]].count_nonzero() == 0
    assert counts.sum() == 4


def test_numbers_of_mxfp4_and_views():
    """Experts' own products have views of what is multiplied, so what is loaded there is multiplied."""
    torch.manual_seed(3)

    def made(outputs: int, inputs: int) -> Grouped:
        codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
        scales = 2.0 ** torch.randint(-6, -2, (outputs, inputs // 32))
        return Grouped(codes, scales, torch.zeros_like(scales), 32, 4, e2m1=True)

    weights = [[made(*sizes) for _ in range(EXPERTS)] for sizes in ((2 * INNER, HIDDEN), (HIDDEN, INNER))]
    products = [[TritonGroups(one, None, torch.float32, DEVICE, False) for one in part] for part in weights]
    experts = experts_of(*products, "silu", False)
    assert experts is not None
    x, routed = torch.randn(2, HIDDEN), routed_of(2, 3)
    counts = here(torch.zeros(EXPERTS, dtype=torch.int64))
    biases = [none_of(2 * INNER), none_of(HIDDEN)]
    dense = [[one.dequantized() for one in part] for part in weights]
    plain_routed = Routed(routed.ids.cpu(), routed.weights.cpu())
    expected = reference(x, plain_routed, dense, biases, "silu")
    torch.testing.assert_close(experts(here(x), routed, None, counts).cpu(), expected, atol=1e-4, rtol=1e-4)
    for product in products[1]:
        product.parts[0].codes.zero_()
    assert experts(here(x), routed, None, counts).count_nonzero() == 0


def test_what_there_is_no_kernel_for():
    """Bytes by bytes, inputs in act-order, matrices of several widths of bits: one expert after the other."""
    bytes_ = [TritonInt8(torch.randn(4, 32), None, DEVICE) for _ in range(2)]
    zeros, order = torch.zeros(4, 1), torch.randperm(32).int()
    act_order = Grouped(torch.zeros(4, 32).byte(), torch.ones(4, 1), zeros, 32, 4, order)
    ordered = [TritonGroups(act_order, None, torch.float32, DEVICE, False) for _ in range(2)]
    mixed = [TritonGroups(a_weight(4, 32, 32, bits), None, torch.float32, DEVICE, False) for bits in (4, 8)]
    good = [TritonGroups(a_weight(4, 32, 32, 4), None, torch.float32, DEVICE, False) for _ in range(2)]
    assert good[0].parts[0].kind == INT4
    for products in (bytes_, ordered, mixed):
        assert experts_of(products, good, "silu", False) is None
    assert experts_of(good, good, "silu", False) is not None


@pytest.mark.parametrize("variant", ["qwen3-moe", "ernie4_5-moe"])
def test_tokens_are_the_cpus(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make_checkpoint(tmp_path, variant, num_hidden_layers=2)
    sizes = dict(
        max_model_len=32, dtype="float32", block_size=8, num_blocks=12, max_num_seqs=3, num_threads=1
    )

    def answers(device: str) -> tuple[list[list[int]], list[list[int]]]:
        """Tokens, and what experts took; a CPU leaves out in the last layer what nobody reads."""
        config = instance_config(model=str(tmp_path), device=device, **sizes)
        executor = TorchExecutor.from_config(config, 0, "")
        mixtures = executor._model.mixtures
        before = [mixture.tokens.clone() for mixture in mixtures]
        driver = Driver(executor)
        prompts = torch.randint(3, VOCAB, (2, 7), generator=torch.Generator().manual_seed(1)).tolist()
        made = [driver.add(prompt, 2) for prompt in prompts]
        driver.run()
        counts = [mixture.tokens - first for mixture, first in zip(mixtures, before, strict=True)]
        assert [mixture.on_device() is not None for mixture in mixtures] == [serves] * len(mixtures)
        if serves:
            assert {int(count.sum()) for count in counts} == {(2 * 7 + 2) * mixtures[0].config.chosen}
        executor.close()
        return [request.tokens for request in made], [count.tolist() for count in counts[:-1]]

    serves = False
    expected = answers("cpu")
    serve(monkeypatch)
    serves = True
    assert answers(DEVICE.type) == expected
