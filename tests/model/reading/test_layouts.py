"""Readers of quantized tensors: bit for bit what the format's reference computes, or known values."""

from __future__ import annotations

import pytest
import torch

from baton.model.checkpoint.quantization import Scheme
from baton.model.reading.layouts import LayoutError, expected, read
from baton.model.weights.grouped import Grouped
from tests.model import quantized_checkpoints as files

SHAPE = (24, 128)


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(5))


def the_same(found: Grouped, made: Grouped) -> bool:
    return torch.equal(found.dequantized(), made.dequantized())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 128, None])
def test_pack_quantized_is_what_compressed_tensors_decompresses(weight, bits, symmetric, group):
    library = pytest.importorskip("compressed_tensors.compressors.pack_quantized.base")
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    arguments = QuantizationArgs(
        num_bits=bits, symmetric=symmetric, group_size=group, strategy="group" if group else "channel"
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    middle = 1 << (bits - 1)
    groups = SHAPE[1] // group if group else 1
    random = torch.Generator().manual_seed(1)
    scale = (torch.rand((SHAPE[0], groups), generator=random) * 0.02 + 0.01).bfloat16()
    zeros = torch.randint(-middle, middle, scale.shape, generator=random, dtype=torch.int8)
    state = {"weight": weight.bfloat16(), "weight_scale": scale}
    if not symmetric:
        state["weight_zero_point"] = zeros
    compressor = library.PackedQuantizationCompressor
    stored = compressor.compress(state, scheme)
    true = compressor.decompress(stored, scheme)["weight"]
    found = read(Scheme("packed", bits, group, symmetric), stored, SHAPE)
    assert torch.equal(found.dequantized().bfloat16(), true)
    assert found.dequantized().bfloat16().std() > 0.1


def test_int_quantized_is_what_compressed_tensors_decompresses(weight):
    library = pytest.importorskip("compressed_tensors.compressors.naive_quantized.base")
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(num_bits=8, strategy="channel"),
        input_activations=QuantizationArgs(num_bits=8, strategy="token", dynamic=True),
    )
    scale = (weight.abs().amax(dim=1, keepdim=True) / 127).bfloat16()
    compressor = library.IntQuantizationCompressor
    stored = compressor.compress({"weight": weight.bfloat16(), "weight_scale": scale}, scheme)
    true = compressor.decompress(stored, scheme)["weight"]
    found = read(Scheme("int", 8, None, True), stored, SHAPE)
    assert torch.equal(found.dequantized().bfloat16(), true)


def test_awq_has_its_outputs_in_its_own_order():
    """One word by hand: nibbles 0 to 7 are outputs 0, 2, 4, 6, 1, 3, 5, 7."""
    inputs = 32
    word = 0x76543210  # nibble i holds i
    qweight = torch.full((inputs, 1), word, dtype=torch.int32)
    qzeros = torch.full((1, 1), 0x11111111, dtype=torch.int32)
    scales = torch.full((1, 8), 0.5).half()
    tensors = {"qweight": qweight, "qzeros": qzeros, "scales": scales}
    found = read(Scheme("awq", 4, 32, False), tensors, (8, inputs))
    outputs = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7]).float()  # where each output stands in the word
    assert torch.equal(found.dequantized(), ((outputs - 1) * 0.5)[:, None].expand(8, inputs))


def test_awq_of_random_values(weight):
    made = files.rounded(weight, 4, 64, False, torch.float16)
    found = read(Scheme("awq", 4, 64, False), files.awq(made), SHAPE)
    assert the_same(found, made)
    assert found.codes.shape == (SHAPE[0], SHAPE[1] // 2)


@pytest.mark.parametrize(("version", "stored"), [(1, 0x77777777), (2, -0x77777778)])
def test_gptq_stores_zeros_less_one_in_its_first_version(version, stored):
    """Inputs 0 to 7 are nibbles 0 to 7 of a word; a symmetric zero of 8 is stored as 7, or as 8."""
    tensors = {
        "qweight": torch.full((4, 8), 0x76543210, dtype=torch.int32),
        "qzeros": torch.full((1, 1), stored, dtype=torch.int32),
        "scales": torch.full((1, 8), 0.25).half(),
    }
    scheme = Scheme("gptq", 4, 32, True, zeros_less_one=version == 1)
    found = read(scheme, tensors, (8, 32)).dequantized()
    assert torch.equal(found, (((torch.arange(32) % 8) - 8.0) * 0.25).expand(8, 32))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("ordered", [False, True])
def test_gptq_of_random_values(weight, bits, version, ordered):
    make = files.in_order if ordered else lambda *given: files.rounded(*given[:3], False, given[3])
    made = make(weight, bits, 32, torch.float16)
    made = Grouped(made.codes, made.scales, made.zeros.clamp(1), 32, bits, made.order)  # (0 - 1 is no code)
    found = read(Scheme("gptq", bits, 32, False, ordered, version == 1), files.gptq(made, version), SHAPE)
    assert the_same(found, made)
    assert (found.order is None) == (not ordered)


def test_an_order_that_is_none_is_left_out(weight):
    made = files.rounded(weight, 4, 32, True, torch.bfloat16)
    tensors = files.packed(made, True) | {"weight_g_idx": torch.full((128,), -1, dtype=torch.int32)}
    assert read(Scheme("packed", 4, 32, True, ordered=True), tensors, SHAPE).order is None


def test_groups_of_other_sizes_than_they_say_are_refused(weight):
    made = files.rounded(weight, 4, 32, False, torch.float16)
    tensors = files.gptq(made) | {"g_idx": torch.zeros(128, dtype=torch.int32)}
    with pytest.raises(LayoutError, match="g_idx does not give each of 4 groups 32 inputs"):
        read(Scheme("gptq", 4, 32, False), tensors, SHAPE)


def test_inputs_that_are_no_multiple_of_a_group_are_refused():
    with pytest.raises(LayoutError, match="96 inputs are no multiple of the group of 64"):
        expected(Scheme("packed", 4, 64, True), (8, 96))
    with pytest.raises(LayoutError, match="40 inputs are no multiple of 32"):
        expected(Scheme("int", 8, None, True), (8, 40))
