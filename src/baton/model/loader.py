"""From safetensors files to the parameters of one rank, without a second copy of the model in memory.

Theory.  Files are mapped, not read.  Each layer has declared which slice of which checkpoint tensor fills
which part of its parameters (`layers.Piece`); the loader visits the layers one by one, takes just these
slices and copies them into place, converting the dtype on the way, and lets the layer bring them into the
form that it computes with.  What is in memory besides the weights is at most one layer.  Pages of the files
belong to the page cache, shared by all ranks.

A checkpoint is complete or an error: a tensor that is missing, has another shape, or is there and unknown
to the model (so it may be another model than its config.json says) is a `LoadError` that names it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from baton.model.architectures.ernie4_5 import Ernie45ForCausalLM
from baton.model.architectures.llama import LlamaForCausalLM
from baton.model.architectures.qwen3 import Qwen3ForCausalLM
from baton.model.attention import AttentionBackend
from baton.model.checkpoint.config import ModelConfig
from baton.model.checkpoint.files import LoadError, checkpoint_files, some
from baton.model.layers.layers import Module, Piece, Placement

MODELS: dict[str, type[LlamaForCausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": LlamaForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Ernie4_5ForCausalLM": Ernie45ForCausalLM,
}
"""By name in `config.json`.  Mistral's windows, and Qwen2's biases and windows, stand in `ModelConfig`, so
their modules are Llama's own."""

_EMBEDDING = "model.embed_tokens.weight"


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
    return model


def load_weights(model: LlamaForCausalLM, directory: Path, config: ModelConfig) -> None:
    """Fills the layers from `directory`, one after the other.

    Raises `LoadError` before the first byte is copied if the files do not hold the model (`check_weights`);
    if they cannot be read after all, later, and then old and new are mixed.
    """
    check_weights(model, directory, config)
    model.weights_change()
    # A step tells (`TorchExecutor`), but for embeddings of other tokens, and for what becomes bytes.
    careful = model.weights == "int8"
    try:
        with ExitStack() as stack:
            files: dict[str, Any] = {}
            for path in checkpoint_files(directory):
                file = stack.enter_context(safe_open(str(path), framework="pt", device="cpu"))
                files.update(dict.fromkeys(file.keys(), file))
            for layer in model.layers_within():
                filled = layer.open()
                for piece in layer.pieces:
                    target, part = filled[piece.parameter], _part(piece, files[piece.source])
                    if (careful or piece.source == _EMBEDDING) and not is_finite(part):
                        raise LoadError(_not_numbers(directory, [piece.source]))
                    whole = part.shape == target.shape and part.dtype == target.dtype
                    if layer.copies and piece.parameter == "weight" and whole and part.is_contiguous():
                        filled[piece.parameter] = part
                    else:
                        target[piece.row : piece.row + part.shape[0]].copy_(part)
                layer.close(filled)
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{str(directory)!r} cannot be read: {error}") from None


def check_numbers(directory: Path) -> None:
    """Reads all tensors.  Raises `LoadError` if there are NaN or infinities in any."""
    wrong: list[str] = []
    try:
        for path in checkpoint_files(directory):
            with safe_open(str(path), framework="pt", device="cpu") as file:
                wrong += [name for name in file.keys() if not is_finite(file.get_tensor(name))]  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{str(directory)!r} cannot be read: {error}") from None
    if wrong:
        raise LoadError(_not_numbers(directory, sorted(wrong)))


def is_finite(tensor: Tensor) -> bool:
    """Whether there is no NaN and no infinity among the elements."""
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    # A single pass, without a result as large as the tensor.
    return all(map(math.isfinite, torch.stack(torch.aminmax(_wider(tensor))).tolist()))


def _wider(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.itemsize == 1 else tensor  # float8 has no order


def _not_numbers(directory: Path, names: list[str]) -> str:
    return f"{str(directory)!r}: tensor {some(names)} holds NaN or infinity; the checkpoint is damaged"


def check_weights(model: Module, directory: Path, config: ModelConfig) -> None:
    """Compares names, shapes and kinds of all tensors with what the model needs; reads headers only.

    Raises `LoadError`.
    """
    wanted = _pieces(model)
    # A rank whose share of a small vocabulary is empty declares no piece, but the tensor is known.
    known = set(wanted) | {_EMBEDDING, "lm_head.weight"}
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
            f"{str(directory)!r}: no tensor {some(missing)} in the checkpoint, which "
            f"{config.architecture} needs according to config.json"
        )
    if unexpected:
        raise LoadError(
            f"{str(directory)!r}: {config.architecture} as in config.json has no place for tensor "
            f"{some(sorted(unexpected))}"
        )


def _pieces(model: Module) -> dict[str, list[Piece]]:
    """By the name of the checkpoint tensor that they come from."""
    wanted: dict[str, list[Piece]] = defaultdict(list)
    for layer in model.layers_within():
        for piece in layer.pieces:
            wanted[piece.source].append(piece)
    return wanted


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


def _part(piece: Piece, file: Any) -> Tensor:
    """What of a file (an open `safe_open`) fills the piece; a view of the mapping if nothing is reordered."""
    source = file.get_slice(piece.source)
    stop = source.get_shape()[piece.dim] if piece.stop is None else piece.stop
    part: Tensor = source[piece.start : stop] if piece.dim == 0 else source[:, piece.start : stop]
    return part if piece.transform is None else piece.transform(part)


def _is_harmless(name: str) -> bool:
    """Tensors that some programs save though they follow from config.json."""
    return name.endswith(("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached"))
