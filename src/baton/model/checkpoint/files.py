"""The files of a checkpoint: which there are, and whether they are whole.

A safetensors file begins with the length of its header (8 bytes, little-endian) and the header: a JSON object
that gives each tensor's type, shape and place in the rest of the file (https://huggingface.co/docs/safetensors:
Format).  So a file that was cut short, is no safetensors file, or whose header contradicts itself is found in
milliseconds and without torch, before a worker is started for it.  Which tensors a model needs, and in which
shapes, its layers say: `loader.check_weights`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any, Final

INDEX: Final = "model.safetensors.index.json"
_MAX_HEADER_BYTES: Final = 100_000_000
"""As in the safetensors library."""
_BITS: Final = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16,
    "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F4": 4,
    "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
_MOST_TOKENS: Final = 1 << 40
"""Beyond it no limit is meant: transformers writes 1e30 for none."""
_FLOATS: Final = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_TOKENIZERS: Final = (
    "tokenizer.json",
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "spiece.model",
    "tiktoken.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
)


class LoadError(ValueError):
    """The files do not hold the model that config.json describes.  One line that names file or tensor."""


def checkpoint_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint: those of its index, or all.  Raises `LoadError`."""
    index = directory / INDEX
    if index.is_file():
        files = [directory / name for name in _names_of(index)]
        absent = [path.name for path in files if not path.is_file()]
        if absent:
            raise LoadError(f"{str(directory)!r}: file {some(absent)} named in {INDEX} is missing")
        return files
    # Some checkpoints hold every tensor a second time, under other names, in consolidated files.
    found = sorted(directory.glob("*.safetensors"))
    files = [path for path in found if not path.name.startswith("consolidated")]
    if not files:
        raise LoadError(f"{str(directory)!r} has no *.safetensors files with tensors in the usual names")
    return files


def check_files(directory: Path) -> None:
    """Raises `LoadError` if a weight file is missing, cut short, or no safetensors file."""
    for path in checkpoint_files(directory):
        try:
            _check_file(path)
        except OSError as error:
            raise LoadError(f"{str(path)!r} cannot be read: {error.strerror}") from None


def usual_dtype(directory: Path) -> str | None:
    """In which floating point most numbers of the weight files are; None if that cannot be seen."""
    numbers = dict.fromkeys(_FLOATS, 0)
    try:
        for path in checkpoint_files(directory):
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(min(length, _MAX_HEADER_BYTES)))
            for name, tensor in header.items():
                if name != "__metadata__" and tensor["dtype"] in numbers:
                    numbers[tensor["dtype"]] += math.prod(tensor["shape"])
    except (LoadError, OSError, ValueError, RecursionError, AttributeError, KeyError, TypeError):
        return None  # (what is wrong with them, `check_files` says)
    most = max(numbers, key=numbers.__getitem__)
    return _FLOATS[most] if numbers[most] else None


def has_tokenizer(directory: Path) -> bool:
    """Whether there is any file that a tokenizer can be made of."""
    return any((directory / name).is_file() for name in _TOKENIZERS) or any(directory.glob("*.tiktoken"))


def read_model_max_length(tokenizer: Path) -> int | None:
    """Tokens, as tokenizer_config.json says; None if it says nothing, or what stands for nothing there.

    `tokenizer`: a directory, or a GGUF file, which says nothing of the kind.
    """
    try:
        said = json.loads((tokenizer / "tokenizer_config.json").read_text(encoding="utf-8"))
        length = said.get("model_max_length") if isinstance(said, dict) else None
    except (OSError, ValueError, RecursionError):
        return None
    if isinstance(length, bool) or not isinstance(length, (int, float)) or not 2 <= length <= _MOST_TOKENS:
        return None
    return int(length)


def some(names: Iterable[str]) -> str:
    """The first of some names, and how many more there are."""
    names = list(names)
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return f"{names[0]!r}{more}"


def _names_of(index: Path) -> list[str]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        strange = [name for name in names if {"/", ".."} & set(PurePosixPath(name).parts)]
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise LoadError(f"{str(index)!r} cannot be read: {type(error).__name__}: {error}") from None
    if strange:
        raise LoadError(f"{str(index)!r}: file {some(strange)} is not in the checkpoint's directory")
    if not names:
        raise LoadError(f"{str(index)!r} names no files")
    return names


def _check_file(path: Path) -> None:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise LoadError(f"{str(path)!r} is no safetensors file, or was cut short ({size} bytes)")
        try:
            header = json.loads(file.read(length))
            ends = [_end_of(path, name, tensor) for name, tensor in header.items() if name != "__metadata__"]
        except (ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:
            if isinstance(error, LoadError):
                raise
            raise LoadError(
                f"{str(path)!r}: its header cannot be read: {type(error).__name__}: {error}"
            ) from None
    wanted = 8 + length + max(ends, default=0)
    if size != wanted:
        what = "was cut short" if size < wanted else "is longer than its tensors"
        raise LoadError(f"{str(path)!r} {what}: {size} bytes, its header speaks of {wanted}; copy it again")


def _end_of(path: Path, name: str, tensor: dict[str, Any]) -> int:
    """The tensor's last byte + 1 after the header.  `LoadError` if its shape does not fit its place."""
    first, end = tensor["data_offsets"]
    shape, kind = tensor["shape"], tensor["dtype"]
    bits = _BITS.get(kind)
    if bits is None:
        raise LoadError(f"{str(path)!r}: tensor {name!r} is of an unknown type {kind!r}")
    if not all(isinstance(size, int) and size >= 0 for size in (*shape, first, end)):
        raise LoadError(f"{str(path)!r}: tensor {name!r} has no valid shape or place in the file")
    if (end - first) * 8 != math.prod(shape) * bits:
        raise LoadError(
            f"{str(path)!r}: tensor {name!r} of shape {shape} in {kind} is not of the {end - first} bytes "
            "that the header gives it"
        )
    return int(end)
