"""Which weights an instance has, so that all instances of a cluster come to have the same."""

from __future__ import annotations

from typing import Any

import msgspec


class Weights(msgspec.Struct, array_like=True, frozen=True):
    """A checkpoint that took the place of the one of the start.  Each decision of a gateway has a higher
    `generation` than all that it has seen; of two decisions with the same one the name says which holds.  So
    whoever hears of both, in whatever order, ends with the same."""

    generation: int = 0
    name: str = ""
    """Tells checkpoints apart, wherever their files are (`model/checkpoint/fingerprint.py`); "": those of the
    start."""
    path: str = ""
    """The directory that the gateway was told."""

    def newer(self, other: Weights) -> bool:
        return (self.generation, self.name) > (other.generation, other.name)

    def describe(self) -> dict[str, Any]:
        """For people and programs."""
        return {"generation": self.generation, "name": self.name, "path": self.path}

    @classmethod
    def parse(cls, said: object) -> Weights:
        """What `describe` gave; those of the start for anything else."""
        try:
            return cls(**msgspec.convert(said, dict[str, Any]))
        except (msgspec.ValidationError, TypeError):
            return cls()
