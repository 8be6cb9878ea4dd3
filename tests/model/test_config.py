"""config.json and generation_config.json, of every style, and the errors of what cannot be served."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from baton.model.config import ModelConfig, ModelNotFound, UnsupportedModel, read_generation_config

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 256,
}


def parse(**changes: Any) -> ModelConfig:
    raw = {**BASE, **changes}
    return ModelConfig.from_dict({key: value for key, value in raw.items() if value != "absent"}, "/m")


def test_defaults() -> None:
    config = parse()
    assert (config.num_kv_heads, config.head_dim, config.dtype) == (8, 8, "float32")
    assert config.layer_windows == (None,) * 4
    assert config.rope.theta == 10_000
    assert config.rope.type == "default"
    assert config.eos_token_ids == ()
    assert not any((config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm))


def test_both_styles_of_rotary_parameters() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 64
    old = parse(rope_theta=5e5, rope_scaling={**scaling, "rope_type": "llama3"})
    older = parse(rope_theta=5e5, rope_scaling={**scaling, "type": "llama3"})
    new = parse(rope_parameters={**scaling, "rope_type": "llama3", "rope_theta": 5e5})
    assert old.rope == older.rope == new.rope
    assert (new.rope.theta, new.rope.type, new.rope.parameters["factor"]) == (5e5, "llama3", 8.0)
    assert parse(rope_parameters={"rope_theta": 7.0, "rope_type": "default"}).rope.theta == 7.0
    assert parse(rope_scaling=None, rope_theta=7.0).rope.theta == 7.0
    yarn = parse(rope_scaling={"type": "yarn", "original_max_position_embeddings": 64})
    assert yarn.rope.parameters["factor"] == 4.0


def test_what_differs_between_architectures() -> None:
    qwen2 = parse(architectures=["Qwen2ForCausalLM"], sliding_window=32)
    assert (qwen2.qkv_bias, qwen2.output_bias) == (True, False)
    assert qwen2.layer_windows == (None,) * 4  # use_sliding_window is absent
    windowed = parse(
        architectures=["Qwen2ForCausalLM"], sliding_window=32, use_sliding_window=True, max_window_layers=3
    )
    assert windowed.layer_windows == (None, None, None, 32)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert parse(
        architectures=["Qwen3ForCausalLM"], sliding_window=9, use_sliding_window=True, layer_types=kinds
    ).layer_windows == (9, None, 9, None)
    assert parse(architectures=["Qwen3ForCausalLM"]).qk_norm
    assert parse(architectures=["MistralForCausalLM"], sliding_window=None).layer_windows == (None,) * 4
    assert parse(architectures=["MistralForCausalLM"], sliding_window=16).layer_windows == (16,) * 4
    ernie = parse(architectures=["Ernie4_5ForCausalLM"], use_bias=True)
    assert ernie.qkv_bias
    assert ernie.output_bias
    assert ernie.mlp_bias
    assert ernie.rope.theta == 500_000
    assert ernie.tie_word_embeddings


def test_a_window_matters_only_below_the_served_length() -> None:
    config = parse(architectures=["MistralForCausalLM"], sliding_window=64)
    assert config.window_of(0, 65) == 64
    assert config.window_of(0, 64) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["FooForCausalLM"]},
            "'/m' is a 'FooForCausalLM'; Baton serves: LlamaForCausalLM, MistralForCausalLM, "
            "Qwen2ForCausalLM, Qwen3ForCausalLM, Ernie4_5ForCausalLM",
        ),
        ({"architectures": "absent"}, "names no architecture"),
        ({"hidden_size": "absent"}, "'hidden_size'"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"rope_scaling": {"type": "mrope"}}, "'mrope'"),
        ({"rope_scaling": {"type": "linear"}}, "'factor'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"num_key_value_heads": 3}, "3 KV heads"),
        ({"num_attention_heads": 7}, "hidden_size 64"),
        ({"head_dim": 7}, "head_dim 7"),
        ({"vocab_size": None}, "cannot be read"),
    ],
)
def test_what_cannot_be_served_is_one_clear_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        parse(**changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "/m" in str(caught.value)


@pytest.mark.parametrize(("size", "message"), [(3, "8 attention heads"), (16, "8 attention heads")])
def test_tensor_parallel_sizes_that_do_not_divide(size: int, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        parse().check_tensor_parallel(size)


def test_tensor_parallel_of_few_kv_heads() -> None:
    parse(num_key_value_heads=2).check_tensor_parallel(4)
    config = parse(num_key_value_heads=2)
    assert [config.kv_heads_of_rank(rank, 4) for rank in range(4)] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert [config.kv_heads_of_rank(rank, 2) for rank in range(2)] == [(0, 1), (1, 2)]
    with pytest.raises(UnsupportedModel, match="KV heads"):
        parse(num_attention_heads=12, num_key_value_heads=6, head_dim=8).check_tensor_parallel(4)
    with pytest.raises(UnsupportedModel, match="97 columns"):
        parse(intermediate_size=97).check_tensor_parallel(2)


def test_a_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(ModelNotFound, match="cannot be read"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({**BASE, "torch_dtype": "bfloat16", "eos_token_id": [3, 4]})
    )
    config = ModelConfig.from_directory(tmp_path)
    assert (config.dtype, config.eos_token_ids) == ("bfloat16", (3, 4))


def test_generation_config(tmp_path: Path) -> None:
    assert read_generation_config(tmp_path).eos_token_ids == ()
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": 5, "temperature": 0.6, "top_k": 20, "do_sample": True}))
    found = read_generation_config(tmp_path)
    assert found.eos_token_ids == (5,)
    assert found.sampling == {"temperature": 0.6, "top_k": 20}
    path.write_text(json.dumps({"do_sample": False, "temperature": 0.6, "eos_token_id": [5, 6]}))
    found = read_generation_config(tmp_path)
    assert found.eos_token_ids == (5, 6)
    assert found.sampling == {"temperature": 0.0}


def test_the_launcher_pays_for_no_torch() -> None:
    code = (
        "import sys, baton.model.config, baton.model.hub\n"
        "heavy = {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)
