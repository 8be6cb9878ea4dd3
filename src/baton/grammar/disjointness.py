"""Proofs that no value is valid under all of some schemas.

A schema is looked at as alternatives of *facts*: which types, which values, which names with which
schemas. Facts that contradict each other are impossible, and what is not understood says nothing: a proof
may be missed, and none is wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from baton.grammar.documents import TYPES, Document, Schema, equal, type_of, types_of
from baton.grammar.numbers import is_number

_DEEPEST = 8
_MOST = 48
"""Alternatives."""
_SIDES = (
    (frozenset({"string"}), "minLength", "maxLength"),
    (frozenset({"array"}), "minItems", "maxItems"),
    (frozenset({"object"}), "minProperties", "maxProperties"),
    (frozenset({"number", "integer"}), "minimum", "maximum"),
)


@dataclass(frozen=True)
class _Facts:
    types: frozenset[str] = TYPES
    values: tuple[Any, ...] | None = None
    properties: Mapping[str, tuple[Schema, ...]] = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    closed: tuple[frozenset[str], ...] = ()
    """Of each schema that allows no other names: its names."""
    items: tuple[Sequence[Schema], ...] = ()
    """Of each schema that lists them: those of the first items."""
    least: Mapping[str, float] = field(default_factory=dict)
    most: Mapping[str, float] = field(default_factory=dict)


def is_impossible(schemas: Sequence[Schema], document: Document, depth: int = 0) -> bool:
    """Whether no value is valid under all of these.  False: it may be, or not."""
    if depth > _DEEPEST:
        return False
    alternatives = [_Facts()]
    for schema in schemas:
        alternatives = _both(alternatives, _alternatives(schema, document, depth))
    return all(_contradict(one, document, depth) for one in alternatives)


def types_under(schemas: Sequence[Schema], document: Document) -> frozenset[str]:
    """Those that a value may have that is valid under all of these."""
    alternatives = [_Facts()]
    for schema in schemas:
        alternatives = _both(alternatives, _alternatives(schema, document, 0))
    found: frozenset[str] = frozenset()
    for one in alternatives:
        types = one.types
        if one.values is not None:
            types &= frozenset(map(type_of, one.values))
        found |= types
    return found


def _both(ones: list[_Facts], others: list[_Facts]) -> list[_Facts]:
    if len(ones) * len(others) > _MOST:
        return ones  # (less is known then)
    return [_merged(one, other) for one in ones for other in others]


def _merged(one: _Facts, other: _Facts) -> _Facts:
    values = one.values
    if values is None:
        values = other.values
    elif other.values is not None:
        values = tuple(value for value in values if any(equal(value, it) for it in other.values))
    names = {*one.properties, *other.properties}
    return _Facts(
        types=one.types & other.types,
        values=values,
        properties={name: (*one.properties.get(name, ()), *other.properties.get(name, ())) for name in names},
        required=one.required | other.required,
        closed=(*one.closed, *other.closed),
        items=(*one.items, *other.items),
        least=_each(max, one.least, other.least),
        most=_each(min, one.most, other.most),
    )


def _each(choose: Any, one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {
        name: choose(value for value in (one.get(name), other.get(name)) if value is not None)
        for name in {*one, *other}
    }


def _alternatives(schema: Schema, document: Document, depth: int) -> list[_Facts]:
    if schema is False:
        return []
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return [_Facts()]
    if "$ref" in schema and document.is_old:  # (there nothing holds beside a reference)
        schema = {"$ref": schema["$ref"]}
    found = [_own(schema)]
    for one in _list(schema.get("allOf")):
        found = _both(found, _alternatives(one, document, depth + 1))
    for keyword in ("anyOf", "oneOf"):
        options = _list(schema.get(keyword))
        if options:
            each = [facts for one in options for facts in _alternatives(one, document, depth + 1)]
            found = _both(found, each)
    if "$ref" in schema and not document.is_foreign:
        target = document.resolved(schema["$ref"])
        if target is not None:
            found = _both(found, _alternatives(target, document, depth + 1))
    refused = schema.get("not")
    if isinstance(refused, Mapping):
        found = [_without(one, refused) for one in found]
    return found


def _without(facts: _Facts, refused: Mapping[str, Any]) -> _Facts:
    """Of `not`: names that are not there, types and values that are refused."""
    if set(refused) == {"required"} and len(_list(refused["required"])) == 1:
        name = refused["required"][0]
        return _merged(facts, _Facts(properties={name: (False,)})) if facts.types == {"object"} else facts
    if set(refused) == {"type"} and "integer" not in _list(refused["type"]):
        return replace(facts, types=facts.types - types_of(refused))
    return facts


def _own(schema: Mapping[str, Any]) -> _Facts:
    values = None
    if "enum" in schema:
        values = tuple(_list(schema["enum"]))
    if "const" in schema:
        values = (schema["const"],)
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    closed: tuple[frozenset[str], ...] = ()
    if schema.get("additionalProperties") is False and not schema.get("patternProperties"):
        closed = (frozenset(properties),)
    items = schema.get("prefixItems", schema.get("items"))
    least = {name: schema[name] for _, name, _ in _SIDES if is_number(schema.get(name))}
    most = {name: schema[name] for _, _, name in _SIDES if is_number(schema.get(name))}
    return _Facts(
        types=types_of(schema),
        values=values,
        properties={name: (one,) for name, one in properties.items()},
        required=frozenset(name for name in _list(schema.get("required")) if isinstance(name, str)),
        closed=closed,
        items=(items,) if isinstance(items, list) else (),
        least=least,
        most=most,
    )


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _contradict(facts: _Facts, document: Document, depth: int) -> bool:
    types = facts.types
    for its, least, most in _SIDES:
        if facts.least.get(least, 0) > facts.most.get(most, float("inf")):
            types -= its
    if facts.values is not None:
        left = [value for value in facts.values if not _fails(value, facts, types, document, depth)]
        return not left
    if "object" in types and _no_object(facts, document, depth):
        types -= {"object"}
    if "array" in types and _no_array(facts, document, depth):
        types -= {"array"}
    return not types


def _no_object(facts: _Facts, document: Document, depth: int) -> bool:
    for name in facts.required:
        if any(name not in names for names in facts.closed):
            return True
        schemas = facts.properties.get(name, ())
        if schemas and is_impossible(schemas, document, depth + 1):
            return True
    return len(facts.required) > facts.most.get("maxProperties", float("inf"))


def _no_array(facts: _Facts, document: Document, depth: int) -> bool:
    least = int(facts.least.get("minItems", 0))
    each = itertools.islice(itertools.zip_longest(*facts.items, fillvalue=True), least)
    return any(is_impossible(schemas, document, depth + 1) for schemas in each)


def _fails(value: Any, facts: _Facts, types: frozenset[str], document: Document, depth: int) -> bool:
    type_ = type_of(value)
    if type_ not in types and not (type_ == "integer" and "number" in types):
        return True
    if type_ in ("integer", "number"):
        least, most = facts.least.get("minimum", value), facts.most.get("maximum", value)
        return bool(value < least or value > most)
    if type_ == "string":
        least, most = facts.least.get("minLength", 0), facts.most.get("maxLength", float("inf"))
        return not least <= len(value) <= most
    if type_ != "object":
        return False
    if facts.required - value.keys() or any(value.keys() - names for names in facts.closed):
        return True
    return any(
        is_impossible([{"const": value[name]}, *schemas], document, depth + 1)
        for name, schemas in facts.properties.items()
        if name in value
    )
