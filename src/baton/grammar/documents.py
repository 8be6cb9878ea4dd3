"""A schema as a document: what its references point to, and which values its schemas may hold of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

Schema = Any
"""An object, or true or false."""
TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
SCHEMA = frozenset(
    {
        "items",
        "additionalItems",
        "additionalProperties",
        "not",
        "if",
        "then",
        "else",
        "contains",
        "propertyNames",
        "unevaluatedItems",
        "unevaluatedProperties",
    }
)
SCHEMAS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
NAMED = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)
"""What schemas stand in: one, a list, a mapping of names."""


class Document:
    """Of one schema."""

    def __init__(self, root: Schema) -> None:
        self.root = root
        draft = root.get("$schema") if isinstance(root, Mapping) else None
        self.is_old = isinstance(draft, str) and any(one in draft for one in ("-03", "-04", "-06", "-07"))
        """Of a draft in which a reference stands alone: what is beside it says nothing."""
        self._anchors: dict[str, Schema] = {}
        self.has_references = False
        own, others = "", False
        for path, schema in subschemas(root):
            identity = schema.get("$id", schema.get("id"))
            if isinstance(identity, str):
                if not path:
                    own = identity.rstrip("#")
                elif identity.startswith("#"):
                    self._anchors.setdefault(identity[1:], schema)
                else:
                    others = True
            if isinstance(schema.get("$anchor"), str):
                self._anchors[schema["$anchor"]] = schema
            self.has_references |= "$ref" in schema
        self._own = own
        self.is_foreign = False
        """References are for the library to resolve: they depend on identities within the document."""
        if self.has_references:
            self.is_foreign = others or any(
                self.resolved(schema["$ref"]) is None for _, schema in subschemas(root) if "$ref" in schema
            )

    def resolved(self, reference: Any) -> Schema | None:
        """What it points to; None: nothing that is known here."""
        if not isinstance(reference, str):
            return None
        base, _, fragment = reference.partition("#")
        if base and base != self._own:
            return None
        fragment = unquote(fragment)
        if not fragment.startswith("/"):
            return self._anchors.get(fragment) if fragment else self.root
        found = self.root
        for step in fragment[1:].split("/"):
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping) and step in found:
                found = found[step]
            elif isinstance(found, list) and step.isdigit() and int(step) < len(found):
                found = found[int(step)]
            else:
                return None
        return found if isinstance(found, bool | Mapping) else None


def subschemas(schema: Schema, path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """It, and all that stand in it, each with its place."""
    todo = [(path, schema)]
    while todo:
        path, schema = todo.pop()
        if not isinstance(schema, Mapping):
            continue
        yield path, schema
        for key, value in schema.items():
            place = f"{path}.{key}".lstrip(".")
            if key in NAMED and isinstance(value, Mapping):
                todo += [(f"{place}.{name}", one) for name, one in value.items()]
            elif key in SCHEMAS and isinstance(value, list):
                todo += [(f"{place}[{number}]", one) for number, one in enumerate(value)]
            elif key in SCHEMA:
                todo.append((place, value))


def types_of(schema: Mapping[str, Any]) -> frozenset[str]:
    """Those that its own `type` allows."""
    given = schema.get("type")
    if given is None:
        return TYPES
    types = {given} if isinstance(given, str) else {one for one in given if isinstance(one, str)}
    return frozenset(types | {"integer"} if "number" in types else types)


def common(one: frozenset[str], other: frozenset[str]) -> frozenset[str]:
    """The types of both."""
    return one & other


def as_type(types: frozenset[str]) -> list[str]:
    """A value for `type`."""
    return sorted(types - {"integer"} if "number" in types else types)


def type_of(value: Any) -> str:
    """Of a value."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case str():
            return "string"
        case list():
            return "array"
        case Mapping():
            return "object"
    return "integer" if value == value // 1 else "number"


def equal(one: Any, other: Any) -> bool:
    """As JSON has it: 1 is 1.0, and true is not 1."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    return bool(type_of(one) == type_of(other) and one == other)
