"""Keywords that llguidance does not have, written with those that it has.

Each of these takes a keyword away and says the same in schemas that must hold beside the rest: exactly the
same, or what it raises says that it cannot.

| keyword | becomes |
| --- | --- |
| `not` | its opposite (`negation.py`) |
| `if`, `then`, `else` | either `if` and `then`, or the opposite of `if` and `else` |
| `oneOf` | `anyOf`, where no two can hold together; else each with the opposite of those that can |
| `dependentRequired`, `dependencies`, … | either the name is not there, or it is and they hold |
| `propertyNames` | the names that there may be; or patterns of them, and no others |
| `contains` | at least one item; of a short array: one of its places |
| `uniqueItems` of a few values | all arrays of them |
| `minProperties`, `maxProperties` beside optional names | which of these there are |
| `unevaluatedProperties`, `unevaluatedItems` alone | `additionalProperties`, `items` |

What asks for nothing is left out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

from baton.grammar.description import GrammarError
from baton.grammar.disjointness import is_impossible, types_under
from baton.grammar.documents import Document, Schema, as_type, equal, type_of, types_of
from baton.grammar.formats import BINDING, NAMES
from baton.grammar.limits import MAX_ITEMS, UNREACHABLE
from baton.grammar.listed import SAYS_NOTHING, are_texts, differ, listed, listed_names, names_of
from baton.grammar.negation import opposite
from baton.grammar.numbers import is_number
from baton.grammar.patterns import Rust
from baton.grammar.regexes import NotExpressible

_MOST_CHOICES = 64
_MOST_ARRAYS = 330
_SHORT = 5
"""Items of an array whose places are tried."""
_MOST_OPTIONS = 100
"""Of a `oneOf` whose pairs are tried."""
_MOST_REFERENCES = 20
_MOST_UNPROVEN = 40
"""Pairs of a `oneOf` that may hold together."""


class Rewriting:
    """Of one schema of a document."""

    def __init__(self, schema: Mapping[str, Any], place: str, document: Document) -> None:
        self.rest = dict(schema)
        """Without what was rewritten."""
        self.parts: list[Schema] = []
        """What must hold beside it."""
        self._place, self._document = place, document
        self._base = {key: value for key, value in schema.items() if key not in _REWRITTEN}

    def run(self) -> None:
        """Rewrites all.  Raises `GrammarError`."""
        for keyword, rewrite in _REWRITTEN.items():
            if keyword not in self.rest:
                continue
            value = self.rest.pop(keyword)
            try:
                rewrite(self, value)
            except NotExpressible as error:
                self._refuse(keyword, str(error))
            except (TypeError, AttributeError, KeyError, IndexError):
                self._refuse(keyword, "it is malformed")

    def _refuse(self, keyword: str, why: str = "") -> None:
        raise GrammarError(
            f"{self._place}{keyword}: the keyword {keyword} cannot be enforced{f' ({why})' if why else ''}; "
            "leave it out"
        )

    def _types(self, *schemas: Schema) -> frozenset[str]:
        return types_under([self._base, *schemas], self._document)

    def _opposite(self, schema: Schema, *beside: Schema) -> list[dict[str, Any]]:
        """`beside`: what holds as well, and of which types a value is therefore."""
        return opposite(schema, self._types(*beside), self._document)

    def _either(self, options: list[Schema]) -> None:
        if True not in options:
            self.parts.append(
                False if not options else options[0] if len(options) == 1 else {"anyOf": options}
            )

    def negated(self, value: Schema) -> None:
        self._either([*self._opposite(value)])

    def condition(self, value: Schema) -> None:
        then, other = self.rest.pop("then", True), self.rest.pop("else", True)
        if then is True and other is True:
            return
        options: list[Schema] = [{"allOf": [value, then]}] if then is not True else [value]
        left = self._opposite(value)
        options += left if other is True else [{"allOf": [one, other]} for one in left]
        self._either(options)

    def without_condition(self, value: Schema) -> None:
        """`then` or `else` without `if` says nothing."""

    def one_of(self, value: Any) -> None:
        if not isinstance(value, list) or not value:
            raise NotExpressible("it must be a list of schemas")
        if self._differ_by_tag(value):
            self._either(value)
            return
        if len(value) > _MOST_OPTIONS:
            raise NotExpressible(f"of more than {_MOST_OPTIONS} schemas without a tag of their own")
        together: dict[int, list[int]] = {number: [] for number in range(len(value))}
        for one, other in itertools.combinations(range(len(value)), 2):
            if not is_impossible([self._base, value[one], value[other]], self._document):
                together[one].append(other)
                together[other].append(one)
        if sum(map(len, together.values())) > _MOST_UNPROVEN * 2:
            raise NotExpressible("its schemas may hold together")
        options: list[Schema] = []
        for number, others in together.items():
            parts: list[Schema] = [value[number]]
            for other in others:
                forbidden = self._opposite(value[other], value[number])
                parts.append({"anyOf": forbidden} if forbidden else False)
            if False not in parts:
                options.append(parts[0] if len(parts) == 1 else {"allOf": parts})
        self._either(options)

    def _differ_by_tag(self, options: list[Schema]) -> bool:
        """Whether all are of objects with a required name that has other values in each.  (What else a schema
        says cannot make it hold of more.)"""
        tags: list[dict[str, list[Any]]] = []
        for one in map(self._target, options):
            if not isinstance(one, Mapping) or types_of(one) != {"object"}:
                return False
            if "$ref" in one and self._document.is_old:
                return False
            properties = one.get("properties")
            named = properties if isinstance(properties, Mapping) else {}
            each = {name: listed(named[name]) for name in names_of(one.get("required")) if name in named}
            tags.append({name: values for name, values in each.items() if values and are_texts(values)})
        return any(
            differ([its[name] for its in tags]) for name in tags[0] if all(name in its for its in tags)
        )

    def dependent(self, value: Any) -> None:
        for name, needs in value.items():
            required = names_of(self._base.get("required"))
            if isinstance(needs, list):
                missing = [one for one in needs if one != name and one not in required]
                if not missing:
                    continue
                part: Schema = {"required": [name, *missing]}
            elif needs is True or needs == {}:
                continue
            else:
                part = {"allOf": [{"required": [name]}, needs]} if needs is not False else False
            options: list[Schema] = [] if name in required else [{"properties": {name: False}}]
            self._either(options if part is False else [*options, part])

    def property_names(self, value: Any) -> None:
        value = self._target(value)
        if self._allows_all_names(value):
            return
        names = listed_names(value)
        if names == []:
            self.parts.append({"maxProperties": 0})
            return
        if names is not None:
            self.parts.append({"properties": dict.fromkeys(names, True), "additionalProperties": False})
            return
        left = set(value) - SAYS_NOTHING - {"type"}
        if not isinstance(value.get("format"), str) or value["format"] not in BINDING:
            left -= {"format"}
        if isinstance(value.get("pattern"), str) and left == {"pattern"}:
            pattern = value["pattern"]
        elif left == {"format"} and value["format"] in NAMES:
            pattern = Rust(NAMES[value["format"]])
        elif left <= {"minLength", "maxLength"}:
            least, most = value.get("minLength", 0), value.get("maxLength", "")
            pattern = Rust(f"^(?s:.){{{least},{most}}}$")
        else:
            raise NotExpressible("only enum, const, a pattern, a format or lengths")
        self.parts.append({"patternProperties": {pattern: True}, "additionalProperties": False})

    def _allows_all_names(self, value: Schema) -> bool:
        try:
            return not opposite(value, frozenset({"string"}), self._document)
        except NotExpressible:
            return False

    def _target(self, schema: Schema) -> Schema:
        """What a schema that is a reference, and nothing else, points to."""
        for _ in range(_MOST_REFERENCES):
            if not isinstance(schema, Mapping) or set(schema) - SAYS_NOTHING != {"$ref"}:
                return schema
            if self._document.is_foreign:
                return schema
            schema = self._document.resolved(schema["$ref"])
        raise NotExpressible("a reference that leads to itself")

    def contains(self, value: Any) -> None:
        least, most = self.rest.pop("minContains", 1), self.rest.pop("maxContains", None)
        if least == 0 and most is None:
            return
        if value is True or value == {}:
            more = {} if most is None else {"maxItems": most}
            self.parts.append({"minItems": least, **more})
            return
        if most is not None:
            raise NotExpressible("maxContains")
        longest = self._base.get("maxItems", math.inf)
        if least != 1 or longest > _SHORT:
            raise NotExpressible(f"only in an array of at most {_SHORT} items")
        self._either(
            [
                {"prefixItems": [*([True] * place), value], "minItems": place + 1}
                for place in range(int(longest))
            ]
            if types_of(self._base) == {"array"}
            else [
                {"type": as_type(types_of(self._base) - {"array"})},
                *(
                    {"type": "array", "prefixItems": [*([True] * place), value], "minItems": place + 1}
                    for place in range(int(longest))
                ),
            ]
        )

    def without_contains(self, value: Any) -> None:
        """`minContains` or `maxContains` without `contains` says nothing."""

    def unique(self, value: Any) -> None:
        if value is False or self._base.get("maxItems", 2) in (0, 1) or "array" not in types_of(self._base):
            return
        if value is not True:
            raise NotExpressible("it must be true or false")
        items = self._base.get("items")
        if self._base.get("prefixItems") is not None or isinstance(items, list):
            raise NotExpressible("only of a few values")
        values = self._values(items)
        least, most = self._base.get("minItems", 0), self._base.get("maxItems", math.inf)
        if values is None or len(values) > 6:
            raise NotExpressible("only of a few values")
        values = [one for place, one in enumerate(values) if not any(equal(one, it) for it in values[:place])]
        counts = [count for count in range(len(values) + 1) if least <= count <= most]
        if sum(math.perm(len(values), count) for count in counts) > _MOST_ARRAYS:
            raise NotExpressible("only of a few values")
        arrays = [list(one) for count in counts for one in itertools.permutations(values, count)]
        other = as_type(types_of(self._base) - {"array"})
        self._either([*([{"enum": arrays}] if arrays else []), *([{"type": other}] if other else [])])

    def _values(self, schema: Schema) -> list[Any] | None:
        if not isinstance(schema, Mapping):
            return [] if schema is False else None
        if isinstance(schema.get("$ref"), str) and not self._document.is_foreign:
            target = self._document.resolved(schema["$ref"])
            if isinstance(target, Mapping) and "$ref" not in target and len(schema) == 1:
                return self._values(target)
        found = listed(schema)
        if found is None and schema.get("type") == "boolean":
            found = [False, True]
        if found is None:
            return None
        return [
            one for one in found if type_of(one) in types_of(schema) and not isinstance(one, list | Mapping)
        ]

    def properties_counted(self, keyword: str, value: Any) -> None:
        """`minProperties` and `maxProperties`."""
        if not is_number(value) or value < 0 or (value != value // 1 and value != math.inf):
            raise NotExpressible("it must be an integer, not negative")
        if value >= UNREACHABLE:
            if keyword == "minProperties":
                raise NotExpressible(f"at most {MAX_ITEMS} are possible")
            return
        least = value if keyword == "minProperties" else self.rest.get("minProperties", 0)
        most = value if keyword == "maxProperties" else self.rest.get("maxProperties", math.inf)
        required = set(names_of(self._base.get("required")))
        if least <= len(required):
            least = 0
        properties = self._base.get("properties") or {}
        optional = [name for name, one in properties.items() if name not in required and one is not False]
        closed = self._base.get("additionalProperties") is False and not self._base.get("patternProperties")
        if most >= len(required) + len(optional) and closed:
            most = math.inf
        for name in ("minProperties", "maxProperties"):
            self.rest.pop(name, None)
        if not least and most == math.inf:
            return
        counts: dict[str, Any] = {"minProperties": least} if least else {}
        if most != math.inf:
            counts["maxProperties"] = most
        if not optional:
            self.rest.update(counts)
            return
        need, room = int(least) - len(required), most - len(required)
        options: list[Schema] = []
        total = 0
        for count in range(len(optional) + 1):
            if count > room:
                break
            enough = count >= need
            if most == math.inf and count > max(need, 0):
                break
            if not enough and closed:
                continue
            total += math.comb(len(optional), count)
            if total > _MOST_CHOICES:
                raise NotExpressible("beside so many optional names")
            for chosen in itertools.combinations(optional, count):
                part: dict[str, Any] = {"required": [*sorted(required), *chosen]}
                if most != math.inf or not enough:
                    part["properties"] = {name: False for name in optional if name not in chosen}
                    if not closed:
                        part.update(counts)
                options.append(part)
        other = types_of(self._base) - {"object"}
        if other:
            options = [{"type": "object", **one} for one in options if isinstance(one, dict)]
            options.append({"type": as_type(other)})
        self._either(options)

    def unevaluated(self, keyword: str, value: Any) -> None:
        if value is True or value == {}:
            return
        if self._base.keys() & _EVALUATES or any(key in self.rest for key in _EVALUATES):
            raise NotExpressible("beside schemas in place")
        names = {"unevaluatedProperties": "additionalProperties", "unevaluatedItems": "items"}[keyword]
        if keyword == "unevaluatedItems" and isinstance(self.rest.get("items"), list):
            names = "additionalItems"  # (2019-09)
        if names in self.rest:
            return  # (all are evaluated)
        if self.parts and keyword == "unevaluatedItems":
            raise NotExpressible("beside contains")
        self.rest[names] = value


_EVALUATES = frozenset(
    {
        "allOf",
        "anyOf",
        "oneOf",
        "not",
        "if",
        "$ref",
        "dependentSchemas",
        "dependencies",
        "contains",
        "additionalItems",
    }
)
_REWRITTEN: dict[str, Callable[[Rewriting, Any], None]] = {
    "unevaluatedProperties": lambda self, value: self.unevaluated("unevaluatedProperties", value),
    "unevaluatedItems": lambda self, value: self.unevaluated("unevaluatedItems", value),
    "minProperties": lambda self, value: self.properties_counted("minProperties", value),
    "maxProperties": lambda self, value: self.properties_counted("maxProperties", value),
    "uniqueItems": Rewriting.unique,
    "contains": Rewriting.contains,
    "minContains": Rewriting.without_contains,
    "maxContains": Rewriting.without_contains,
    "propertyNames": Rewriting.property_names,
    "dependentRequired": Rewriting.dependent,
    "dependentSchemas": Rewriting.dependent,
    "dependencies": Rewriting.dependent,
    "oneOf": Rewriting.one_of,
    "not": Rewriting.negated,
    "if": Rewriting.condition,
    "then": Rewriting.without_condition,
    "else": Rewriting.without_condition,
}
