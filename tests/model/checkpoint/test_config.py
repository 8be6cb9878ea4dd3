"""config.json and generation_config.json, of every style, and the errors of what cannot be served."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from baton.model.architectures.families import FAMILIES
from baton.model.checkpoint.config import (
    ModelConfig,
    ModelNotFound,
    RopeConfig,
    UnsupportedModel,
)
from baton.model.checkpoint.generation_config import read_generation_config
from baton.model.checkpoint.quantization import Scheme
from baton.model.description.model import MoeConfig

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 256,
}


def parse(**changes: Any) -> ModelConfig:
    raw = {**BASE, **changes}
    return ModelConfig.from_dict({key: value for key, value in raw.items() if value != "absent"}, "/m")


def rope_of(config: ModelConfig) -> RopeConfig:
    (rope,) = config.rotaries
    assert rope is not None
    return rope


def test_defaults() -> None:
    config = parse(num_key_value_heads="absent")
    assert (config.num_kv_heads, config.head_dim, config.dtype) == (8, 8, "float32")
    assert config.layer_windows == (None,) * 4
    assert rope_of(config).theta == 10_000
    assert rope_of(config).type == "default"
    assert config.eos_token_ids == ()
    attention = config.layers[0].attention
    assert not any((attention.qkv_bias, attention.output_bias, config.layers[0].mlp.bias, attention.qk_norm))


def test_both_styles_of_rotary_parameters() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 64
    old = parse(rope_theta=5e5, rope_scaling={**scaling, "rope_type": "llama3"})
    older = parse(rope_theta=5e5, rope_scaling={**scaling, "type": "llama3"})
    new = parse(rope_parameters={**scaling, "rope_type": "llama3", "rope_theta": 5e5})
    assert old.rotaries == older.rotaries == new.rotaries
    assert (rope_of(new).theta, rope_of(new).type, rope_of(new).parameters["factor"]) == (5e5, "llama3", 8.0)
    assert rope_of(parse(rope_parameters={"rope_theta": 7.0, "rope_type": "default"})).theta == 7.0
    assert rope_of(parse(rope_scaling=None, rope_theta=7.0)).theta == 7.0
    yarn = parse(rope_scaling={"type": "yarn", "original_max_position_embeddings": 64})
    assert rope_of(yarn).parameters["factor"] == 4.0


def test_what_differs_between_architectures() -> None:
    qwen2 = parse(architectures=["Qwen2ForCausalLM"], sliding_window=32)
    attention = qwen2.layers[0].attention
    assert (attention.qkv_bias, attention.output_bias) == (True, False)
    assert qwen2.layer_windows == (None,) * 4  # use_sliding_window is absent
    windowed = parse(
        architectures=["Qwen2ForCausalLM"], sliding_window=32, use_sliding_window=True, max_window_layers=3
    )
    assert windowed.layer_windows == (None, None, None, 32)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert parse(
        architectures=["Qwen3ForCausalLM"], sliding_window=9, use_sliding_window=True, layer_types=kinds
    ).layer_windows == (9, None, 9, None)
    assert parse(architectures=["Qwen3ForCausalLM"]).layers[0].attention.qk_norm == "head"
    assert parse(architectures=["MistralForCausalLM"], sliding_window=None).layer_windows == (None,) * 4
    assert parse(architectures=["MistralForCausalLM"], sliding_window=16).layer_windows == (16,) * 4
    ernie = parse(architectures=["Ernie4_5ForCausalLM"], use_bias=True)
    assert ernie.layers[0].attention.qkv_bias
    assert ernie.layers[0].attention.output_bias
    assert ernie.layers[0].mlp.bias
    assert rope_of(ernie).theta == 500_000
    assert rope_of(ernie).neighbours
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
            "'/m' is a 'FooForCausalLM', which Baton does not serve: it is no family of Baton's, and ",
        ),
        ({"architectures": "absent"}, "names no architecture"),
        ({"hidden_size": "absent"}, "'hidden_size'"),
        ({"hidden_act": "gelu"}, 'hidden_act "gelu"'),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"rope_scaling": {"type": "mrope"}}, "'mrope'"),
        ({"rope_scaling": {"type": "linear"}}, "no 'rope_scaling.factor'; it must be a number"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"num_key_value_heads": 3}, "3 KV heads"),
        ({"num_attention_heads": 7}, "hidden_size 64"),
        ({"head_dim": 7}, "head_dim 7"),
        ({"vocab_size": None}, "vocab_size null: it must be an integer from 1 to"),
        ({"vocab_size": "100"}, 'vocab_size "100": it must be an integer'),
        ({"architectures": "LlamaForCausalLM"}, 'architectures "LlamaForCausalLM": it must be a list'),
        ({"architectures": [["LlamaForCausalLM"]]}, "architectures"),
        ({"quantization_config": "int4"}, 'quantization_config "int4": it must be a JSON object'),
        ({"quantization_config": {"quant_method": 3}}, "quantization_config.quant_method 3"),
        ({"num_attention_heads": 0}, "num_attention_heads 0: it must be an integer from 1"),
        ({"num_key_value_heads": 0}, "num_key_value_heads 0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers true"),
        ({"hidden_size": 0}, "hidden_size 0"),
        ({"hidden_size": 64.5}, "hidden_size 64.5"),
        ({"hidden_size": 10**30}, "hidden_size 1000000000000000000000000000000"),
        ({"intermediate_size": -1}, "intermediate_size -1"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings 1000000000000"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000"),
        ({"rms_norm_eps": "small"}, 'rms_norm_eps "small": it must be a number'),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"rope_theta": 0}, "rope_theta 0"),
        ({"rope_scaling": "yarn"}, 'rope_scaling "yarn": it must be a JSON object'),
        ({"rope_scaling": {"type": "yarn", "factor": "4"}}, 'rope_scaling.factor "4"'),
        ({"rope_scaling": {"type": ["yarn"]}}, 'rope_scaling.type ["yarn"]'),
        ({"eos_token_id": [[1], 2]}, "eos_token_id [[1], 2]: it must be a token id"),
        ({"eos_token_id": "</s>"}, 'eos_token_id "</s>"'),
        ({"tie_word_embeddings": "yes"}, 'tie_word_embeddings "yes": it must be true or false'),
        ({"hidden_act": ["silu"]}, "hidden_act"),
        ({"torch_dtype": 16}, "torch_dtype 16"),
        (
            {"architectures": ["Qwen3ForCausalLM"], "layer_types": ["linear_attention"] * 4},
            "layer_types must name full_attention or sliding_attention",
        ),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": "full_attention"}, "layer_types"),
    ],
)
def test_what_cannot_be_served_is_one_clear_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        parse(**changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "/m" in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_granite_with_experts_or_mamba_layers_is_refused() -> None:
    granite = {"architectures": ["GraniteMoeHybridForCausalLM"], "shared_intermediate_size": 8}
    with pytest.raises(UnsupportedModel, match="experts"):
        parse(**granite)
    with pytest.raises(UnsupportedModel, match="Mamba"):
        parse(**granite, num_local_experts=0, layer_types=["mamba", "attention"])


GPT_OSS = {"architectures": ["GptOssForCausalLM"], "num_local_experts": 8, "head_dim": 8}


def test_gpt_oss_as_it_is_published() -> None:
    """Its config.json has the older style of rotary parameters, and fields for other programs."""
    scaling = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    config = parse(
        **GPT_OSS | {"num_experts_per_tok": 4, "experts_per_token": 4, "sliding_window": 128},
        rope_theta=150_000,
        rope_scaling=scaling | {"original_max_position_embeddings": 4096},
        layer_types=["sliding_attention", "full_attention"] * 2,
        attention_bias=True,
        initial_context_length=4096,
        max_position_embeddings=131072,
        quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    )
    assert config.layer_windows == (128, None, 128, None)
    assert (rope_of(config).theta, rope_of(config).parameters["truncate"]) == (150_000, False)
    assert config.max_context == 131072
    attention, mixture = config.layers[0].attention, config.layers[0].mlp
    assert (attention.sinks, attention.qkv_bias, attention.output_bias) == (True, True, True)
    assert isinstance(mixture, MoeConfig)
    assert (mixture.experts, mixture.chosen, mixture.bias, mixture.scores) == (
        8,
        4,
        "logits",
        "chosen_softmax",
    )
    assert (mixture.expert.activation, mixture.expert.bias) == ("swiglu_oai", True)
    assert config.quantization is not None
    scheme = config.quantization.scheme_of("model.layers.0.mlp.experts.3.up_proj")
    assert scheme == Scheme("mxfp4", 4, 32, True)
    assert config.quantization.scheme_of("model.layers.0.self_attn.q_proj") is None
    assert config.quantization.scheme_of("model.layers.0.mlp.router") is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"swiglu_limit": 10.0}, "swiglu_limit 10; Baton computes gpt-oss' gate with 7"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha 1; Baton computes gpt-oss' gate with 1.702"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act gelu_tanh"),
        ({"layer_types": ["chunked_attention"] * 4}, "layer_types must name"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9: it must be an integer from 1 to 8"),
        ({"quantization_config": {"quant_method": "nvfp4"}}, "MXFP4"),
    ],
)
def test_what_of_a_gpt_oss_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=re.escape(message)):
        parse(**GPT_OSS | changes)


QWEN3_MOE = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2}
ERNIE_MOE = {"architectures": ["Ernie4_5_MoeForCausalLM"], "moe_num_experts": 8, "moe_k": 2}
GLM4_MOE = {"architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 8, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (QWEN3_MOE, [True] * 4),
        (QWEN3_MOE | {"decoder_sparse_step": 2}, [False, True, False, True]),
        (QWEN3_MOE | {"mlp_only_layers": [0, 3]}, [False, True, True, False]),
        (ERNIE_MOE, [False, True, True, True]),
        (ERNIE_MOE | {"moe_layer_start_index": 0, "moe_layer_end_index": 2}, [True, True, True, False]),
        (ERNIE_MOE | {"moe_layer_interval": 2}, [False, True, False, True]),
        (GLM4_MOE | {"first_k_dense_replace": 3}, [False, False, False, True]),
    ],
)
def test_which_layers_have_experts(changes: dict[str, Any], expected: list[bool]) -> None:
    config = parse(**changes, head_dim=8, moe_intermediate_size=32)
    assert [isinstance(layer.mlp, MoeConfig) for layer in config.layers] == expected


def test_what_routers_differ_in() -> None:
    ernie = parse(**ERNIE_MOE, moe_norm_min=0.5).layers[-1].mlp
    glm = parse(**GLM4_MOE, n_group=4, topk_group=2, routed_scaling_factor=2.5).layers[-1].mlp
    assert isinstance(ernie, MoeConfig)
    assert isinstance(glm, MoeConfig)
    assert (ernie.scores, ernie.bias, ernie.least_sum) == ("softmax", "choice", 0.5)
    assert ernie.shared is not None
    assert ernie.shared.size == 2 * ernie.expert.size
    assert parse(**ERNIE_MOE, moe_num_shared_experts=0).layers[-1].mlp.shared is None
    assert (glm.scores, glm.groups, glm.chosen_groups, glm.factor) == ("sigmoid", 4, 2, 2.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (QWEN3_MOE | {"num_experts_per_tok": 9}, "num_experts_per_tok 9: it must be an integer from 1 to 8"),
        (QWEN3_MOE | {"mlp_only_layers": 3}, "mlp_only_layers 3: it must be a list of layers"),
        (GLM4_MOE | {"n_group": 3}, "1 of 3 groups of 8 experts cannot be chosen"),
        (GLM4_MOE | {"n_group": 8}, "2 experts a token, but 1 of 8 groups have fewer"),
        (ERNIE_MOE | {"use_bias": True}, "its output head has a bias"),
        ({"architectures": ["OlmoeForCausalLM"], "clip_qkv": 8.0}, "clip_qkv"),
    ],
)
def test_mixtures_that_cannot_be_served_are_one_clear_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        parse(**changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "labels", "activation"),
    [
        ({}, ("LABEL_0", "LABEL_1"), "softmax"),
        ({"num_labels": 1}, ("LABEL_0",), "sigmoid"),
        ({"id2label": {"1": "bad", "0": "good"}}, ("good", "bad"), "softmax"),
        ({"id2label": {"0": "x"}, "problem_type": "regression"}, ("x",), "identity"),
        ({"problem_type": "multi_label_classification"}, ("LABEL_0", "LABEL_1"), "sigmoid"),
        (
            {
                "id2label": {"0": "x"},
                "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"},
            },
            ("x",),
            "identity",
        ),
        ({"classifier_from_token": ["no", "yes"]}, (), "identity"),
    ],
)
def test_labels_of_a_head_of_scores(
    changes: dict[str, Any], labels: tuple[str, ...], activation: str
) -> None:
    for name in ("LlamaForSequenceClassification", "Gemma3TextForSequenceClassification"):
        config = parse(architectures=[name], **changes)
        assert (config.labels, config.activation) == (labels, activation)
    assert config.tie_word_embeddings
    assert config.architecture == "Gemma3ForCausalLM"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id2label": {"0": "x", "2": "y"}}, "id2label must give texts for the numbers 0 to 1"),
        ({"id2label": {"0": 5}}, "id2label must give texts"),
        ({"sbert_ce_default_activation_function": "mine.Act"}, "scores go through 'mine.Act'"),
        ({"num_labels": 0}, "num_labels 0"),
    ],
)
def test_labels_that_mean_nothing_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        parse(architectures=["LlamaForSequenceClassification"], **changes)
    assert message in str(caught.value)


def test_scaling_that_was_added_by_hand_wins() -> None:
    """Saved by transformers 5 (`rope_parameters`), then given the YaRN advice of its model card."""
    saved = {"rope_theta": 1e6, "rope_type": "default"}
    advice = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    config = parse(rope_parameters=saved, rope_scaling=advice)
    assert (rope_of(config).type, rope_of(config).theta) == ("yarn", 1e6)
    assert rope_of(config).parameters == {"factor": 4.0, "original_max_position_embeddings": 64}
    assert rope_of(parse(rope_parameters=saved, rope_scaling=None)).type == "default"
    assert rope_of(parse(rope_parameters=saved, rope_scaling={**advice, "rope_theta": 5.0})).theta == 5.0


def test_yarn_stretches_the_context() -> None:
    advice = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert parse(rope_scaling=advice).max_context == 512
    assert parse(rope_scaling={**advice, "factor": 1.5}).max_context == 256, "never less than the model's own"
    assert parse().max_context == 256
    linear = {"rope_type": "linear", "factor": 4.0}
    assert parse(rope_scaling=linear).max_context == 256, "such files say the stretched context"


def test_token_ids_outside_of_the_vocabulary_are_none() -> None:
    assert parse(eos_token_id=-1).eos_token_ids == ()
    assert parse(eos_token_id=[7, 100, -1, 99]).eos_token_ids == (7, 99)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_fields_that_a_file_leaves_out_are_as_in_transformers(architecture: str) -> None:
    transformers = pytest.importorskip("transformers")
    name = architecture.replace("Gemma3", "Gemma3Text").removesuffix("ForCausalLM") + "Config"
    sizes: dict[str, Any] = {"hidden_size": 1024, "num_attention_heads": 32, "max_position_embeddings": 256}
    sizes |= {"num_hidden_layers": 8, "intermediate_size": 96}
    if architecture == "GraniteMoeHybridForCausalLM":
        sizes |= {"num_local_experts": 0, "layer_types": ["attention"] * 8}
    theirs = getattr(transformers, name)(**sizes)
    ours = parse(architectures=[architecture], num_key_value_heads="absent", **sizes)
    assert ours.num_kv_heads == (theirs.num_key_value_heads or 32)
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 32)
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    biased = getattr(theirs, "mlp_bias", getattr(theirs, "use_bias", False))
    mlp, last = ours.layers[0].mlp, ours.layers[-1].mlp
    assert isinstance(mlp, MoeConfig) or mlp.bias == bool(biased)
    if isinstance(last, MoeConfig):
        experts = getattr(theirs, "num_local_experts", None) or theirs.num_experts
        assert (last.experts, last.chosen) == (experts, theirs.num_experts_per_tok)
        assert last.expert.size == getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
        if last.scores == "softmax":
            assert last.normalized == getattr(theirs, "norm_topk_prob", True)
    kinds = getattr(theirs, "layer_types", None) or ["full_attention"] * 8
    for layer, kind in zip(ours.layers, kinds, strict=True):
        rope, parameters = layer.attention.rope, theirs.rope_parameters
        if rope is not None:
            expected = parameters.get(kind, parameters)
            assert rope.theta == expected["rope_theta"]
            assert rope.type == expected.get("rope_type", "default")
            assert rope.share == expected.get("partial_rotary_factor", 1)
        if kind == "sliding_attention":
            assert layer.attention.window == theirs.sliding_window


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
    assert read_generation_config(tmp_path, 100).eos_token_ids == ()
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": 5, "temperature": 0.6, "top_k": 20, "do_sample": True}))
    found = read_generation_config(tmp_path, 100)
    assert found.eos_token_ids == (5,)
    assert found.sampling == {"temperature": 0.6, "top_k": 20}
    path.write_text(json.dumps({"do_sample": False, "temperature": 0.6, "eos_token_id": [5, 6]}))
    found = read_generation_config(tmp_path, 100)
    assert found.eos_token_ids == (5, 6)
    assert found.sampling == {"temperature": 0.0}
    path.write_text(json.dumps({"top_k": 20.0, "eos_token_id": -1, "temperature": None}))
    found = read_generation_config(tmp_path, 100)
    assert (found.eos_token_ids, found.sampling) == ((), {"top_k": 20})
    assert isinstance(found.sampling["top_k"], int)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": "0.9"}, 'top_p "0.9": it must be a number'),
        ({"temperature": -1}, "temperature"),
        ({"top_k": 2.5}, "top_k"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"do_sample": "no"}, "do_sample"),
    ],
)
def test_defaults_that_no_request_could_have_are_refused_at_the_start(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    with pytest.raises(UnsupportedModel) as caught:
        read_generation_config(tmp_path, 100)
    assert message in str(caught.value)
    assert "generation_config.json" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert read_generation_config(tmp_path, 100, sampling=False).sampling == {}


@pytest.mark.parametrize("text", ["[" * 5000 + "]" * 5000, '{"a":' * 5000 + "1" + "}" * 5000, "[]", "3"])
def test_files_that_are_no_configuration(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelNotFound, match=r"config\.json") as caught:
        ModelConfig.from_directory(tmp_path)
    assert len(str(caught.value)) < 300


def test_the_launcher_pays_for_no_torch() -> None:
    code = (
        "import sys, baton.model.checkpoint.config, baton.model.checkpoint.hub\n"
        "heavy = {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)


def test_ends_of_the_whole_and_of_its_text_part_count() -> None:
    text = {**BASE, "model_type": "mistral", "eos_token_id": [5, 6]}
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "eos_token_id": 7, "text_config": text}
    assert ModelConfig.from_dict(whole).eos_token_ids == (7, 5, 6)
    assert ModelConfig.from_dict({**whole, "eos_token_id": None}).eos_token_ids == (5, 6)
    with pytest.raises(UnsupportedModel, match="eos_token_id"):
        ModelConfig.from_dict({**whole, "eos_token_id": "</s>"})


def test_without_a_dtype_the_files_say_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    assert ModelConfig.from_directory(tmp_path).dtype == "float32"
    tensors = {"a": torch.zeros(8, 8, dtype=torch.bfloat16), "b": torch.zeros(3), "c": torch.zeros(99).int()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert ModelConfig.from_directory(tmp_path).dtype == "bfloat16"
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "torch_dtype": "float16"}))
    assert ModelConfig.from_directory(tmp_path).dtype == "float16"
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    assert ModelConfig.from_directory(tmp_path).dtype == "float32"
