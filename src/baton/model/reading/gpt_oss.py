"""Experts of gpt-oss, and of Qwen3-VL, as if each had tensors of its own.

Theory.  A layer's experts lie in tensors of all of them, E experts of inner size I.  Those of gpt-oss have
gates and ups row by row:

* in floating point `gate_up_proj` [E, hidden, 2 I] and `down_proj` [E, I, hidden], inputs first;
* in MXFP4 `gate_up_proj_blocks` [E, 2 I, hidden / 32, 16] and `…_scales` [E, 2 I, hidden / 32], outputs
  first, and `down_proj_blocks`, `down_proj_scales` likewise (`reading.layouts`);
* `gate_up_proj_bias` [E, 2 I] and `down_proj_bias` [E, hidden].

Those of Qwen3-VL (`halves`) have gates first, then ups, and no biases: published files have inputs first, as
above, files that transformers 5 saves have outputs first, `gate_up_proj` [E, 2 I, hidden] and `down_proj`
[E, hidden, I].  Both shapes together say which: their last sizes are (2 I, hidden) or (hidden, I).

`views` gives them the names of an MLP's, EXPERTS.7.gate_proj.weight and so on, so that whatever reads a
checkpoint expert by expert reads these.  A thread reads a part of one expert at a time, and remembers it
until it reads another: gates and ups come one after the other.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from baton.model.checkpoint.files import LoadError

_STACK = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)(|_bias|_blocks|_scales)")
_LAST = {"": "weight", "_bias": "bias", "_blocks": "blocks", "_scales": "scales"}
_ROWS = {
    "gate_up_proj": {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)},
    "down_proj": {"down_proj": slice(None)},
}
"""Outputs of each matrix in the tensor of all."""


class Stack:
    """A tensor of all experts of a layer."""

    def __init__(self, file: Any, name: str, transposed: bool) -> None:
        """`transposed`: inputs come before outputs."""
        self._file, self._name, self._transposed = file, name, transposed
        found = file.get_slice(name)
        self.shape = tuple(found.get_shape())
        self.kind: str = found.get_dtype()
        self._read = threading.local()

    def expert(self, number: int) -> Tensor:
        """[outputs, …]"""
        last: tuple[int, Tensor] | None = getattr(self._read, "last", None)
        if last is None or last[0] != number:
            self._read.last = None  # the old one goes before the new one comes
            found: Tensor = self._file.get_slice(self._name)[number]
            last = self._read.last = number, found.t() if self._transposed else found
        return last[1]

    def shape_of(self, rows: slice) -> list[int]:
        outputs, *others = reversed(self.shape[1:]) if self._transposed else self.shape[1:]
        return [len(range(outputs)[rows]), *others]


class StackView:
    """A matrix of one expert; what a file of safetensors is to its reader, for this tensor."""

    def __init__(self, stack: Stack, expert: int, rows: slice) -> None:
        self._stack, self._expert, self._rows = stack, expert, rows

    def get_slice(self, _: str) -> StackView:
        return self

    def get_tensor(self, _: str) -> Tensor:
        return self._stack.expert(self._expert)[self._rows]

    def get_shape(self) -> list[int]:
        return self._stack.shape_of(self._rows)

    def get_dtype(self) -> str:
        return self._stack.kind

    def __getitem__(self, part: Any) -> Tensor:
        return self.get_tensor("")[part]


def halves(files: Mapping[str, Any]) -> Iterator[tuple[str, str, StackView | None]]:
    """Likewise, of experts as Qwen3-VL's.  Raises `LoadError` if their shapes do not fit each other."""
    for name, file in files.items():
        found = _STACK.fullmatch(name)
        if found is None or found[3]:
            yield name, name, None
            continue
        experts, matrix = found[1], found[2]
        shapes = [_shape(files, f"{experts}.{part}") for part in ("gate_up_proj", "down_proj")]
        turned = _inputs_first(*shapes)
        if turned is None:
            raise LoadError(
                f"tensors of experts {experts!r} have shapes {shapes[0]} and {shapes[1]}, of which one must "
                "be [experts, 2 size, hidden] and the other [experts, hidden, size], or both turned"
            )
        stack = Stack(file, name, transposed=turned)
        size = shapes[1][1 if turned else 2]
        rows = {"gate_proj": slice(0, size), "up_proj": slice(size, None)}
        for expert in range(stack.shape[0]):
            for part, chosen in (rows if matrix == "gate_up_proj" else {"down_proj": slice(None)}).items():
                yield f"{experts}.{expert}.{part}.weight", name, StackView(stack, expert, chosen)


def _shape(files: Mapping[str, Any], name: str) -> list[int]:
    return list(files[name].get_slice(name).get_shape()) if name in files else []


def _inputs_first(gate_up: list[int], down: list[int]) -> bool | None:
    """None if they are of no experts of the same sizes."""
    if len(gate_up) != 3 or len(down) != 3 or gate_up[0] != down[0]:
        return None
    if gate_up[1:] == [down[2], 2 * down[1]]:
        return True
    return False if gate_up[1:] == [2 * down[2], down[1]] else None


def views(files: Mapping[str, Any]) -> Iterator[tuple[str, str, StackView | None]]:
    """(The name, that of the tensor that it is in, how it is read) of each tensor in files of safetensors.

    None: as it is.
    """
    for name, file in files.items():
        found = _STACK.fullmatch(name)
        if found is None:
            yield name, name, None
            continue
        experts, matrix, last = found.groups()
        stack = Stack(file, name, transposed=last == "")
        for expert in range(stack.shape[0] if stack.shape else 0):
            for part, rows in _ROWS[matrix].items():
                yield f"{experts}.{expert}.{part}.{_LAST[last]}", name, StackView(stack, expert, rows)
