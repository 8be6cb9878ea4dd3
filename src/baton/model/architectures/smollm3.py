"""SmolLM3: Llama, some of whose layers (every fourth) see no positions."""

from __future__ import annotations

from dataclasses import replace

from baton.model.architectures.reading import (
    Family,
    describe,
    layer_kinds,
    read_attention,
    read_mlp,
    read_sizes,
    windows_of,
)
from baton.model.description.fields import Fields
from baton.model.description.model import Description, LayerConfig


def _smollm3(fields: Fields) -> Description:
    sizes = read_sizes(fields)
    every = fields.integer("no_rope_layer_interval", 4)
    turned = fields.any("no_rope_layers") or [(layer + 1) % every != 0 for layer in range(sizes.layers)]
    if not isinstance(turned, list) or len(turned) < sizes.layers or not set(turned) <= {0, 1}:
        raise fields.wrong("no_rope_layers", f"must be a list of 0 or 1 for each of {sizes.layers} layers")
    windows: list[int | None] = [None] * sizes.layers
    if fields.flag("use_sliding_window"):
        kinds = layer_kinds(fields, sizes.layers)
        windows = windows_of(fields, kinds or ["" if rope else "sliding_attention" for rope in turned])
    attention = read_attention(fields, sizes)
    mlp = read_mlp(fields, bias=fields.flag("mlp_bias"))
    layers = [
        LayerConfig(replace(attention, window=window, rope=attention.rope if rope else None), mlp)
        for rope, window in zip(turned, windows, strict=False)
    ]
    return describe(fields, sizes, layers)


_DEFAULTS = {"num_key_value_heads": 4, "rope_theta": 2_000_000.0, "tie_word_embeddings": True}
FAMILIES = (Family("SmolLM3ForCausalLM", _smollm3, _DEFAULTS),)
