"""What a schema forbids, as schemas that say what else there is.

| keyword | its opposite |
| --- | --- |
| `type` | the other types; numbers that are no integers are those between -50 and 50 |
| `const`, `enum` | the ranges between its numbers, an expression for other texts, the other literals |
| `minimum`, `maxLength`, `minItems`, … | the other side of the bound |
| `pattern` | the expression of all other texts (`automata.py`) |
| `properties` | a name is there, with a value that its schema forbids |
| `required` | a name is not there |
| `prefixItems`, `contains` | an item that is forbidden; no item that is allowed |
| `allOf`, `anyOf`, `oneOf`, `if`, `dependentRequired`, … | by the laws of logic |
| `not` | the schema itself |

Anything else has none that this can write: `NotExpressible` names it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from baton.grammar.description import GrammarError
from baton.grammar.documents import TYPES, Document, Schema, as_type, type_of, types_of
from baton.grammar.formats import BINDING
from baton.grammar.patterns import others, without
from baton.grammar.regexes import NotExpressible

_DEEPEST = 12
_MOST = 300
"""Alternatives."""
_ANNOTATIONS = frozenset({"$comment", "title", "description", "default", "examples"})
_OLD = {
    "const": ("-04",),
    "contains": ("-04",),
    "propertyNames": ("-04",),
    "if": ("-04", "-06"),
    "dependentRequired": ("-04", "-06", "-07"),
    "dependentSchemas": ("-04", "-06", "-07"),
    "prefixItems": ("-04", "-06", "-07", "2019-09"),
    "$ref": ("-04", "-06", "-07"),
}
"""What means nothing, or less, in older drafts.  (To keep it there is right as well; to forbid it is not.)"""
_NEW = frozenset({"dependencies", "additionalItems"})
"""What means nothing in newer ones."""
_DEPENDENT = frozenset({"dependentRequired", "dependentSchemas", "dependencies"})


def opposite(
    schema: Schema, types: frozenset[str], document: Document, depth: int = 0
) -> list[dict[str, Any]]:
    """Schemas of which none holds of a value of which the schema does, and one of each other value of these
    types (but for fractions, see above).  Raises `NotExpressible`."""
    if schema is True or types == frozenset():
        return []
    if schema is False:
        return [{"type": as_type(types)}]
    if not isinstance(schema, Mapping):
        raise NotExpressible("what is no schema")
    if depth > _DEEPEST:
        raise NotExpressible("what is so deep")
    draft = str(document.root.get("$schema", "2020-12")) if isinstance(document.root, Mapping) else "2020-12"
    found: list[dict[str, Any]] = []
    own = types_of(schema)
    if "type" in schema:
        other = types - own
        if "number" in types and "integer" in own and "number" not in own:
            found += _FRACTIONS
            other -= {"number"}
        if other:
            found.append({"type": as_type(other)})
        types = types & own
    negation = _Negation(schema, types, document, depth)
    for key, value in schema.items():
        handler = _HANDLERS.get(key)
        if any(draft.rstrip("#").rstrip("/").find(one) >= 0 for one in _OLD.get(key, ())) and (
            key != "$ref" or len(schema.keys() - _ANNOTATIONS - {"definitions"}) > 1
        ):
            raise NotExpressible(f"{key} in this draft")
        if key in _NEW and not any(one in draft for one in ("-04", "-06", "-07")):
            raise NotExpressible(f"{key} in this draft")
        if handler is not None:
            found += handler(negation, value)
        elif key in _UNKEPT:
            raise NotExpressible(f"the keyword {key}")
    if len(found) > _MOST:
        raise NotExpressible("so many alternatives")
    return found


_UNKEPT = frozenset(
    {
        "multipleOf",
        "minContains",
        "maxContains",
        "unevaluatedItems",
        "unevaluatedProperties",
        "$dynamicRef",
        "$recursiveRef",
        "x-guidance",
    }
)


class _Negation:
    """Of one schema's keywords, for values of some types."""

    def __init__(
        self, schema: Mapping[str, Any], types: frozenset[str], document: Document, depth: int
    ) -> None:
        self._schema, self._types, self._document, self._depth = schema, types, document, depth

    def of(self, schema: Schema, types: frozenset[str] | None = None) -> list[dict[str, Any]]:
        return opposite(schema, self._types if types is None else types, self._document, self._depth + 1)

    def _either(self, schema: Schema) -> dict[str, Any] | bool:
        """The opposite of one that stands inside, as one schema."""
        found = self.of(schema, TYPES)
        return False if not found else found[0] if len(found) == 1 else {"anyOf": found}

    def _if(self, type_: str, schema: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"type": type_, **schema}] if type_ in self._types else []

    def values(self, values: Any) -> list[dict[str, Any]]:
        if not isinstance(values, list):
            raise NotExpressible("what is no list")
        found: list[dict[str, Any]] = []
        by_type: dict[str, list[Any]] = {}
        for value in values:
            by_type.setdefault(type_of(value), []).append(value)
        for type_ in sorted(self._types - {"integer"}):
            its = by_type.get(type_, [])
            match type_:
                case "null":
                    found += [] if its else [{"type": "null"}]
                case "boolean":
                    left = [one for one in (False, True) if one not in its]
                    found += [{"enum": left}] if left else []
                case "string":
                    found.append({"type": "string", "pattern": without(its)} if its else {"type": "string"})
                case "array" | "object":
                    if any(its):
                        raise NotExpressible(f"{type_}s in enum")
                    least = {"minItems" if type_ == "array" else "minProperties": 1}
                    found.append({"type": type_, **(least if its else {})})
        numbers = sorted({*by_type.get("integer", []), *by_type.get("number", [])})
        if "number" in self._types:
            found += _between("number", numbers)
        elif "integer" in self._types:
            found += _between("integer", [one for one in numbers if one == one // 1])
        return found

    def const(self, value: Any) -> list[dict[str, Any]]:
        return self.values([value])

    def pattern(self, value: Any) -> list[dict[str, Any]]:
        if "string" not in self._types:
            return []
        try:
            found = others(value, "pattern")
        except GrammarError as error:
            raise NotExpressible(str(error)) from None
        return [] if found is None else [{"type": "string", "pattern": found}]

    def format(self, value: Any) -> list[dict[str, Any]]:
        if "string" in self._types and value in BINDING:
            raise NotExpressible(f"the format {value}")
        return []

    def bound(self, value: Any, *, keyword: str) -> list[dict[str, Any]]:
        if not self._types & {"number", "integer"}:
            return []
        type_ = "number" if "number" in self._types else "integer"
        exclusive = self._schema.get("exclusive" + keyword[0].upper() + keyword[1:])
        if isinstance(value, bool):
            return []
        opposites = {
            "minimum": "maximum" if exclusive is True else "exclusiveMaximum",
            "maximum": "minimum" if exclusive is True else "exclusiveMinimum",
            "exclusiveMinimum": "maximum",
            "exclusiveMaximum": "minimum",
        }
        return [{"type": type_, opposites[keyword]: value}]

    def least(self, type_: str, most: str, value: Any) -> list[dict[str, Any]]:
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise NotExpressible("what is no number")
        return self._if(type_, {most: int(value) - 1}) if value > 0 else []

    def most(self, type_: str, least: str, value: Any) -> list[dict[str, Any]]:
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise NotExpressible("what is no number")
        return self._if(type_, {least: int(value) + 1})

    def prefix_items(self, value: Any) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for number, one in enumerate(value):
            other = self._either(one)
            if other is not False:
                found += self._if(
                    "array", {"prefixItems": [*([True] * number), other], "minItems": number + 1}
                )
        return found

    def items(self, value: Any) -> list[dict[str, Any]]:
        if "array" not in self._types:
            return []
        if isinstance(value, list):
            return self.prefix_items(value)
        before = len(self._schema.get("prefixItems") or ())
        other = self._either(value)
        if other is False:
            return []
        if value is False:
            return self._if("array", {"minItems": before + 1})
        raise NotExpressible("items")

    def additional_items(self, value: Any) -> list[dict[str, Any]]:
        if "array" not in self._types or value is True or not isinstance(self._schema.get("items"), list):
            return []
        if value is False:
            return self._if("array", {"minItems": len(self._schema["items"]) + 1})
        raise NotExpressible("additionalItems")

    def contains(self, value: Any) -> list[dict[str, Any]]:
        if "array" not in self._types:
            return []
        return self._if("array", {"items": self._either(value)})

    def unique(self, value: Any) -> list[dict[str, Any]]:
        if value and "array" in self._types:
            raise NotExpressible("uniqueItems")
        return []

    def required(self, value: Any) -> list[dict[str, Any]]:
        if isinstance(value, bool):  # (draft 3)
            return []
        return [one for name in value for one in self._if("object", {"properties": {name: False}})]

    def properties(self, value: Any) -> list[dict[str, Any]]:
        if "object" not in self._types:
            return []
        found: list[dict[str, Any]] = []
        for name, one in value.items():
            other = self._either(one)
            if other is not False:
                found += self._if("object", {"properties": {name: other}, "required": [name]})
        return found

    def open_properties(self, value: Any) -> list[dict[str, Any]]:
        """Those that have no names of their own."""
        schemas = list(value.values()) if isinstance(value, Mapping) else []
        if "object" in self._types and any(self._either(one) is not False for one in schemas):
            raise NotExpressible("patternProperties")
        return []

    def additional_properties(self, value: Any) -> list[dict[str, Any]]:
        if "object" not in self._types or self._either(value) is False:
            return []
        named = self._schema.get("properties") or self._schema.get("patternProperties")
        if value is False and not named:
            return self._if("object", {"minProperties": 1})
        raise NotExpressible("additionalProperties")

    def property_names(self, value: Any) -> list[dict[str, Any]]:
        if "object" in self._types and self.of(value, frozenset({"string"})):
            raise NotExpressible("propertyNames")
        return []

    def dependent(self, value: Any) -> list[dict[str, Any]]:
        if "object" not in self._types:
            return []
        found: list[dict[str, Any]] = []
        for name, needs in value.items():
            if isinstance(needs, list):
                found += [{"type": "object", "required": [name], "properties": {one: False}} for one in needs]
            else:
                found += [
                    {"allOf": [{"type": "object", "required": [name]}, one]}
                    for one in self.of(needs, frozenset({"object"}))
                ]
        return found

    def all_of(self, value: Any) -> list[dict[str, Any]]:
        return [other for one in value for other in self.of(one)]

    def any_of(self, value: Any) -> list[dict[str, Any]]:
        each = [self.of(one) for one in value]
        if not all(each):
            return []
        parts = [one[0] if len(one) == 1 else {"anyOf": one} for one in each]
        return [parts[0] if len(parts) == 1 else {"allOf": parts}]

    def one_of(self, value: Any) -> list[dict[str, Any]]:
        if len(value) > 6:
            raise NotExpressible("oneOf of so many")
        kinds = as_type(self._types)
        pairs = [
            {"type": kinds, "allOf": [one, other]}
            for number, one in enumerate(value)
            for other in value[number + 1 :]
        ]
        return [*self.any_of(value), *pairs]

    def reference(self, value: Any) -> list[dict[str, Any]]:
        target = None if self._document.is_foreign else self._document.resolved(value)
        if target is None:
            raise NotExpressible(f"the reference {value!r}")
        return self.of(target)

    def itself(self, value: Any) -> list[dict[str, Any]]:
        return [] if value is False else [{"type": as_type(self._types), "allOf": [value]}]

    def condition(self, value: Any) -> list[dict[str, Any]]:
        found = [{"allOf": [value, other]} for other in self.of(self._schema.get("then", True))]
        others_ = self.of(self._schema.get("else", True))
        return [
            *found,
            *({"allOf": [one, other]} for one in (self.of(value) if others_ else []) for other in others_),
        ]


_FRACTIONS: list[dict[str, Any]] = [
    {"type": "number", "exclusiveMinimum": whole, "exclusiveMaximum": whole + 1} for whole in range(-50, 50)
]
"""Numbers that are no integers: not all of them, but none else."""


def _between(type_: str, numbers: list[int | float]) -> list[dict[str, Any]]:
    """All but these."""
    if not numbers:
        return [{"type": type_}]
    found: list[dict[str, Any]] = [{"type": type_, "exclusiveMaximum": numbers[0]}]
    for one, after in itertools.pairwise(numbers):
        if type_ == "number" or after - one > 1:
            found.append({"type": type_, "exclusiveMinimum": one, "exclusiveMaximum": after})
    return [*found, {"type": type_, "exclusiveMinimum": numbers[-1]}]


_SIDES = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_HANDLERS: dict[str, Callable[[_Negation, Any], list[dict[str, Any]]]] = {
    "const": _Negation.const,
    "enum": _Negation.values,
    "pattern": _Negation.pattern,
    "format": _Negation.format,
    **{name: partial(_Negation.bound, keyword=name) for name in _SIDES},
    "minLength": lambda self, value: self.least("string", "maxLength", value),
    "minItems": lambda self, value: self.least("array", "maxItems", value),
    "minProperties": lambda self, value: self.least("object", "maxProperties", value),
    "maxLength": lambda self, value: self.most("string", "minLength", value),
    "maxItems": lambda self, value: self.most("array", "minItems", value),
    "maxProperties": lambda self, value: self.most("object", "minProperties", value),
    "prefixItems": _Negation.prefix_items,
    "items": _Negation.items,
    "additionalItems": _Negation.additional_items,
    "contains": _Negation.contains,
    "uniqueItems": _Negation.unique,
    "required": _Negation.required,
    "properties": _Negation.properties,
    "patternProperties": _Negation.open_properties,
    "additionalProperties": _Negation.additional_properties,
    "propertyNames": _Negation.property_names,
    "dependentRequired": _Negation.dependent,
    "dependentSchemas": _Negation.dependent,
    "dependencies": _Negation.dependent,
    "allOf": _Negation.all_of,
    "anyOf": _Negation.any_of,
    "oneOf": _Negation.one_of,
    "$ref": _Negation.reference,
    "not": _Negation.itself,
    "if": _Negation.condition,
}
