"""Phi 3, 3.5, 4 and 4-mini: Llama with fused matrices, heads that are rotated in part, and LongRoPE."""

from __future__ import annotations

from dataclasses import replace

from baton.model.architectures.reading import (
    Family,
    describe,
    read_mlp,
    read_rope,
    read_sizes,
    windows_of,
)
from baton.model.description.fields import Fields
from baton.model.description.model import AttentionConfig, Description, LayerConfig, Names

_NAMES = Names(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj")


def _phi3(fields: Fields) -> Description:
    sizes = read_sizes(fields)
    rope, mlp = read_rope(fields, sizes, partial=True, old_names=_OLD), read_mlp(fields)
    attention = AttentionConfig(sizes.heads, sizes.kv_heads, sizes.head_dim, rope, sizes.head_dim**-0.5)
    windows = windows_of(fields, ["sliding_attention"] * sizes.layers)
    layers = [LayerConfig(replace(attention, window=window), mlp) for window in windows]
    return describe(fields, sizes, layers, names=_NAMES)


_OLD = {"su": "longrope", "yarn": "longrope"}
"""As the first files called it."""
FAMILIES = (
    Family("Phi3ForCausalLM", _phi3, {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096}),
)
