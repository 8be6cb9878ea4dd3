"""The tensors of a checkpoint in safetensors files, which are mapped, not read."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from baton.model.checkpoint.files import LoadError, checkpoint_files
from baton.model.checkpoint.quantization import Quantization, Scheme
from baton.model.reading.gpt_oss import halves, views
from baton.model.reading.layouts import LayoutError, expected, read
from baton.model.weights.grouped import Grouped


class _Renamed:
    """A file, as seen by one tensor that has another name there."""

    def __init__(self, file: Any, name: str) -> None:
        self._file, self._name = file, name

    def get_slice(self, _: str) -> Any:
        return self._file.get_slice(self._name)

    def get_tensor(self, _: str) -> Any:
        return self._file.get_tensor(self._name)


class SafetensorsSource:
    """Open until its `with` ends.  Raises `LoadError` if a file cannot be opened or a name is in two."""

    described_by = "config.json"
    rounded: Mapping[str, float] = MappingProxyType({})
    """Errors of what cannot be held exactly: nothing is rounded."""

    def __init__(self, directory: Path, quantization: Quantization | None, stacked: str = "") -> None:
        """`stacked`: see `MixtureNames`."""
        self._directory = directory
        self._quantization = quantization
        self._files: dict[str, Any] = {}
        self._paths: dict[str, Path] = {}
        self._stack = ExitStack()
        try:
            for path in checkpoint_files(directory):
                self._open(path)
            self._name_as_text()
            self._name_as_whole()
            if stacked:
                self._name_experts(views if stacked == "gpt_oss" else halves)
        except BaseException:
            self._stack.close()
            raise

    def _open(self, path: Path) -> None:
        try:
            file = self._stack.enter_context(safe_open(str(path), framework="pt", device="cpu"))
            names = file.keys()
        except (SafetensorError, OSError) as error:
            raise LoadError(f"{str(path)!r} cannot be read: {error}") from None
        for name in names:
            if name in self._files:
                raise LoadError(f"{str(path)!r}: tensor {name!r} is in another file too")
            self._files[name], self._paths[name] = file, path

    def _name_as_text(self) -> None:
        """Of a model of texts and images: its decoder's tensors get the names of a model of texts, and the
        others, which nobody reads, are forgotten."""
        renamed = {ours: name for name in self._files if (ours := _of_text(name))}
        if any(ours.startswith("model.") and ours != name for ours, name in renamed.items()):
            self.rename(renamed)
        elif any(name.startswith(_IMAGES) for name in self._files):
            self.rename({name: name for name in self._files if not name.startswith(_IMAGES)})

    def rename(self, renamed: Mapping[str, str]) -> None:
        """`renamed`: by new names the present ones; tensors that are not among these are forgotten."""
        self._files = {name: _Renamed(self._files[old], old) for name, old in renamed.items()}
        self._paths = {name: self._paths[old] for name, old in renamed.items()}

    def _name_as_whole(self) -> None:
        """A checkpoint of the layers alone, as embedding models are saved: its tensors get the names that
        they have in the whole model."""
        if "embed_tokens.weight" not in self._files or any(name.startswith("model.") for name in self._files):
            return
        renamed = {
            name if name.startswith(("lm_head.", "score.")) else f"model.{name}": name for name in self._files
        }
        self.rename(renamed)

    def _name_experts(self, views: Callable[[Mapping[str, Any]], Iterable[tuple[str, str, Any]]]) -> None:
        """Experts that lie in tensors of all of them get names of their own."""
        try:
            found = list(views(self._files))
        except LoadError as error:
            raise LoadError(f"{str(self._directory)!r}: {error}") from None
        self._files = {ours: view or self._files[name] for ours, name, view in found}
        self._paths = {ours: self._paths[name] for ours, name, _ in found}

    def __enter__(self) -> SafetensorsSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()
        self._stack.close()

    def names(self) -> Collection[str]:
        return self._files

    def check(self, source: str, shape: tuple[int, ...]) -> tuple[set[str], list[str]]:
        """The tensors that a parameter of the model is made of, and those of them that are missing.

        Looks at headers, and at the scales of a quantized weight.  Raises `LoadError` if one cannot be what
        the model needs.
        """
        scheme = self._scheme(source, shape)
        if scheme is None:
            if source not in self._files:
                return {source}, [source]
            found = self._files[source].get_slice(source)
            if tuple(found.get_shape()) != shape:
                raise LoadError(
                    f"{str(self._paths[source])!r}: tensor {source!r} has shape {list(found.get_shape())}, "
                    f"config.json makes it {list(shape)}"
                )
            if not found.get_dtype().startswith(("F", "BF")):
                raise LoadError(
                    f"{str(self._paths[source])!r}: tensor {source!r} is {found[:1].dtype}; Baton reads "
                    "floating point"
                )
            return {source}, []
        module = source.removesuffix(".weight")
        try:
            parts = expected(scheme, (shape[0], shape[1]))
        except LayoutError as error:
            raise LoadError(f"{str(self._directory)!r}: {module}: {error}") from None
        missing = []
        for last, what in parts.items():
            name = f"{module}.{last}"
            if name not in self._files:
                missing += [name] if what.needed else []
                continue
            found = self._files[name].get_slice(name)
            there = tuple(found.get_shape())
            if there not in what.shapes:
                raise LoadError(
                    f"{str(self._paths[name])!r}: tensor {name!r} has shape {list(there)}, config.json makes "
                    f"it {list(what.shapes[0])}"
                )
            if found.get_dtype() not in what.kinds:
                raise LoadError(
                    f"{str(self._paths[name])!r}: tensor {name!r} is {found.get_dtype()}; Baton reads "
                    f"{' or '.join(what.kinds)} there"
                )
            if last in ("scales", "weight_scale") and not _are_numbers(self._whole(name)):
                raise LoadError(
                    f"{str(self._paths[name])!r}: tensor {name!r} holds NaN or infinity; the checkpoint "
                    "is damaged"
                )
        return {f"{module}.{last}" for last in parts}, missing

    def read(self, source: str, shape: tuple[int, ...], dim: int, start: int, stop: int) -> Tensor | Grouped:
        """[start, stop) along `dim` of a parameter; a view of the mapping if it is in floating point.

        Raises `LoadError`.
        """
        try:
            scheme = self._scheme(source, shape)
            if scheme is None and not shape:
                return self._whole(source)
            if scheme is None:
                found = self._files[source].get_slice(source)
                part: Tensor = found[start:stop] if dim == 0 else found[:, start:stop]
                return part
            module = source.removesuffix(".weight")
            parts = expected(scheme, (shape[0], shape[1]))
            names = {last: f"{module}.{last}" for last in parts}
            tensors = {last: self._whole(name) for last, name in names.items() if name in self._files}
            whole = read(scheme, tensors, (shape[0], shape[1]))
            return whole.rows(start, stop) if dim == 0 else whole.columns(start, stop)
        except (SafetensorError, OSError) as error:
            raise LoadError(f"{str(self._directory)!r} cannot be read: {error}") from None
        except ValueError as error:
            raise LoadError(f"{str(self._directory)!r}: {source}: {error}") from None

    def read_of_stack(
        self, source: str, shape: tuple[int, ...], index: int, dim: int, start: int, stop: int
    ) -> Tensor:
        """[start, stop) along `dim` of matrix or vector `index` of a parameter; a view of the mapping.

        Raises `LoadError`.
        """
        try:
            found = self._files[source].get_slice(source)
            part: Tensor = found[index, start:stop] if dim == 0 else found[index, :, start:stop]
            return part
        except (SafetensorError, OSError) as error:
            raise LoadError(f"{str(self._directory)!r} cannot be read: {error}") from None

    def _whole(self, name: str) -> Tensor:
        found: Tensor = self._files[name].get_tensor(name)
        return found

    def _scheme(self, source: str, shape: tuple[int, ...]) -> Scheme | None:
        """None for what is in floating point: where the scheme's tensors are not, but a weight is."""
        if self._quantization is None or len(shape) != 2 or not source.endswith(".weight"):
            return None
        scheme = self._quantization.scheme_of(source.removesuffix(".weight"))
        if scheme is None or source not in self._files:
            return scheme
        if scheme.layout != "int":
            return None
        kind: str = self._files[source].get_slice(source).get_dtype()
        return None if kind.startswith(("F", "BF")) else scheme


_IMAGES = ("visual.", "model.visual.")
"""Begins names of what sees images, where the decoder's have the names of a model of texts (Qwen2.5-VL)."""


def _are_numbers(scales: Tensor) -> bool:
    """Whether none is NaN or infinite; of exponents in a byte 255 is NaN."""
    if scales.dtype == torch.uint8:
        return not bool((scales == 255).any())
    # (their ends tell, without a result as large as they are)
    return not scales.numel() or all(map(math.isfinite, torch.stack(torch.aminmax(scales)).tolist()))


def _of_text(name: str) -> str:
    """The name in a model of texts alone; "" for what belongs to images.

    transformers 5 saves model.language_model.layers…, older programs language_model.model.layers….
    """
    for begin, ours in (
        ("model.language_model.", "model."),
        ("language_model.", ""),
        ("lm_head.", "lm_head."),
    ):
        if name.startswith(begin):
            return ours + name.removeprefix(begin)
    return ""
