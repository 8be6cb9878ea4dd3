"""The header of a GGUF file: metadata, and which tensors it has, of what type and where.

A file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) is `GGUF`, a version, the numbers of
tensors and of metadata, the metadata (a name, a type, a value), a description of each tensor, and from the
next multiple of the alignment on the tensors themselves.  Numbers are little-endian.  Dimensions stand
innermost first; here they are as in PyTorch, [out, in].  Large models come in several files,
NAME-00001-of-00003.gguf: the first has the metadata, each describes its own tensors.

Quantized tensors are made of blocks of 32 or 256 inputs of a row: `reading/ggml.py` takes them apart.

What is wrong with a file is an error here, in milliseconds and without torch, before a worker is started for
it: `LoadError` for what is damaged, `UnsupportedModel` for what is not served.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, Final

from baton.model.checkpoint.files import LoadError, some
from baton.model.description.fields import UnsupportedModel

SUFFIX: Final = ".gguf"
_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)

BLOCKS: Final = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22),
    "Q5_1": (32, 24), "Q8_0": (32, 34), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
    "MXFP4": (32, 17),
}  # fmt: skip
"""By type: elements and bytes of a block.  All that are served."""
FLOATS: Final = ("F32", "F16", "BF16")
TYPES: Final = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K",
    11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32",
    27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
    41: "Q1_0",
}  # fmt: skip
"""By their numbers in a file."""

_STRING, _ARRAY = 8, 9
_NUMBERS: Final = {
    number: struct.Struct(f"<{form}")
    for number, form in {
        0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"
    }.items()
}  # fmt: skip
_LENGTH: Final = _NUMBERS[10]
_MAX_DIMENSIONS: Final = 4
_MAX_FLOATS: Final = 1 << 13
_MAX_NAME: Final = 1 << 16
_MAX_SHARDS: Final = 10_000
_SHARD: Final = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf\Z", re.IGNORECASE)


@dataclass(frozen=True)
class Strings:
    """A list of strings of the metadata, which is read when it is needed."""

    path: Path
    offset: int
    """Of the first one, in bytes"""
    count: int

    def read(self) -> list[str]:
        """Raises `LoadError`."""
        with _Reader(self.path) as reader:
            reader.place = self.offset
            return [reader.text() for _ in range(self.count)]


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor is."""

    name: str
    shape: tuple[int, ...]
    kind: str
    """One of BLOCKS"""
    path: Path
    offset: int
    """In the file, in bytes"""

    @property
    def nbytes(self) -> int:
        elements, size = BLOCKS[self.kind]
        return prod(self.shape) // elements * size


@dataclass(frozen=True)
class GgufFile:
    """What the header says; of all files of a model that comes in several."""

    path: Path
    """The first file"""
    metadata: Mapping[str, Any]
    """Numbers, strings, booleans, lists of numbers and booleans, and `Strings`"""
    tensors: Mapping[str, GgufTensor]
    headers: Mapping[Path, int]
    """Each file, and where its tensors begin"""

    @property
    def quantized(self) -> list[str]:
        """Types of those that are not in floating point, the one with the most elements first."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors.values():
            if tensor.kind not in FLOATS:
                sizes[tensor.kind] = sizes.get(tensor.kind, 0) + prod(tensor.shape)
        return sorted(sizes, key=sizes.__getitem__, reverse=True)

    def floats(self, name: str, count: int) -> list[float]:
        """The numbers of a tensor, which is a part of the configuration.  Raises `LoadError` if it has not so
        many, and for what is no positive number."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise LoadError(f"{str(self.path)!r}: no tensor {name!r} in the file")
        if tensor.shape != (count,) or tensor.kind != "F32" or count > _MAX_FLOATS:
            raise LoadError(
                f"{str(tensor.path)!r}: tensor {name!r} is {list(tensor.shape)} in {tensor.kind}, not "
                f"[{count}] in F32"
            )
        try:
            with tensor.path.open("rb") as opened:
                opened.seek(tensor.offset)
                found = list(struct.unpack(f"<{count}f", opened.read(tensor.nbytes)))
        except (OSError, struct.error) as error:
            raise LoadError(f"{str(tensor.path)!r} cannot be read: {error}") from None
        if not all(math.isfinite(number) and number > 0 for number in found):
            raise LoadError(
                f"{str(tensor.path)!r}: tensor {name!r} holds NaN, infinity, or no positive number"
            )
        return found

    def strings(self, key: str) -> list[str]:
        """A list of strings; empty if there is none.  Raises `LoadError`."""
        found = self.metadata.get(key)
        return found.read() if isinstance(found, Strings) else []


def is_gguf(path: Path) -> bool:
    """Whether a model is one GGUF file, or the first of several, rather than a directory."""
    return path.suffix.lower() == SUFFIX and not path.is_dir()


def read_gguf(path: Path) -> GgufFile:
    """The header of a model's file, or of all its files.  Raises `LoadError` or `UnsupportedModel`."""
    shards = shards_of(path)
    try:
        stats = [shard.stat() for shard in shards]
    except OSError as error:
        raise LoadError(f"{str(error.filename)!r} cannot be read: {error.strerror}") from None
    versions = tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats)
    return _read(tuple(shards), versions)


def shards_of(path: Path) -> list[Path]:
    """All files of the model that this is one of; only this, if it is not one of several."""
    found = _SHARD.match(path.name)
    if found is None:
        return [path]
    count = int(found["count"])
    if not 1 <= count <= _MAX_SHARDS:
        raise LoadError(f"{str(path)!r}: its name speaks of {count} files")
    suffix = path.name[-len(SUFFIX) :]
    names = [f"{found['stem']}-{number:05}-of-{count:05}{suffix}" for number in range(1, count + 1)]
    files = [path.parent / name for name in names]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise LoadError(f"{str(path)!r} is one of {count} files; {some(absent)} is missing beside it")
    return files


@lru_cache(maxsize=4)
def _read(shards: tuple[Path, ...], versions: tuple[object, ...]) -> GgufFile:
    metadata: Mapping[str, Any] = {}
    tensors: dict[str, GgufTensor] = {}
    headers: dict[Path, int] = {}
    for path in shards:
        found = _read_one(path)
        metadata = metadata or found.metadata
        headers |= found.headers
        for name, tensor in found.tensors.items():
            if name in tensors:
                raise LoadError(f"{str(path)!r}: tensor {name!r} is in another file too")
            tensors[name] = tensor
    count = metadata.get("split.count", 1)
    if isinstance(count, int) and count > 1 and count != len(shards):
        raise LoadError(
            f"{str(shards[0])!r} is one of {count} files; name them as they were, "
            f"NAME-00001-of-{count:05}{SUFFIX} and so on, in one directory"
        )
    return GgufFile(shards[0], metadata, tensors, headers)


def _read_one(path: Path) -> GgufFile:
    with _Reader(path) as reader:
        if reader.size < 24 or reader.memory[:4] != _MAGIC:
            raise LoadError(f"{str(path)!r} is no GGUF file, or was cut short ({reader.size} bytes)")
        reader.place = 4
        version = reader.number(4)
        if version not in _VERSIONS:
            what = "big-endian" if version & 0xFFFF == 0 else f"of version {version}"
            raise UnsupportedModel(
                f"{str(path)!r} is {what}; Baton reads little-endian GGUF files of versions 2 and 3"
            )
        num_tensors, num_values = reader.number(10), reader.number(10)
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = reader.text(_MAX_NAME)
            if key in metadata:
                raise reader.damaged(f"the metadata has {key!r} twice")
            metadata[key] = reader.value(reader.number(4))
        described = [_description(reader) for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 8 or alignment % 8:
            raise reader.damaged(f"general.alignment is {alignment!r}")
        start = -(-reader.place // alignment) * alignment
        tensors = {}
        for name, shape, kind, offset in described:
            if name in tensors:
                raise reader.damaged(f"it has tensor {name!r} twice")
            tensors[name] = _placed(reader, GgufTensor(name, shape, kind, path, start + offset), alignment)
        return GgufFile(path, metadata, tensors, {path: start})


def _description(reader: _Reader) -> tuple[str, tuple[int, ...], str, int]:
    """Name, shape, type and offset of a tensor."""
    name = reader.text(_MAX_NAME)
    dimensions = reader.number(4)
    if dimensions > _MAX_DIMENSIONS:
        raise reader.damaged(f"tensor {name!r} has {dimensions} dimensions")
    shape = tuple(reader.number(10) for _ in range(dimensions))[::-1]
    number = reader.number(4)
    kind = TYPES.get(number, f"type {number}")
    if kind not in BLOCKS:
        raise UnsupportedModel(
            f"{str(reader.path)!r}: tensor {name!r} is {kind}; of GGUF Baton serves {', '.join(BLOCKS)}"
        )
    return name, shape, kind, int(reader.number(10))


def _placed(reader: _Reader, tensor: GgufTensor, alignment: int) -> GgufTensor:
    elements, _ = BLOCKS[tensor.kind]
    if not tensor.shape or tensor.shape[-1] % elements:
        raise reader.damaged(
            f"tensor {tensor.name!r} has shape {list(tensor.shape)}, {tensor.kind} has blocks of {elements}"
        )
    if tensor.offset % alignment:
        raise reader.damaged(f"tensor {tensor.name!r} is not at a multiple of the alignment")
    if tensor.offset + tensor.nbytes > reader.size:
        raise LoadError(
            f"{str(reader.path)!r} was cut short: {reader.size} bytes, its tensor {tensor.name!r} ends at "
            f"{tensor.offset + tensor.nbytes}; copy it again"
        )
    return tensor


class _Reader:
    """Values of a mapped file one after the other.  Errors are `LoadError`s that name the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.place = 0
        try:
            with path.open("rb") as file:
                self.size = os.fstat(file.fileno()).st_size
                if not self.size:
                    raise LoadError(f"{str(path)!r} is empty")
                self.memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise LoadError(f"{str(path)!r} cannot be read: {error.strerror}") from None

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.memory.close()

    def damaged(self, what: str) -> LoadError:
        return LoadError(f"{str(self.path)!r}: {what}; the file is damaged")

    def number(self, kind: int) -> Any:
        """A number or boolean of a type of the metadata."""
        form = _NUMBERS[kind]
        first = self._take(form.size)
        return form.unpack_from(self.memory, first)[0]

    def text(self, most: int | None = None) -> str:
        (length,) = _LENGTH.unpack_from(self.memory, self._take(8))
        if most is not None and length > most:
            raise self.damaged(f"a name of {length} bytes at {self.place}")
        first = self._take(length)
        # A part of a character is a token in some vocabularies.
        return self.memory[first : first + length].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind in _NUMBERS:
            return self.number(kind)
        if kind != _ARRAY:
            raise self.damaged(f"a value of the unknown type {kind} at {self.place}")
        inner, count = self.number(4), self.number(10)
        if inner == _STRING:
            found = Strings(self.path, self.place, count)
            for _ in range(count):
                (length,) = _LENGTH.unpack_from(self.memory, self._take(8))
                self._take(length)
            return found
        if inner not in _NUMBERS:
            raise self.damaged(f"a list of the type {inner} at {self.place}")
        form = _NUMBERS[inner]
        first = self._take(count * form.size)
        return [item for (item,) in form.iter_unpack(self.memory[first : self.place])]

    def _take(self, count: int) -> int:
        """The place of the next `count` bytes."""
        first = self.place
        self.place = first + count
        if self.place > self.size:
            raise LoadError(f"{str(self.path)!r} was cut short: its header goes on after {self.size} bytes")
        return first
