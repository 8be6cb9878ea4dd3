"""gpt-oss' experts: of tensors that hold all of them, in floating point and in MXFP4."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from baton.model.checkpoint.files import LoadError
from baton.model.checkpoint.quantization import Quantization, Scheme
from baton.model.reading.layouts import LayoutError, mxfp4
from baton.model.reading.safetensors import SafetensorsSource
from baton.model.weights.grouped import Grouped
from tests.model import quantized_checkpoints as files

EXPERTS, HIDDEN, SIZE = 3, 64, 32
PREFIX = "model.layers.0.mlp.experts"
MXFP4 = Quantization("mxfp4", ((lambda module: True, Scheme("mxfp4", 4, 32, True)),))
SHAPES = {"gate_proj": (SIZE, HIDDEN), "up_proj": (SIZE, HIDDEN), "down_proj": (HIDDEN, SIZE)}


def of_expert(tensors: dict[str, torch.Tensor], expert: int, part: str) -> torch.Tensor:
    """[outputs, inputs] of what transformers calls gate_up_proj and down_proj."""
    whole = tensors["down_proj" if part == "down_proj" else "gate_up_proj"][expert].t()
    return whole if part == "down_proj" else whole[part == "up_proj" :: 2]


@pytest.fixture
def exact() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {
        "gate_up_proj": torch.randn(EXPERTS, HIDDEN, 2 * SIZE),
        "down_proj": torch.randn(EXPERTS, SIZE, HIDDEN),
    }


def saved(directory: Path, tensors: dict[str, torch.Tensor]) -> Path:
    found = {f"{PREFIX}.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(found, directory / "model.safetensors")
    return directory


def in_mxfp4(exact: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    near, stored = {}, {}
    for name, tensor in exact.items():
        found, parts = files.mxfp4(tensor.transpose(1, 2))
        near[name] = found.transpose(1, 2)
        stored |= {f"{name}_{part}": tensor for part, tensor in parts.items()}
    return near, stored


def test_mxfp4_is_what_transformers_makes_of_it() -> None:
    integrations = pytest.importorskip("transformers.integrations.mxfp4")
    random = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (6, 3, 16), generator=random, dtype=torch.uint8)
    scales = torch.randint(100, 150, (6, 3), generator=random, dtype=torch.uint8)
    scales[0, 0], scales[0, 1], scales[0, 2] = 1, 0, 250
    found = mxfp4(blocks, scales)
    expected = integrations.convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)
    assert torch.equal(found.dequantized(), expected[0].t())
    scales[4, 2] = 255
    with pytest.raises(LayoutError, match="scales hold NaN"):
        mxfp4(blocks, scales)


def test_experts_in_floating_point(exact: dict[str, torch.Tensor], tmp_path: Path) -> None:
    biases = {
        "gate_up_proj_bias": torch.randn(EXPERTS, 2 * SIZE),
        "down_proj_bias": torch.rand(EXPERTS, HIDDEN),
    }
    saved(tmp_path, exact | biases)
    with SafetensorsSource(tmp_path, None, "gpt_oss") as source:
        assert len(list(source.names())) == EXPERTS * 6
        for expert in (2, 0, 1):
            for part, shape in SHAPES.items():
                name, expected = f"{PREFIX}.{expert}.{part}", of_expert(exact, expert, part)
                assert source.check(f"{name}.weight", shape) == ({f"{name}.weight"}, [])
                assert torch.equal(source.read(f"{name}.weight", shape, 0, 3, 9), expected[3:9])
                assert torch.equal(source.read(f"{name}.weight", shape, 1, 8, 24), expected[:, 8:24])
                of_all = biases["down_proj_bias" if part == "down_proj" else "gate_up_proj_bias"][expert]
                bias = of_all if part == "down_proj" else of_all[part == "up_proj" :: 2]
                assert torch.equal(source.read(f"{name}.bias", shape[:1], 0, 0, shape[0]), bias)
        with pytest.raises(
            LoadError, match=r"gate_proj.weight' has shape \[32, 64\], .* makes it \[33, 64\]"
        ):
            source.check(f"{PREFIX}.0.gate_proj.weight", (33, 64))


def test_experts_in_mxfp4(exact: dict[str, torch.Tensor], tmp_path: Path) -> None:
    near, stored = in_mxfp4(exact)
    saved(tmp_path, stored)
    with SafetensorsSource(tmp_path, MXFP4, "gpt_oss") as source:
        for expert in range(EXPERTS):
            for part, shape in SHAPES.items():
                name, expected = f"{PREFIX}.{expert}.{part}", of_expert(near, expert, part)
                assert source.check(f"{name}.weight", shape) == ({f"{name}.blocks", f"{name}.scales"}, [])
                found = source.read(f"{name}.weight", shape, 0, 3, 9)
                assert isinstance(found, Grouped)
                assert torch.equal(found.dequantized(), expected[3:9])
                if shape[1] == 64:
                    cut = source.read(f"{name}.weight", shape, 1, 32, 64)
                    assert isinstance(cut, Grouped)
                    assert torch.equal(cut.dequantized(), expected[:, 32:])
        _, missing = source.check("model.layers.1.mlp.experts.0.up_proj.weight", (SIZE, HIDDEN))
        assert len(missing) == 2


def test_a_scale_that_is_no_number_is_found_before_loading(
    exact: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    _, stored = in_mxfp4(exact)
    stored["gate_up_proj_scales"][1, 5, 1] = 255  # output 5: the third up
    saved(tmp_path, stored)
    with SafetensorsSource(tmp_path, MXFP4, "gpt_oss") as source:
        source.check(f"{PREFIX}.1.gate_proj.weight", SHAPES["gate_proj"])
        with pytest.raises(LoadError, match=r"1\.up_proj\.scales' holds NaN"):
            source.check(f"{PREFIX}.1.up_proj.weight", SHAPES["up_proj"])
