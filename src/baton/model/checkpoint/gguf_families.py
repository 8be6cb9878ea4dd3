"""Which architectures of GGUF files there are: names of their tensors, and what llama.cpp implies of each.

What its converter (conversion/*.py) leaves out of the metadata stands in llama.cpp's own code: which layers
have windows or no positions, the angles of Gemma 3's local layers, the scale of Gemma's queries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from baton.model.checkpoint.gguf import GgufFile
from baton.model.description.fields import MAX_CONTEXT, Fields

USUAL: Final[Mapping[str, str]] = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""From transformers' name of a module to llama.cpp's."""
_RESULT_NORMS: Final = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
EXPERTS_APART: Final = "experts_apart"
"""In a configuration: each expert's matrices have names of their own; config.json means tensors of all."""
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
Config = dict[str, Any]


@dataclass(frozen=True)
class GgufFamily:
    architecture: str
    """Of config.json."""
    others: Mapping[str, str] = field(default_factory=dict)
    """Names that are not the usual ones; theirs are those of no usual one then."""
    paired: bool = False
    """Rows of q and k are in pairs (2i, 2i+1) for the rotation, not in halves."""
    plus_one: bool = False
    """Norms are stored with the 1 that the model adds."""
    mixture: bool = False
    """It has experts: `ffn_*_exps`, of all of a layer's (`reading.gguf_experts`)."""
    partial: bool = False
    """A part of each head may be rotated."""
    more: Callable[[GgufFile, Fields, str, Config], Config] = lambda file, fields, kind, config: {}
    """What a config.json says besides: of (the file, its metadata, the architecture's name there, the usual
    fields)."""

    @property
    def names(self) -> dict[str, str]:
        taken = set(self.others.values())
        return {ours: theirs for ours, theirs in USUAL.items() if theirs not in taken} | dict(self.others)


def _llama(file: GgufFile, fields: Fields, kind: str, config: Config) -> Config:
    """Mistral's models are called llama, too."""
    window = _window(fields, kind)
    return {"architectures": ["MistralForCausalLM"], "sliding_window": window} if window else {}


def _gemma2(file: GgufFile, fields: Fields, kind: str, config: Config) -> Config:
    return {
        "sliding_window": _window(fields, kind),
        "attn_logit_softcapping": fields.number(f"{kind}.attn_logit_softcapping", 50.0, more_than=0),
        "final_logit_softcapping": fields.number(f"{kind}.final_logit_softcapping", 30.0, more_than=0),
        "query_pre_attn_scalar": _divisor(config, largest=46),
    }


def _gemma3(file: GgufFile, fields: Fields, kind: str, config: Config) -> Config:
    local = fields.number(f"{kind}.rope.freq_base_swa", 10_000.0, more_than=0)
    cap = f"{kind}.final_logit_softcapping"
    return {
        "sliding_window": _window(fields, kind),
        "sliding_window_pattern": 6,
        "final_logit_softcapping": fields.number(cap, more_than=0) if cap in fields else None,
        "query_pre_attn_scalar": _divisor(config, largest=62),
        "rope_parameters": {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }


def _phi3(file: GgufFile, fields: Fields, kind: str, config: Config) -> Config:
    found: Config = {"sliding_window": _window(fields, kind)}
    if LONG_FACTORS not in file.tensors:
        return found
    rope: Config = {**config["rope_parameters"], "rope_type": "longrope"}
    rotated = fields.integer(f"{kind}.rope.dimension_count", config["head_dim"])
    for name, tensor in (("long_factor", LONG_FACTORS), ("short_factor", SHORT_FACTORS)):
        rope[name] = file.floats(tensor, rotated // 2)
    original = f"{kind}.rope.scaling.original_context_length"
    rope["original_max_position_embeddings"] = fields.integer(original, most=MAX_CONTEXT)
    factor = f"{kind}.rope.scaling.attn_factor"
    if factor in fields:
        rope["attention_factor"] = fields.number(factor, more_than=0)
    return {**found, "rope_parameters": rope}


def _granite(file: GgufFile, fields: Fields, kind: str, config: Config) -> Config:
    return {
        "attention_multiplier": fields.number(f"{kind}.attention.scale", 0.0) or config["head_dim"] ** -0.5,
        "embedding_multiplier": fields.number(f"{kind}.embedding_scale", 1.0),
        "residual_multiplier": fields.number(f"{kind}.residual_scale", 1.0),
        "logits_scaling": fields.number(f"{kind}.logit_scale", 1.0, more_than=0),
    }


def _olmo2(file: GgufFile, fields: Fields, kind: str, config: Config) -> Config:
    """With windows it is an OLMo 3."""
    window, layers = _window(fields, kind), config["num_hidden_layers"]
    if window is None:
        return {}
    pattern = fields.any(f"{kind}.attention.sliding_window_pattern")
    if pattern is None:
        pattern = [(layer + 1) % 4 != 0 for layer in range(layers)]
    if not isinstance(pattern, list) or len(pattern) != layers:
        raise fields.wrong(
            f"{kind}.attention.sliding_window_pattern", f"must be true or false for {layers} layers"
        )
    return {
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": window,
        "rope_parameters": {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": config["rope_parameters"]["rope_theta"],
            },
        },
        "layer_types": ["sliding_attention" if local else "full_attention" for local in pattern],
    }


def _gpt_oss(file: GgufFile, fields: Fields, kind: str, config: Config) -> Config:
    """Windows are in every other layer, from the first one on, and YaRN is not cut to whole pairs."""
    rope = config["rope_parameters"]
    return {
        **_experts(fields, kind),
        "num_local_experts": fields.integer(f"{kind}.expert_count"),
        "intermediate_size": fields.integer(
            f"{kind}.expert_feed_forward_length", config["intermediate_size"]
        ),
        "sliding_window": _window(fields, kind),
        "rope_parameters": rope | {"truncate": False} if rope["rope_type"] == "yarn" else rope,
    }


def _qwen3_moe(file: GgufFile, fields: Fields, kind: str, config: Config) -> Config:
    """All layers have experts."""
    return {
        **_experts(fields, kind),
        "num_experts": fields.integer(f"{kind}.expert_count"),
        "moe_intermediate_size": fields.integer(f"{kind}.expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _ernie4_5_moe(file: GgufFile, fields: Fields, kind: str, config: Config) -> Config:
    """From some layer on, each so-manieth one has experts; the shared ones are one MLP."""
    size = fields.integer(f"{kind}.expert_feed_forward_length")
    shared = [tensor for name, tensor in file.tensors.items() if name.endswith("ffn_gate_shexp.weight")]
    return {
        "moe_k": _experts(fields, kind)["num_experts_per_tok"],
        "moe_num_experts": fields.integer(f"{kind}.expert_count"),
        "moe_intermediate_size": size,
        "moe_num_shared_experts": shared[0].shape[0] // size if shared else 0,
        "moe_layer_start_index": fields.integer(f"{kind}.leading_dense_block_count", 0, least=0),
        "moe_layer_interval": fields.integer(f"{kind}.interleave_moe_layer_step", 1),
    }


def _olmoe(file: GgufFile, fields: Fields, kind: str, config: Config) -> Config:
    """Weights of experts are not normalized; the file has their size as that of the MLP."""
    return {**_experts(fields, kind), "num_experts": fields.integer(f"{kind}.expert_count")}


def _granite_moe(file: GgufFile, fields: Fields, kind: str, config: Config) -> Config:
    """As OLMoE's size; gates and ups are tensors of their own."""
    return {
        **_granite(file, fields, kind, config),
        **_experts(fields, kind),
        "num_local_experts": fields.integer(f"{kind}.expert_count"),
        EXPERTS_APART: True,
    }


def _glm4_moe(file: GgufFile, fields: Fields, kind: str, config: Config) -> Config:
    """The last blocks, if there are some that predict more tokens, are none of the model's layers."""
    layers = config["num_hidden_layers"]
    more = fields.integer(f"{kind}.nextn_predict_layers", 0, least=0, most=layers - 1)
    return {
        "num_hidden_layers": layers - more,
        "num_experts_per_tok": fields.integer(f"{kind}.expert_used_count"),
        "n_routed_experts": fields.integer(f"{kind}.expert_count"),
        "n_shared_experts": fields.integer(f"{kind}.expert_shared_count", 1),
        "moe_intermediate_size": fields.integer(f"{kind}.expert_feed_forward_length"),
        "first_k_dense_replace": fields.integer(f"{kind}.leading_dense_block_count", 0, least=0),
        "norm_topk_prob": fields.flag(f"{kind}.expert_weights_norm", True),
        "routed_scaling_factor": fields.number(f"{kind}.expert_weights_scale", 1.0)
        or 1.0,  # (0: none is given)
        "n_group": fields.integer(f"{kind}.expert_group_count", 1),
        "topk_group": fields.integer(f"{kind}.expert_group_used_count", 1),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
    }


def _experts(fields: Fields, kind: str) -> Config:
    scale = fields.number(f"{kind}.expert_weights_scale", 1.0)
    if scale not in (0.0, 1.0):  # (0: none is given)
        raise fields.refused(f"{kind}.expert_weights_scale {scale:g}: not served")
    return {"num_experts_per_tok": fields.integer(f"{kind}.expert_used_count")}


def _window(fields: Fields, kind: str) -> int | None:
    return fields.integer(f"{kind}.attention.sliding_window", 0, least=0, most=MAX_CONTEXT) or None


def _divisor(config: Config, *, largest: int) -> float:
    """Of queries, squared: in the largest model, by its layers, it is not a head's size."""
    if config["num_hidden_layers"] != largest:
        return float(config["head_dim"])
    return float(config["hidden_size"]) / float(config["num_attention_heads"])


_EXPERTS: Final = {
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
_SHARED: Final = {
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
GGUF_FAMILIES: Final[Mapping[str, GgufFamily]] = {
    "llama": GgufFamily("LlamaForCausalLM", paired=True, more=_llama),
    "qwen2": GgufFamily("Qwen2ForCausalLM"),
    "qwen3": GgufFamily("Qwen3ForCausalLM"),
    # The text parts of models that see images, which another file (mmproj) is for.
    "qwen2vl": GgufFamily("Qwen2ForCausalLM"),
    "qwen3vl": GgufFamily("Qwen3ForCausalLM"),
    "qwen3vlmoe": GgufFamily(
        "Qwen3MoeForCausalLM", {"mlp.gate": "ffn_gate_inp", **_EXPERTS}, mixture=True, more=_qwen3_moe
    ),
    "ernie4_5": GgufFamily("Ernie4_5ForCausalLM"),
    "gemma": GgufFamily("GemmaForCausalLM", plus_one=True),
    "gemma2": GgufFamily("Gemma2ForCausalLM", _RESULT_NORMS, plus_one=True, more=_gemma2),
    "gemma3": GgufFamily("Gemma3ForCausalLM", _RESULT_NORMS, plus_one=True, more=_gemma3),
    "phi3": GgufFamily(
        "Phi3ForCausalLM",
        {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
        partial=True,
        more=_phi3,
    ),
    "smollm3": GgufFamily("SmolLM3ForCausalLM", paired=True),
    "granite": GgufFamily("GraniteForCausalLM", paired=True, more=_granite),
    "olmo2": GgufFamily(
        "Olmo2ForCausalLM",
        {key: name for key, name in _RESULT_NORMS.items() if name != "ffn_norm"},
        more=_olmo2,
    ),
    "glm4": GgufFamily(
        "Glm4ForCausalLM",
        {
            "post_self_attn_layernorm": "post_attention_norm",
            "post_mlp_layernorm": "post_ffw_norm",
            "mlp.gate_up_proj": "ffn_up",
        },
        partial=True,
    ),
    "gpt-oss": GgufFamily(
        "GptOssForCausalLM",
        {
            "post_attention_layernorm": "post_attention_norm",
            "self_attn.sinks": "attn_sinks",
            "mlp.router": "ffn_gate_inp",
            **_EXPERTS,
        },
        mixture=True,
        more=_gpt_oss,
    ),
    "qwen3moe": GgufFamily(
        "Qwen3MoeForCausalLM", {"mlp.gate": "ffn_gate_inp", **_EXPERTS}, mixture=True, more=_qwen3_moe
    ),
    "ernie4_5-moe": GgufFamily(
        "Ernie4_5_MoeForCausalLM",
        {
            "mlp.gate": "ffn_gate_inp",
            "mlp.moe_statics.e_score_correction": "exp_probs_b",
            **_SHARED,
            **_EXPERTS,
        },
        mixture=True,
        more=_ernie4_5_moe,
    ),
    "olmoe": GgufFamily(
        "OlmoeForCausalLM", {"mlp.gate": "ffn_gate_inp", **_EXPERTS}, mixture=True, more=_olmoe
    ),
    "granitemoe": GgufFamily(
        "GraniteMoeForCausalLM",
        {
            "block_sparse_moe.router.layer": "ffn_gate_inp",
            **{ours.replace("mlp.", "block_sparse_moe."): theirs for ours, theirs in _EXPERTS.items()},
        },
        paired=True,
        mixture=True,
        more=_granite_moe,
    ),
    "glm4moe": GgufFamily(
        "Glm4MoeForCausalLM",
        {
            "post_attention_layernorm": "post_attention_norm",
            "mlp.gate": "ffn_gate_inp",
            "mlp.gate.e_score_correction": "exp_probs_b",
            **_SHARED,
            **_EXPERTS,
        },
        mixture=True,
        partial=True,
        more=_glm4_moe,
    ),
}
"""By `general.architecture`."""
_WINDOWED: Final = frozenset({"llama", "gemma2", "gemma3", "phi3", "olmo2", "gpt-oss"})


def check_window(fields: Fields, kind: str) -> None:
    """Raises `UnsupportedModel` for a window where none is known."""
    if kind not in _WINDOWED and (window := _window(fields, kind)):
        raise fields.refused(f"{kind}.attention.sliding_window {window}: not served for this architecture")
