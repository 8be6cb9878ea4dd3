"""Typed access to the fields of a JSON file that comes with a checkpoint.

Such files have been written by many programs and edited by hand: a number may be `20.0`, `"20"`, null or
missing, a list may be a string.  `Fields` gives each value in the type that is asked for, within limits, or
raises `UnsupportedModel` with one line that names the file, the field, what is there and what belongs there.
null is the same as a missing field.

No torch, no transformers: the launcher reads these files in milliseconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

MAX_SIZE: Final = 1 << 24
"""Of a dimension of a tensor, in elements: beyond every model, and products of two do not overflow."""
MAX_CONTEXT: Final = 1 << 30
"""Tokens."""
_MAX_FILE_BYTES: Final = 64 << 20
_SHOWN_CHARACTERS: Final = 60


class ModelNotFound(ValueError):
    """There is no such model, or its files are incomplete or out of reach.  One line, for people."""


class UnsupportedModel(ValueError):
    """Baton cannot serve this model faithfully.  One line that says what and what it can serve."""


class Fields:
    """The fields of one JSON object.

    `name` is the model's for messages, `file` the file's; `inside` names the object if it is not the whole
    file.  `defaults` stand for fields that are missing.
    """

    def __init__(
        self,
        raw: Mapping[str, Any],
        name: str,
        file: str = "config.json",
        *,
        inside: str = "",
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self._raw = raw
        self._name = name
        self._file = file
        self._inside = inside
        self._defaults = defaults or {}

    @property
    def model(self) -> str:
        """Its name for messages."""
        return self._name

    def __contains__(self, key: str) -> bool:
        return self.any(key) is not None

    def any(self, key: str) -> Any:
        """The value as it stands there; None if there is none."""
        value = self._raw.get(key)
        return self._defaults.get(key) if value is None else value

    def mentions(self, key: str) -> bool:
        """Whether the file has the field, be it null."""
        return key in self._raw

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int = MAX_SIZE) -> int:
        """An integer in [least, most].  Without a `default` the field must be there."""
        value = self.any(key)
        if value is None and default is not None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(key, f"must be an integer from {least} to {most}")
        return value

    def number(self, key: str, default: float | None = None, *, more_than: float = -math.inf) -> float:
        """A finite number greater than `more_than`.  Without a `default` the field must be there."""
        value = self.any(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not _finite(value, more_than):
            bound = "" if more_than == -math.inf else f" greater than {more_than:g}"
            raise self.wrong(key, f"must be a number{bound}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.any(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "must be true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str | None:
        value = self.any(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(key, "must be a string")
        return value

    def texts(self, key: str) -> list[str] | None:
        value = self.any(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, "must be a list of strings")
        return value

    def object(self, key: str) -> dict[str, Any]:
        """A JSON object; empty if there is none."""
        value = self.any(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.wrong(key, "must be a JSON object")
        return value

    def within(self, key: str) -> Fields:
        """The fields of the object `key`; none if there is no such object."""
        inside = f"{self._inside}.{key}" if self._inside else key
        return Fields(self.object(key), self._name, self._file, inside=inside)

    def all(self) -> dict[str, Any]:
        """A copy of what stands there."""
        return dict(self._raw)

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """One id or a list of ids; empty if there is none.

        Ids outside of the vocabulary (-1, as some programs write for none) are left out: no model generates
        them.
        """
        value = self.any(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(token, bool) or not isinstance(token, int) for token in ids):
            raise self.wrong(key, "must be a token id or a list of token ids")
        return tuple(token for token in ids if 0 <= token < vocab_size)

    def wrong(self, key: str, must: str) -> UnsupportedModel:
        """The error for a field: what is there, and what belongs there."""
        place = f"{self._inside}.{key}" if self._inside else key
        value = self._raw.get(key, self._defaults.get(key))
        if value is None and key not in self._raw:
            return UnsupportedModel(f"{self._name!r}: {self._file} has no {place!r}; it {must}")
        return UnsupportedModel(f"{self._name!r}: {self._file}: {place} {shown(value)}: it {must}")

    def refused(self, reason: str) -> UnsupportedModel:
        """The error for what the fields mean together."""
        return UnsupportedModel(f"{self._name!r}: {reason}")


def shown(value: Any) -> str:
    """A value of a JSON file for a message: one line, not long."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file.  Raises `ModelNotFound` with the path and the reason."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ModelNotFound(f"{str(path)!r} has more than {_MAX_FILE_BYTES >> 20} MiB: no {path.name}")
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelNotFound(
            f"{str(path.parent)!r}: no {path.name}; give a directory with a checkpoint"
        ) from None
    except RecursionError:
        raise ModelNotFound(f"{str(path)!r} cannot be read: its values are nested too deeply") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelNotFound(f"{str(path)!r} cannot be read: {reason}") from None
    if not isinstance(found, dict):
        raise ModelNotFound(f"{str(path)!r} is not a JSON object")
    return found


def _finite(value: float, more_than: float) -> bool:
    try:
        return math.isfinite(value) and value > more_than
    except OverflowError:  # an integer beyond every float
        return False
