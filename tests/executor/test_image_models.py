"""The text parts of models that see images, in each form that files of them have been published in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.executor.torch_executor import TorchExecutor
from baton.model.checkpoint.config import ModelConfig, UnsupportedModel
from baton.model.checkpoint.files import LoadError
from tests.executor import test_torch_parity as parity
from tests.executor.test_torch_parity import config_for
from tests.model.checkpoints import make_checkpoint

Tensors = dict[str, Tensor]
Change = Callable[[dict[str, Any], Tensors], Tensors]


def as_saved(config: dict[str, Any], tensors: Tensors) -> Tensors:
    return tensors


def flat(config: dict[str, Any], tensors: Tensors) -> Tensors:
    """Qwen2.5-VL as on the hub: fields of the text part outside, the rotary's kind with its old name."""
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    config |= {key: value for key, value in text.items() if key not in ("model_type", "architectures")}
    config |= {"rope_theta": rope["rope_theta"]}
    config["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    assert any(name.startswith("model.layers.") for name in tensors)
    assert any(name.startswith("visual.") for name in tensors)
    return tensors


def within_language_model(config: dict[str, Any], tensors: Tensors) -> Tensors:
    """As versions of transformers between the two have saved it."""
    plain = {name.replace("model.language_model.", "model."): tensor for name, tensor in tensors.items()}
    return {
        f"model.{name}" if name.startswith("visual.") else name.replace("model.", "model.language_model.")
        if name.startswith("model.") and not name.startswith("model.visual.") else name: tensor
        for name, tensor in plain.items()
    }  # fmt: skip


def old_rope(config: dict[str, Any], tensors: Tensors) -> Tensors:
    """Qwen3-VL as on the hub."""
    text = config["text_config"]
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope["rope_theta"], "norm_topk_prob": True}
    text["rope_scaling"] = {
        "rope_type": "default", "mrope_section": rope["mrope_section"], "mrope_interleaved": True
    }  # fmt: skip
    return tensors


def inputs_first(config: dict[str, Any], tensors: Tensors) -> Tensors:
    """Experts as on the hub."""
    stacks = [name for name in tensors if ".mlp.experts." in name]
    assert stacks
    assert all(tensors[name].dim() == 3 for name in stacks)
    turned = {name: tensors[name].transpose(1, 2).contiguous() for name in stacks}
    return old_rope(config, tensors | turned)


def experts_apart(config: dict[str, Any], tensors: Tensors) -> Tensors:
    """Each expert with names of its own, as quantized files have them."""
    found = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name}
    for name, tensor in tensors.items():
        if name not in found:
            place = name.rpartition(".")[0]
            for number, matrix in enumerate(tensor):
                parts = {"gate_proj": matrix[: len(matrix) // 2], "up_proj": matrix[len(matrix) // 2 :]}
                for part, own in (parts if "gate_up" in name else {"down_proj": matrix}).items():
                    found[f"{place}.{number}.{part}.weight"] = own.contiguous()
    return found


CASES: list[tuple[str, Change, dict[str, Any]]] = [
    ("qwen2_5-vl", as_saved, {}),
    ("qwen2_5-vl", flat, {}),
    ("qwen2_5-vl", within_language_model, {}),
    ("qwen2_5-vl", flat, {"tie_word_embeddings": True}),
    ("qwen3-vl", as_saved, {}),
    ("qwen3-vl", old_rope, {}),
    ("qwen3-vl", old_rope, {"tie_word_embeddings": False}),
    ("qwen3-vl-moe", as_saved, {}),
    ("qwen3-vl-moe", inputs_first, {}),
    ("qwen3-vl-moe", experts_apart, {}),
    # hidden = 2 size, and hidden = size: one of the two tensors does not say which way it lies
    ("qwen3-vl-moe", as_saved, {"hidden_size": 64, "moe_intermediate_size": 32}),
    ("qwen3-vl-moe", inputs_first, {"hidden_size": 64, "moe_intermediate_size": 32}),
    ("qwen3-vl-moe", as_saved, {"moe_intermediate_size": 64}),
    ("qwen3-vl-moe", inputs_first, {"moe_intermediate_size": 64}),
]


def rewritten(directory: Path, change: Change) -> None:
    config = json.loads((directory / "config.json").read_text())
    tensors = change(config, load_file(directory / "model.safetensors"))
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(("variant", "change", "settings"), CASES)
def test_each_form_gives_what_transformers_gives(
    variant: str, change: Change, settings: dict[str, Any], tmp_path: Path
) -> None:
    model = make_checkpoint(tmp_path, variant, **settings)
    rewritten(tmp_path, change)
    executor = TorchExecutor.from_config(config_for(tmp_path), 0, "")
    parity.test_three_hundred_tokens((executor, model))
    executor.close()


def test_quantized_while_it_is_loaded(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3-vl-moe", hidden_size=64, moe_intermediate_size=64)
    rewritten(tmp_path, inputs_first)
    executor = TorchExecutor.from_config(config_for(tmp_path, dtype="bfloat16", quantization="int8"), 0, "")
    parity.same_in_a_crowd(executor)
    executor.close()


def test_experts_of_shapes_that_do_not_fit_are_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3-vl-moe")
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if name.endswith("experts.down_proj"))
    tensors[name] = tensors[name][:, :, :-1].contiguous()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="experts") as caught:
        TorchExecutor.from_config(config_for(tmp_path), 0, "")
    assert "\n" not in str(caught.value)


def test_a_tensor_that_no_text_part_has_is_still_an_error(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen2_5-vl")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.other.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LoadError, match=r"no place for tensor 'model\.layers\.0\.mlp\.other\.weight'"):
        TorchExecutor.from_config(config_for(tmp_path), 0, "")


def test_other_text_parts_are_refused_by_name(tmp_path: Path) -> None:
    raw = {"architectures": ["Qwen3VLForConditionalGeneration"], "text_config": {"model_type": "other"}}
    with pytest.raises(UnsupportedModel, match="qwen3_vl_text"):
        ModelConfig.from_dict(raw)
