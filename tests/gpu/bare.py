"""pytest where only what a machine with a GPU has, and what `make gpu` brings, can be imported.

python -m tests.gpu.bare --collect-only tests/gpu
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_THERE = ("torch", "triton", "transformers", "numpy", "packaging", "setuptools", "pip")
"""The first four are promised; a Python has the others."""


def brought() -> set[str]:
    """Names of distributions: what is there, with what it asks for, and requirements.txt."""
    lines = Path(__file__).with_name("requirements.txt").read_text().splitlines()
    found = {canonicalize_name(line) for line in lines if line and not line.startswith("#")}
    waiting = [*_THERE]
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found:
            continue
        found.add(name)
        try:
            asked = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        waiting += [
            requirement.name
            for requirement in map(Requirement, asked)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        ]
    return found


class Refusing(importlib.abc.MetaPathFinder):
    """Hides all modules of other distributions."""

    def __init__(self) -> None:
        there = brought() | {"baton-llm"}
        self._hidden = {
            module
            for module, owners in importlib.metadata.packages_distributions().items()
            if not any(canonicalize_name(owner) in there for owner in owners)
        }

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in self._hidden:
            raise ModuleNotFoundError(f"no module named {name!r} on a machine with a GPU", name=name)
        return None


if __name__ == "__main__":
    sys.meta_path.insert(0, Refusing())
    import pytest

    sys.exit(pytest.main(sys.argv[1:]))
