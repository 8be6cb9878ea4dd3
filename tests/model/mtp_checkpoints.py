"""ERNIE-4.5 mixtures with an MTP layer: transformers has no such layer, so its tensors are added here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.model.checkpoints import make_checkpoint

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS = 64, 96, 4, 2
BLOCK = "model.mtp_block.0."


def make_mtp_checkpoint(directory: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Saves a random model with a random layer to `directory`; returns the model, for reference."""
    model = make_checkpoint(directory, "ernie4_5-moe", dtype=dtype, **changes)
    save(directory, {name: tensor.to(dtype) for name, tensor in mtp_tensors().items()})
    return model


def make_agreeing(directory: Path, **changes: Any) -> None:
    """A model whose next token depends on its last one alone, and a layer that says what it says.

    Nothing is added to the residual stream, so the model's logits are those of the last token's embedding;
    the layer passes on the embedding that it is given.
    """
    make_checkpoint(directory, "ernie4_5-moe", tie_word_embeddings=False, **changes)
    save(directory, mtp_tensors())
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    tensors["model.mtp_emb_norm.0.weight"].fill_(1.0)
    projection = tensors["model.mtp_linear_proj.0.weight"].zero_()
    projection[:, :HIDDEN] = torch.eye(HIDDEN)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def mtp_tensors() -> dict[str, Tensor]:
    """By the names of ERNIE-4.5's checkpoints."""
    chance = torch.Generator().manual_seed(7)
    heads = HIDDEN // HEADS

    def weight(*shape: int) -> Tensor:
        return torch.randn(shape, generator=chance) * 0.15

    def norm() -> Tensor:
        return 1.0 + 0.3 * torch.randn(HIDDEN, generator=chance)

    return {
        "model.mtp_emb_norm.0.weight": norm(),
        "model.mtp_hidden_norm.0.weight": norm(),
        "model.mtp_linear_proj.0.weight": weight(HIDDEN, 2 * HIDDEN),
        f"{BLOCK}input_layernorm.weight": norm(),
        f"{BLOCK}post_attention_layernorm.weight": norm(),
        f"{BLOCK}self_attn.q_proj.weight": weight(HEADS * heads, HIDDEN),
        f"{BLOCK}self_attn.k_proj.weight": weight(KV_HEADS * heads, HIDDEN),
        f"{BLOCK}self_attn.v_proj.weight": weight(KV_HEADS * heads, HIDDEN),
        f"{BLOCK}self_attn.o_proj.weight": weight(HIDDEN, HEADS * heads),
        f"{BLOCK}mlp.gate_proj.weight": weight(INTERMEDIATE, HIDDEN),
        f"{BLOCK}mlp.up_proj.weight": weight(INTERMEDIATE, HIDDEN),
        f"{BLOCK}mlp.down_proj.weight": weight(HIDDEN, INTERMEDIATE),
    }


def save(directory: Path, tensors: dict[str, Tensor]) -> None:
    """Adds them to the checkpoint, and says so in its config.json."""
    path = directory / "model.safetensors"
    save_file({**load_file(path), **tensors}, path, {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["num_nextn_predict_layers"] = 1
    (directory / "config.json").write_text(json.dumps(config))
