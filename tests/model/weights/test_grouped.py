"""The inside form of quantized weights: what it holds, how it is cut and joined, and what it refuses."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
import torch

from baton.model.weights.grouped import Grouped, Stacked, as_one, joined, runs_of


def a_weight(out=6, inputs=128, group=32, bits=4, order=None, seed=0) -> Grouped:
    random = torch.Generator().manual_seed(seed)
    shape = (out, inputs // group)
    return Grouped(
        codes=torch.randint(0, 1 << bits, (out, inputs), generator=random, dtype=torch.uint8),
        scales=torch.randn(shape, generator=random),
        zeros=torch.randint(0, 1 << bits, shape, generator=random).float(),
        group=group,
        bits=bits,
        order=order,
    )


def by_hand(weight: Grouped) -> torch.Tensor:
    found = torch.empty(weight.codes.shape)
    for n in range(weight.out_features):
        for j in range(weight.in_features):
            k = j if weight.order is None else int(weight.order[j])
            group = j // weight.group
            found[n, k] = (weight.codes[n, j].float() - weight.zeros[n, group]) * weight.scales[n, group]
    return found


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("ordered", [False, True])
def test_a_weight_is_scale_times_code_minus_zero(bits, ordered):
    order = torch.randperm(128, generator=torch.Generator().manual_seed(1)).int() if ordered else None
    weight = a_weight(bits=bits, order=order)
    assert torch.equal(weight.dequantized(), by_hand(weight))
    assert torch.equal(weight.dequantized(torch.bfloat16), by_hand(weight).bfloat16())


def test_rows_and_columns_are_the_same_numbers():
    weight = a_weight(group=64)
    whole = weight.dequantized()
    assert torch.equal(weight.rows(2, 5).dequantized(), whole[2:5])
    assert torch.equal(weight.columns(64, 128).dequantized(), whole[:, 64:128])


def test_parts_of_other_groups_and_bits_are_joined_exactly():
    parts = [a_weight(3, group=64, bits=4), a_weight(2, group=32, bits=8), a_weight(4, group=128, bits=4)]
    whole = joined(parts)
    assert isinstance(whole, Stacked)
    assert [(part.group, part.bits) for part in whole.parts] == [(64, 4), (32, 8), (128, 4)]
    assert (whole.out_features, whole.in_features) == (9, 128)
    assert torch.equal(whole.dequantized(), torch.cat([part.dequantized() for part in parts]))


def test_neighbours_of_the_same_groups_and_bits_are_one_run():
    parts = [a_weight(3), a_weight(2, seed=1), a_weight(4, bits=8), a_weight(1)]
    whole = joined(parts)
    runs = runs_of(whole)
    assert [len(run) for run in runs] == [2, 1, 1]
    assert all(part is given for part, given in zip(itertools.chain(*runs), parts, strict=True))
    assert torch.equal(whole.dequantized(), torch.cat([part.dequantized() for part in parts]))
    alike = as_one(runs[0])
    assert torch.equal(alike.dequantized(), whole.dequantized()[:5])
    assert joined(parts[:1]) is parts[0]
    assert runs_of(parts[0]) == [(parts[0],)]


def test_parts_in_another_order_are_not_joined():
    order = torch.randperm(128, generator=torch.Generator().manual_seed(1)).int()
    assert joined([a_weight(order=order), a_weight(order=order.clone())]).order is order
    with pytest.raises(ValueError, match="different orders"):
        joined([a_weight(order=order), a_weight()])


def test_a_cut_through_a_group_or_an_order_is_refused():
    with pytest.raises(ValueError, match="inputs 0 to 47 cut a group of 32"):
        a_weight().columns(0, 48)
    order = torch.arange(128, dtype=torch.int32).flip(0)
    with pytest.raises(ValueError, match="act-order"):
        a_weight(order=order).columns(0, 64)
    assert a_weight(order=order).columns(0, 128).order is order


def test_bytes_are_those_of_the_packed_weight():
    assert a_weight(6, 128, 32, 4).nbytes == 6 * 64 + 8 * 6 * 4
    assert a_weight(6, 128, 32, 6).nbytes == 6 * 96 + 8 * 6 * 4
    assert a_weight(6, 128, 32, 8).nbytes == 6 * 128 + 8 * 6 * 4


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"bits": 3}, "codes of 3 bits; Baton multiplies 4, 6 and 8"),
        ({"group": 48}, "groups of 48 inputs; Baton multiplies groups of 32, 64 and 128"),
        ({"codes": torch.zeros(6, 120, dtype=torch.uint8)}, "120 inputs are no multiple of the group of 32"),
        ({"codes": torch.zeros(6, 128)}, "codes are [6, 128] in float32, not [out, in] in uint8"),
        ({"scales": torch.zeros(6, 3)}, "scales are [6, 3] in float32, not [6, 4] in float32"),
        ({"zeros": torch.zeros(6, 4).half()}, "zeros are [6, 4] in float16, not [6, 4] in float32"),
        ({"scales": torch.full((6, 4), float("nan"))}, "scales hold NaN or infinity"),
        ({"zeros": torch.full((6, 4), float("inf"))}, "zeros hold NaN or infinity"),
        ({"codes": torch.full((6, 128), 16, dtype=torch.uint8)}, "a code is 16, 4 bits hold 0 to 15"),
        ({"order": torch.zeros(128, dtype=torch.int32)}, "order does not name each of 128 inputs once"),
        ({"order": torch.arange(128)}, "order is [128] in int64, not [128] in int32"),
    ],
)
def test_parts_that_do_not_fit_are_refused_in_one_line(change, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        replace(a_weight(), **change)
