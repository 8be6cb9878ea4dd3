"""Blocks of GGUF's types against the `gguf` package, whose dequantizers are the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.model.checkpoint.gguf import BLOCKS, FLOATS, TYPES
from baton.model.reading.ggml import BITS, EXACT, decoded, plain, scales_finite
from tests.model.gguf_files import K_SCALES, dequantized, gguf, quantized

WITHOUT_MINIMUM = ("Q4_0", "Q5_0", "Q8_0", "MXFP4")
SHAPE = (33, 512)


def weights(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(SHAPE).astype(np.float32)


def bytes_of(data: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(data).view(np.uint8).reshape(-1))


def test_types_and_sizes_are_the_packages():
    assert {kind.value: kind.name for kind in gguf.GGMLQuantizationType} == TYPES
    for kind, sizes in BLOCKS.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]] == sizes
    assert set(BITS) | set(FLOATS) == set(BLOCKS)


@pytest.mark.parametrize("kind", FLOATS)
def test_floating_point_is_a_view(kind):
    data = quantized(weights(), kind)
    memory = bytes_of(data)
    found = plain(kind, memory, SHAPE)
    assert found.data_ptr() == memory.data_ptr()
    assert np.array_equal(found.float().numpy(), dequantized(data, kind))


@pytest.mark.parametrize("kind", WITHOUT_MINIMUM)
def test_without_a_minimum_every_bit_is_the_references(kind):
    data = quantized(weights(), kind)
    found, error = decoded(kind, bytes_of(data), SHAPE)
    assert (found.bits, found.group, error) == (BITS[kind], 32, 0.0)
    assert np.array_equal(found.dequantized().numpy(), dequantized(data, kind))


@pytest.mark.parametrize("kind", sorted(EXACT - set(FLOATS) - set(WITHOUT_MINIMUM)))
def test_with_a_minimum_only_its_quotient_is_rounded(kind):
    """w = scale * (code - zero) with zero = -minimum / scale in float32."""
    data = quantized(weights(), kind)
    found, error = decoded(kind, bytes_of(data), SHAPE)
    exact = torch.from_numpy(dequantized(data, kind)).view(SHAPE[0], -1, 32)
    largest = (found.scales.abs() * (found.zeros.abs() + 15)).unsqueeze(2)
    assert error == 0.0
    assert bool(((found.dequantized().view(exact.shape) - exact).abs() <= 2.0**-22 * largest).all())


def test_groups_without_a_scale_are_their_minimum():
    """Of Q4_1 and Q4_K: constant weights have d = 0."""
    for kind, places in (("Q4_1", (0, 2)), ("Q4_K", (0, 2))):
        data = quantized(weights(), kind).copy()
        blocks = data.reshape(-1, BLOCKS[kind][1])
        blocks[:, places[0] : places[0] + 2] = 0
        blocks[::2, places[1] : places[1] + 2] = 0
        found, _ = decoded(kind, bytes_of(data), SHAPE)
        assert np.array_equal(found.dequantized().numpy(), dequantized(data, kind)), kind


@pytest.mark.parametrize("sign", [1, -1])
def test_of_q6_k_the_larger_of_two_groups_is_exact_and_the_error_is_told(sign):
    data = quantized(weights(), "Q6_K").copy()
    halves = data.reshape(-1, 210)[:, 208:].copy().view(np.float16) * np.float16(sign)
    data.reshape(-1, 210)[:, 208:] = halves.view(np.uint8)
    exact = torch.from_numpy(dequantized(data, "Q6_K"))
    found, error = decoded("Q6_K", bytes_of(data), SHAPE)
    wrong = found.dequantized() - exact
    assert error == pytest.approx(float(wrong.norm() / exact.norm()), rel=1e-3)
    assert 0 < error < 0.01
    scales = torch.from_numpy(data.reshape(-1, 210)[:, 192:208].copy().view(np.int8)).float().abs()
    larger = scales.view(-1, 8, 2) >= scales.view(-1, 8, 2).flip(2)
    kept = wrong.view(-1, 8, 2, 16)[larger]
    assert float(kept.abs().max()) < 1e-6 * float(exact.abs().max())
    # The other half is off by at most half a step, an eighth of the larger scale.
    assert bool((wrong.view(-1, 8, 32).abs().amax(2) <= found.scales.view(-1, 8).abs() * 0.501).all())


def test_q6_k_of_zeros():
    found, error = decoded("Q6_K", torch.zeros(210, dtype=torch.uint8), (1, 256))
    assert not bool(found.dequantized().any())
    assert error == 0.0


@pytest.mark.parametrize("kind", sorted(BITS))
def test_scales_that_are_no_numbers_are_found(kind):
    data = quantized(weights(), kind).copy()
    assert scales_finite(kind, bytes_of(data))
    for place in K_SCALES.get(kind, (0,)):
        wrong = data.copy()
        nan = (0xFF,) if kind == "MXFP4" else (0, 0x7E)
        wrong.reshape(-1, BLOCKS[kind][1])[5, place : place + len(nan)] = nan
        assert not scales_finite(kind, bytes_of(wrong))
        with pytest.raises(ValueError, match="NaN or infinity"):
            decoded(kind, bytes_of(wrong), SHAPE)
