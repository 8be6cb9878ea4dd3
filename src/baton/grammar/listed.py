"""What a schema lists: values, and names of an object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.grammar.documents import Schema, types_of

SAYS_NOTHING = frozenset({"title", "description", "$comment", "default", "examples"})
"""Keywords that say nothing of a value."""


def names_of(value: Any) -> list[str]:
    """The texts of a list."""
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []


def are_texts(values: list[Any]) -> bool:
    """Whether each of these is a text."""
    return all(isinstance(one, str) for one in values)


def differ(lists: list[list[str]]) -> bool:
    """Whether nothing is in two of these lists."""
    return sum(map(len, map(set, lists))) == len({one for each in lists for one in each})


def listed(schema: Schema) -> list[Any] | None:
    """The values of a schema that lists them and says nothing else; None: it does not."""
    if not isinstance(schema, Mapping) or set(schema) - SAYS_NOTHING - {"type"} not in ({"enum"}, {"const"}):
        return None
    values = schema["enum"] if "enum" in schema else [schema["const"]]
    return list(values) if isinstance(values, list) else None


def listed_names(schema: Schema) -> list[str] | None:
    """The names that a schema lists; None: it does not."""
    if schema is False or (isinstance(schema, Mapping) and "string" not in types_of(schema)):
        return []
    if not isinstance(schema, Mapping):
        return None
    options = schema.get("anyOf")
    if set(schema) - SAYS_NOTHING - {"type"} == {"anyOf"} and isinstance(options, list):
        each = [listed_names(one) for one in options]
        return None if None in each else list(dict.fromkeys(name for one in each for name in one or ()))
    values = listed(schema)
    return None if values is None else [one for one in values if isinstance(one, str)]
