"""The tensors of a model in GGUF files, which are mapped, not read."""

from __future__ import annotations

from collections.abc import Collection
from math import prod
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from baton.model.checkpoint.files import LoadError
from baton.model.checkpoint.gguf import BLOCKS, FLOATS, GgufTensor, read_gguf
from baton.model.checkpoint.gguf_config import ROPE_FACTORS, family_of_file, gguf_name, usual_names
from baton.model.checkpoint.gguf_families import LONG_FACTORS, SHORT_FACTORS, GgufFamily
from baton.model.reading.ggml import decoded, plain, scales_finite
from baton.model.reading.gguf_experts import experts_apart
from baton.model.weights.grouped import Grouped
from baton.model.weights.rows import pairs_to_halves

_TURNED = ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")


class GgufSource:
    """Open until its `with` ends.  Raises `LoadError` if a file cannot be opened.

    Tensors go by the names that transformers gives them.  llama.cpp has the rows of Llama's q and k, and of
    some of its kin, in pairs (2i, 2i+1) for its rotation; they come out in halves.  Gemma's norms have the 1
    that they add; they come out without it.
    """

    described_by = "the file's metadata"

    def __init__(self, path: Path, head_dim: int) -> None:
        file = read_gguf(path)
        self._path = path
        self._family = family_of_file(file) or GgufFamily("")
        usual = usual_names(file.tensors, self._family)
        named = {usual[name]: tensor for name, tensor in file.tensors.items()}
        self._tensors = dict(experts_apart(named)) if self._family.mixture else named
        for name in (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS):  # parts of the configuration
            self._tensors.pop(name, None)
        self._head_dim = head_dim
        self._memory: dict[Path, Tensor] = {}
        self.rounded: dict[str, float] = {}
        """Relative errors (root mean square) of what was read and could not be held exactly."""
        for shard in file.headers:
            try:
                mapped = np.memmap(shard, np.uint8, "c")  # (private: torch warns of memory that is read-only)
            except (OSError, ValueError) as error:
                raise LoadError(f"{str(shard)!r} cannot be read: {error}") from None
            self._memory[shard] = torch.from_numpy(mapped)

    def __enter__(self) -> GgufSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._memory.clear()

    def names(self) -> Collection[str]:
        return self._tensors

    def check(self, source: str, shape: tuple[int, ...]) -> tuple[set[str], list[str]]:
        """The tensor that a parameter of the model is, and whether it is missing.

        Looks at headers.  Raises `LoadError` if it cannot be what the model needs.
        """
        tensor = self._tensors.get(source)
        if tensor is None:
            return {source}, [gguf_name(source, self._family)]
        if tensor.shape != shape:
            raise LoadError(
                f"{str(tensor.path)!r}: tensor {tensor.name!r} has shape {list(tensor.shape)}, "
                f"{self.described_by} makes it {list(shape)}"
            )
        if tensor.kind not in FLOATS and len(shape) != 2:
            raise LoadError(
                f"{str(tensor.path)!r}: tensor {tensor.name!r} is {tensor.kind}; Baton reads "
                f"{', '.join(FLOATS)} there"
            )
        return {source}, []

    def read(self, source: str, shape: tuple[int, ...], dim: int, start: int, stop: int) -> Tensor | Grouped:
        """[start, stop) along `dim` of a parameter; a view of the mapping if it is in floating point.

        Raises `LoadError`.
        """
        tensor = self._tensors[source]
        rows = slice(start, stop) if dim == 0 else slice(0, shape[0])
        try:
            part = self._rows(tensor, source, rows)
            if (
                self._family.paired
                and ".self_attn." in source
                and ".o_proj." not in source
                and ".v_proj." not in source
            ):
                part = self._unpaired(part)
            if self._family.plus_one and source.endswith("norm.weight"):
                assert isinstance(part, Tensor)
                part = part.float() - 1.0
            if dim == 0:
                return part
            return part.columns(start, stop) if isinstance(part, Grouped) else part[:, start:stop]
        except ValueError as error:
            raise LoadError(f"{str(tensor.path)!r}: tensor {tensor.name!r}: {error}") from None

    def read_of_stack(
        self, source: str, shape: tuple[int, ...], index: int, dim: int, start: int, stop: int
    ) -> Tensor | Grouped:
        """[start, stop) along `dim` of matrix `index` of a parameter; as `read`."""
        raise LoadError(f"{str(self._path)!r}: experts in one tensor are not read from GGUF files")

    def not_finite(self) -> list[str]:
        """Names of tensors with NaN or infinity in their scales, or anywhere if they are not quantized."""
        return [tensor.name for tensor in self._tensors.values() if not self._finite(tensor)]

    def _finite(self, tensor: GgufTensor) -> bool:
        memory = self._bytes(tensor, slice(0, tensor.shape[0]))
        if tensor.kind not in FLOATS:
            return scales_finite(tensor.kind, memory)
        low, high = torch.aminmax(plain(tensor.kind, memory, tensor.shape))
        return bool(torch.isfinite(low) & torch.isfinite(high))

    def _rows(self, tensor: GgufTensor, source: str, rows: slice) -> Tensor | Grouped:
        shape = (rows.stop - rows.start, *tensor.shape[1:])
        memory = self._bytes(tensor, rows)
        if tensor.kind in FLOATS:
            return plain(tensor.kind, memory, shape)
        found, error = decoded(tensor.kind, memory, (shape[0], shape[1]))
        if error:
            self.rounded[source] = error
        return found

    def _bytes(self, tensor: GgufTensor, rows: slice) -> Tensor:
        elements, size = BLOCKS[tensor.kind]
        row = prod(tensor.shape[1:]) * size // elements if len(tensor.shape) > 1 else size
        return self._memory[tensor.path][tensor.offset + rows.start * row : tensor.offset + rows.stop * row]

    def _unpaired(self, part: Tensor | Grouped) -> Tensor | Grouped:
        def change(rows: Tensor) -> Tensor:
            return pairs_to_halves(rows, self._head_dim)

        return part.changed(change) if isinstance(part, Grouped) else change(part)
