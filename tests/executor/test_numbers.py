"""A checkpoint with NaN or infinities in it is refused, in one line that names the tensor."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.executor.base import ControlRefused
from baton.executor.loading import create_executor
from baton.executor.torch_executor import TorchExecutor
from baton.model.checkpoint.files import LoadError
from baton.model.layers.int8 import why_not_int8
from baton.model.loader import is_finite
from tests.executor.test_torch_parity import config_for
from tests.model.checkpoints import make_checkpoint


@pytest.fixture(scope="module", params=["llama2", "llama3"])
def sound(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with embeddings and head apart, one where they are the same tensor."""
    directory = tmp_path_factory.mktemp(request.param) / "sound"
    make_checkpoint(directory, request.param)
    return directory


def damaged(sound: Path, target: Path, name: str, value: float, whole: bool = False) -> Path:
    """A copy with an element of a tensor, or all of them, of this value."""
    shutil.copytree(sound, target)
    path = target / "model.safetensors"
    tensors = load_file(path)
    elements = tensors[name].view(-1)
    elements[slice(None) if whole else len(elements) // 2 + 3] = value
    save_file(tensors, path, {"format": "pt"})
    return target


NAMES = (
    "model.embed_tokens.weight",
    "model.layers.1.self_attn.k_proj.weight",
    "model.layers.2.mlp.down_proj.weight",
    "model.layers.0.input_layernorm.weight",
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("dtype", "quantization"), [("float32", None), ("bfloat16", None), ("bfloat16", "int8")]
)
def test_a_single_element_is_enough(
    sound: Path, name: str, dtype: str, quantization: str | None, tmp_path: Path
) -> None:
    if quantization and why_not_int8():
        pytest.skip(why_not_int8())
    value = (math.nan, math.inf, -math.inf)[NAMES.index(name) % 3]
    directory = damaged(sound, tmp_path / "damaged", name, value)
    with pytest.raises(LoadError, match=f"tensor '{name}' holds NaN or infinity") as error:
        TorchExecutor.from_config(config_for(directory, dtype=dtype, quantization=quantization), 0, "")
    assert "\n" not in str(error.value)


def test_finite_weights_whose_results_are_not(sound: Path, tmp_path: Path) -> None:
    directory = damaged(sound, tmp_path / "large", "model.norm.weight", 3e38, whole=True)
    with pytest.raises(LoadError, match=r"though its weights are numbers; .* --dtype float32"):
        TorchExecutor.from_config(config_for(directory), 0, "")


def test_new_weights_are_looked_at_before_the_old_ones_go(sound: Path, tmp_path: Path) -> None:
    directory = damaged(sound, tmp_path / "damaged", NAMES[2], math.nan)
    executor = create_executor(config_for(sound), 0, "")
    try:
        with pytest.raises(ControlRefused, match=f"tensor '{NAMES[2]}' holds NaN"):
            executor.update_weights(str(directory))
        executor.update_weights(str(sound))
    finally:
        executor.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_what_is_finite(dtype: torch.dtype) -> None:
    tensor = torch.ones(9, 7).to(dtype)
    assert is_finite(tensor)
    tensor[3, 5] = math.nan
    assert not is_finite(tensor)
    assert is_finite(torch.empty(0))
    assert is_finite(torch.ones(3, dtype=torch.int8))
