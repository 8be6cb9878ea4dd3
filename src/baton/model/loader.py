"""From safetensors files to the parameters of one rank, without a second copy of the model in memory.

Theory.  Files are mapped, not read.  Each layer has declared which slice of which checkpoint tensor fills
which part of its parameters (`layers.Piece`); the loader visits the files one by one, takes just these
slices and copies them into place, converting the dtype on the way.  What is in memory besides the
parameters is at most one slice.  Pages of the files belong to the page cache, shared by all ranks.

A checkpoint is complete or an error: a tensor that is missing, has another shape, or is there and unknown
to the model (so it may be another model than its config.json says) is a `LoadError` that names it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from baton.model.attention import AttentionBackend
from baton.model.config import ModelConfig
from baton.model.ernie4_5 import Ernie45ForCausalLM
from baton.model.layers import Piece, Placement
from baton.model.llama import LlamaForCausalLM
from baton.model.mistral import MistralForCausalLM
from baton.model.qwen2 import Qwen2ForCausalLM
from baton.model.qwen3 import Qwen3ForCausalLM

MODELS: dict[str, type[LlamaForCausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": MistralForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Ernie4_5ForCausalLM": Ernie45ForCausalLM,
}


class LoadError(ValueError):
    """The files do not hold the model that config.json describes.  One line that names the tensor."""


def load_model(
    directory: str | Path,
    config: ModelConfig,
    placement: Placement,
    backend: AttentionBackend,
    max_model_len: int,
) -> LlamaForCausalLM:
    """Builds this rank's part of the model and fills it from `directory`.  Raises `LoadError`."""
    with torch.device("cpu"):
        model = MODELS[config.architecture](config, placement, backend, max_model_len)
    load_weights(model, Path(directory), config)
    return model.eval()


def load_weights(model: nn.Module, directory: Path, config: ModelConfig) -> None:
    """Fills the parameters from `directory`.

    Raises `LoadError` before the first byte is copied if the files do not hold the model (`check_weights`);
    if they cannot be read after all, later, and then old and new are mixed.
    """
    check_weights(model, directory, config)
    wanted = _pieces(model)
    for path in checkpoint_files(directory):
        try:
            with safe_open(str(path), framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118 - not a dictionary
                    for piece in wanted.get(name, ()):
                        _fill(piece, file.get_slice(name))
        except (SafetensorError, OSError) as error:
            raise LoadError(f"{str(path)!r} cannot be read: {error}") from None


def check_weights(model: nn.Module, directory: Path, config: ModelConfig) -> None:
    """Compares names, shapes and kinds of all tensors with what the model needs; reads headers only.

    Raises `LoadError`.
    """
    wanted = _pieces(model)
    # A rank whose share of a small vocabulary is empty declares no piece, but the tensor is known.
    known = set(wanted) | {"model.embed_tokens.weight", "lm_head.weight"}
    unexpected: list[str] = []
    loaded: set[str] = set()
    for path in checkpoint_files(directory):
        try:
            with safe_open(str(path), framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118 - not a dictionary
                    if name in loaded:
                        raise LoadError(f"{str(path)!r}: tensor {name!r} is in another file too")
                    if name in wanted:
                        _check(wanted[name][0], file.get_slice(name), path)
                        loaded.add(name)
                    elif name not in known and not _is_harmless(name):
                        unexpected.append(name)
        except (SafetensorError, OSError) as error:
            raise LoadError(f"{str(path)!r} cannot be read: {error}") from None
    missing = sorted(set(wanted) - loaded)
    if missing:
        raise LoadError(
            f"{str(directory)!r}: no tensor {_some(missing)} in the checkpoint, which "
            f"{config.architecture} needs according to config.json"
        )
    if unexpected:
        raise LoadError(
            f"{str(directory)!r}: {config.architecture} as in config.json has no place for tensor "
            f"{_some(sorted(unexpected))}"
        )


def _pieces(model: nn.Module) -> dict[str, list[Piece]]:
    """By the name of the checkpoint tensor that they come from."""
    wanted: dict[str, list[Piece]] = defaultdict(list)
    for module in model.modules():
        for piece in getattr(module, "pieces", ()):
            wanted[piece.source].append(piece)
    return wanted


def checkpoint_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint: those of its index, or all.  Raises `LoadError`."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise LoadError(f"{str(index)!r} cannot be read: {error!r}") from None
        files = [directory / name for name in names]
        absent = [path.name for path in files if not path.is_file()]
        if absent:
            raise LoadError(f"{str(directory)!r}: file {_some(absent)} named in {index.name} is missing")
        return files
    # Some checkpoints hold every tensor a second time, under other names, in consolidated files.
    found = sorted(directory.glob("*.safetensors"))
    files = [path for path in found if not path.name.startswith("consolidated")]
    if not files:
        raise LoadError(f"{str(directory)!r} has no *.safetensors files with tensors in the usual names")
    return files


def _check(piece: Piece, source: Any, path: Path) -> None:
    """Whether `source` (a safetensors slice) can be what `piece` comes from.  Raises `LoadError`."""
    shape = tuple(source.get_shape())
    if shape != piece.shape:
        raise LoadError(
            f"{str(path)!r}: tensor {piece.source!r} has shape {list(shape)}, config.json makes it "
            f"{list(piece.shape)}"
        )
    if not source.get_dtype().startswith(("F", "BF")):
        kind = source[:1].dtype
        raise LoadError(f"{str(path)!r}: tensor {piece.source!r} is {kind}; Baton reads floating point")


def _fill(piece: Piece, source: Any) -> None:
    """Copies a part of `source` (a safetensors slice: shape and indexing) into its place."""
    shape = source.get_shape()
    stop = shape[piece.dim] if piece.stop is None else piece.stop
    part = source[piece.start : stop] if piece.dim == 0 else source[:, piece.start : stop]
    piece.target.copy_(part if piece.transform is None else piece.transform(part))


def _is_harmless(name: str) -> bool:
    """Tensors that some programs save though they follow from config.json."""
    return name.endswith(("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached"))


def _some(names: Iterable[str]) -> str:
    names = list(names)
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return f"{names[0]!r}{more}"
