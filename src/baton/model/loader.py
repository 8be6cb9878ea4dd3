"""From safetensors or GGUF files to the parameters of one rank, without a second copy of the model in memory.

Theory.  Files are mapped, not read.  Each layer has declared which slice of which checkpoint tensor fills
which part of its parameters (`layers.Piece`); the loader visits the layers one by one, takes just these
slices and copies them into place, converting the dtype on the way, and lets the layer bring them into the
form that it computes with.  What is in memory besides the weights is at most one layer, which all threads
fill together, or some small ones, as experts are, each of which one thread fills (`cpu.alone`).  Pages of the
files belong to the page cache, shared by all ranks.

A checkpoint is complete or an error: a tensor that is missing, has another shape, or is there and unknown
to the model (so it may be another model than its config.json says) is a `LoadError` that names it.

Of a model whose store is complete (`weights.store`) nothing is read.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from baton.model.adapted.build import Built
from baton.model.adapted.decoder import AdaptedDecoder
from baton.model.attention import AttentionBackend
from baton.model.checkpoint.config import ModelConfig
from baton.model.checkpoint.files import LoadError, checkpoint_files, some
from baton.model.checkpoint.gguf import is_gguf
from baton.model.cpu.alone import can_compute_alone, computed_alone
from baton.model.decoder.decoder import Decoder
from baton.model.layers.layers import Layer, Module
from baton.model.layers.piece import Piece
from baton.model.layers.placement import Placement
from baton.model.reading.gguf import GgufSource
from baton.model.reading.safetensors import SafetensorsSource
from baton.model.weights.grouped import Grouped, InGroups, joined

log = logging.getLogger(__name__)

AnyDecoder = Decoder | AdaptedDecoder
"""What an executor runs."""
Source = SafetensorsSource | GgufSource
OnLayer = Callable[[str, float], None]
"""Called with the first tensor of a layer that is in place, and how much of the whole is."""
_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_AT_ONCE = 1 << 26
"""Elements of layers that several threads fill at once, at most."""


def load_model(
    directory: str | Path,
    config: ModelConfig,
    placement: Placement,
    backend: AttentionBackend,
    max_model_len: int,
    on_layer: OnLayer | None = None,
    built: Built | None = None,
    mtp_backend: AttentionBackend | None = None,
) -> AnyDecoder:
    """Builds this rank's part of the model and fills it from `directory`.  Raises `LoadError`.

    `built`: of a model that transformers computes.  `mtp_backend`: as `Decoder`'s; without it tensors of such
    a layer are not read.
    """
    model: AnyDecoder
    with torch.device("cpu"):
        if built is None:
            if mtp_backend is not None and config.mtp is None:
                raise LoadError(config.why_no_mtp(str(directory)))
            model = Decoder(config, placement, backend, max_model_len, mtp_backend)
        else:
            model = AdaptedDecoder(built, placement, backend, max_model_len)
    store, errors = placement.store, placement.rounded.errors
    if store.complete:
        for layer in model.layers_within():
            layer.attach()
    else:
        load_weights(model, Path(directory), config, on_layer)
    errors.update({name: float(error) for name, error in store.note("rounded", lambda: errors).items()})
    return model


def load_weights(
    model: AnyDecoder, directory: Path, config: ModelConfig, on_layer: OnLayer | None = None
) -> None:
    """Fills the layers from `directory`, one after the other.

    Raises `LoadError` before the first byte is copied if the files do not hold the model (`check_weights`);
    if they cannot be read after all, later, and then old and new are mixed.
    """
    if model.placement.store.complete:
        raise AssertionError("the weights of this model lie in an image, which nobody writes")
    with open_source(directory, config) as source:
        _name_as_class(model, source)
        _check(model, source, directory, config)
        model.weights_change()
        # A step tells (`TorchExecutor`), but for embeddings of other tokens, and for what becomes bytes.
        careful = model.weights == "int8" or model.placement.grouping is not None
        layers = list(model.layers_within())
        done, whole = 0, sum(_elements(layer) for layer in layers) or 1
        for layer in _filled(layers, lambda layer: _fill(layer, source, directory, careful)):
            done += _elements(layer)
            if on_layer is not None and layer.pieces:
                on_layer(layer.pieces[0].source, done / whole)
        rounded = model.placement.rounded
        for name, relative in source.rounded.items():
            rounded.note(name, relative)
        rounded.sort(piece.source for layer in layers for piece in layer.pieces)


def _filled(layers: Sequence[Layer], fill: Callable[[Layer], None]) -> Iterator[Layer]:
    """Fills all; gives each when it is in place.  Small ones are shared out to threads as they are."""
    small = [layer for layer in layers if layer.apart and _elements(layer) <= _AT_ONCE // 2]
    largest = max(map(_elements, small), default=0)
    threads = min(torch.get_num_threads(), _AT_ONCE // max(largest, 1), len(small))
    if threads < 2 or not can_compute_alone():
        small = []
    apart = set(map(id, small))
    for layer in layers:
        if id(layer) not in apart:
            fill(layer)
            yield layer
    if small:
        for number in computed_alone([partial(fill, layer) for layer in small], threads):
            yield small[number]


def _fill(layer: Layer, source: Source, directory: Path, careful: bool) -> None:
    """Raises `LoadError`, also for NaN and infinity if `careful`."""
    filled: dict[str, Tensor | InGroups] = dict(layer.open())
    groups: dict[str, list[tuple[Piece, Grouped]]] = defaultdict(list)
    for piece in layer.pieces:
        part = _part(piece, source)
        if isinstance(part, Grouped):
            groups[piece.parameter].append((piece, part))
            continue
        if (careful or piece.source == _EMBEDDING) and not is_finite(part):
            raise LoadError(_not_numbers(directory, [piece.source]))
        _put(layer, filled, piece, part)
    for parameter, parts in groups.items():
        _put_groups(layer, filled, parameter, parts)
    try:
        layer.close(filled)
    except ValueError as error:
        raise LoadError(f"{str(directory)!r}: {layer.pieces[0].source}: {error}") from None


def _elements(layer: Layer) -> int:
    """Of the checkpoint's tensors that fill it."""
    shapes = (piece.shape if piece.index is None else piece.shape[1:] for piece in layer.pieces)
    return sum(map(math.prod, shapes))


def open_source(directory: Path, config: ModelConfig) -> Source:
    """The tensors of a checkpoint, until its `with` ends.  Raises `LoadError`."""
    if is_gguf(directory):
        return GgufSource(directory, config.head_dim)
    return SafetensorsSource(directory, config.quantization, config.names.mixture.stacked)


def _put(layer: Layer, filled: dict[str, Tensor | InGroups], piece: Piece, part: Tensor) -> None:
    target = filled[piece.parameter]
    assert isinstance(target, Tensor)
    whole = part.shape == target.shape and part.dtype == target.dtype
    if layer.copies and piece.parameter == "weight" and whole and part.is_contiguous():
        filled[piece.parameter] = part
    else:
        target[piece.row : piece.row + part.shape[0]].copy_(part)


def _put_groups(
    layer: Layer, filled: dict[str, Tensor | InGroups], parameter: str, parts: list[tuple[Piece, Grouped]]
) -> None:
    """In groups if the whole parameter is, and the layer takes them; else expanded beside the rest."""
    if layer.takes_groups and len(parts) == sum(piece.parameter == parameter for piece in layer.pieces):
        try:
            filled[parameter] = joined([part for _, part in parts])
            return
        except ValueError:
            pass  # matrices of one product that differ in the order of their inputs
    for piece, part in parts:
        _put(layer, filled, piece, part.dequantized())


def check_numbers(directory: Path) -> None:
    """Reads all tensors.  Raises `LoadError` if there are NaN or infinities in any."""
    wrong: list[str] = []
    if is_gguf(directory):
        with GgufSource(directory, 0) as source:
            wrong = source.not_finite()
        if wrong:
            raise LoadError(_not_numbers(directory, sorted(wrong)))
        return
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
    """Compares names, shapes and kinds of all tensors with what the model needs; reads headers and scales.

    Raises `LoadError`.
    """
    with open_source(directory, config) as source:
        _name_as_class(model, source)
        _check(model, source, directory, config)


def _name_as_class(model: Module, source: Source) -> None:
    """Tensors of a model that transformers computes get the names that its class has for them."""
    if isinstance(model, AdaptedDecoder):
        assert isinstance(source, SafetensorsSource)
        source.rename(model.names.ours(list(source.names())))


def _check(model: Module, source: Source, directory: Path, config: ModelConfig) -> None:
    pieces = (piece for layer in model.layers_within() for piece in layer.pieces)
    wanted = {_name_of(piece, source): piece.shape for piece in pieces}
    # A rank whose share of a small vocabulary is empty declares no piece, but the tensor is known.
    known = {_EMBEDDING, _HEAD}
    if isinstance(model, AdaptedDecoder):
        known |= {name for name in source.names() if model.names.is_computed(name)} | model.unread
    missing: list[str] = []
    for name, shape in wanted.items():
        used, absent = source.check(name, shape)
        known |= used
        missing += absent
    if missing:
        of_mtp = [name for name in missing if name.startswith(config.names.unused or ("\0",))]
        if of_mtp:
            raise LoadError(
                f"{str(directory)!r}: no tensor {some(sorted(of_mtp))} in the checkpoint, which method mtp "
                f"drafts with; {source.described_by} promises it, but whoever saved the file left it out: "
                "leave method mtp away"
            )
        hint = (
            "; it may have been saved for vectors of texts: give --runner pooling"
            if missing == [_HEAD]
            else ""
        )
        raise LoadError(
            f"{str(directory)!r}: no tensor {some(sorted(missing))} in the checkpoint, which "
            f"{config.architecture} needs according to {source.described_by}{hint}"
        )
    unexpected = sorted(name for name in source.names() if name not in known and not _is_harmless(name))
    if unused := [name for name in unexpected if name.startswith(config.names.unused)]:
        log.info("%s: tensors for more than one token a step are not read: %s", directory, some(unused))
        unexpected = [name for name in unexpected if not name.startswith(config.names.unused)]
    if unexpected:
        raise LoadError(
            f"{str(directory)!r}: {config.architecture} as in {source.described_by} has no place for tensor "
            f"{some(unexpected)}"
        )


def _part(piece: Piece, source: Source) -> Tensor | Grouped:
    """What fills the piece; a view of the mapping if nothing is reordered."""
    shape = piece.shape if piece.index is None else piece.shape[1:]
    stop = (shape or (1,))[piece.dim] if piece.stop is None else piece.stop
    name = _name_of(piece, source)
    if piece.index is None:
        part = source.read(name, piece.shape, piece.dim, piece.start, stop)
    else:
        part = source.read_of_stack(name, piece.shape, piece.index, piece.dim, piece.start, stop)
    if piece.transform is None:
        return part
    return part.changed(piece.transform) if isinstance(part, Grouped) else piece.transform(part)


def _name_of(piece: Piece, source: Source) -> str:
    """What the checkpoint calls the piece's source."""
    return next((name for name in piece.others if name in source.names()), piece.source)


def _is_harmless(name: str) -> bool:
    """Tensors that some programs save though they follow from config.json, or are of no use here."""
    return name.endswith(
        ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", ".k_scale", ".v_scale")
    )
