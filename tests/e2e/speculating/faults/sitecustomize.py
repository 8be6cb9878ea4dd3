"""A server that accepts a draft too many: each run goes on behind its first wrong draft, for one token.

Python imports this file at its start where this directory is in PYTHONPATH; `test_soak.py` starts such a
server, which must be found out.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class Planting(MetaPathFinder):
    """Changes `baton.executor.drafts.runs` when it is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "baton.executor.drafts.runs":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        assert spec is not None
        loader: Any = spec.loader
        load = loader.exec_module

        def load_and_plant(module: ModuleType) -> None:
            load(module)
            plant(module.Places)

        loader.exec_module = load_and_plant
        return spec


def plant(places: Any) -> None:
    waves = places.waves

    def waves_and_one(self: Any) -> Any:
        expected = self.expected
        spared: set[int] = set()
        for wave in waves(self):
            yield wave
            self.expected = list(expected)
            for row, place, token in zip(wave.rows.tolist(), wave.places, wave.tokens.tolist(), strict=True):
                if 0 <= token != expected[place] >= 0 and row not in spared:
                    spared.add(row)
                    self.expected[place] = token

    def runs_and_one(self: Any, tokens: Any) -> Any:
        right = self.runs_alone_of_all(tokens)
        ends = [place for place, token in enumerate(right) if token == NOTHING and place not in self.first]
        for place in [place for place in ends if right[place - 1] != NOTHING]:
            right[place] = int(tokens[place])
        return right

    NOTHING = -3
    places.waves = waves_and_one
    places.runs_alone_of_all = places.runs_alone
    places.runs_alone = runs_and_one


sys.meta_path.insert(0, Planting())
