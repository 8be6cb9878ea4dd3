"""JSON schemas as llguidance takes them: everything that they ask for is in what this makes, or is refused
by its keyword and where it stands.

Each schema is read once.  What llguidance does not have is rewritten first (`rewriting.py`); then each
keyword that is left is written so that the library keeps it: numbers (`numbers.py`), patterns
(`patterns.py`), formats (`formats.py`).  What references point to is checked like everything else and
becomes a definition of its own, so only what is reached is looked at.  What nobody knows is an
annotation, as the specification says.  The suite of tests of the specification is the judge
(`benchmarks/json_schema_suite.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from baton.grammar.description import GrammarError
from baton.grammar.documents import TYPES, Document, Schema, as_type, types_of
from baton.grammar.formats import FORMATS, KEPT_FORMATS, LENGTHS
from baton.grammar.limits import MAX_COUNT, MAX_COUNTED, MAX_DEPTH, MAX_ITEMS, UNREACHABLE
from baton.grammar.numbers import KEYWORDS, bounds, check_constant, check_multiples, size, written
from baton.grammar.patterns import Rust, counted_in, single, translated
from baton.grammar.rewriting import Rewriting

_WHITE_SPACE = r"\x20|\r?\n[\x20\x09]{{0,{}}}"
"""Where JSON may have white space: none, a space, or a new line and its indentation.  (With any number of
them a model may go on with white space for ever.)"""
_INDENTATION = 40
_MOST_SCHEMAS = 20_000
_FEW = 200
"""So many characters are counted without a word."""
_REFUSED = frozenset({"$dynamicRef", "$recursiveRef"})
_COMBINING = frozenset({"allOf", "anyOf", "$ref"})
_FOREIGN = frozenset({"$id", "id", "$anchor", "$schema"})
_ROOTS = ("#/$defs/", "#/definitions/", "#/properties/", "#/items", "#/anyOf/", "#/allOf/", "#/oneOf/")


def prepared(schema: Any, most_spaces: int | None = None) -> tuple[dict[str, Any], int]:
    """(as llguidance takes it, how many characters it counts).  `most_spaces`: one after the other.  Raises
    `GrammarError`."""
    options = {**_white_space(most_spaces), "lenient": False, "coerce_one_of": False}
    if schema is True:
        return {"x-guidance": options}, 0
    if not isinstance(schema, Mapping):
        raise GrammarError("a schema must be an object")
    preparing = _Preparing(schema)
    return {**preparing.run(), "x-guidance": options}, preparing.counted


def _white_space(most: int | None) -> dict[str, Any]:
    if most == 0:
        return {"whitespace_flexible": False}
    if most == 1:
        return {"whitespace_pattern": r"\x20|\n"}
    indentation = _INDENTATION if most is None else min(_INDENTATION, most - 2)
    return {"whitespace_pattern": _WHITE_SPACE.format(indentation)}


class _Preparing:
    """Of one document."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        try:
            self._document = Document(root)
        except RecursionError:
            raise GrammarError(f"schemas may be {MAX_DEPTH} deep") from None
        self._root = root
        self._names: dict[str, str] = {}
        """Reference → the name of its definition."""
        self._todo: list[tuple[str, str]] = []
        """(reference, name) of definitions that are not written yet."""
        self._schemas = 0
        self._multiples: list[int | float] = []
        self._counts: set[int] = set()
        self._combines = False

    @property
    def counted(self) -> int:
        """Characters that strings are counted to, one kind after the other."""
        return sum(self._counts)

    def run(self) -> dict[str, Any]:
        found: Any = self._checked(self._root, "", 0)
        definitions: dict[str, Any] = {}
        while self._todo:
            reference, name = self._todo.pop()
            target = self._document.resolved(reference)
            definitions[name] = self._checked(target, _place_of(reference), 0)
        if not isinstance(found, dict):
            raise GrammarError("no text can satisfy it")
        if definitions:
            found["$defs"] = definitions
        if self._combines:
            check_multiples(self._multiples)
        if self.counted > MAX_COUNTED:
            raise GrammarError(
                f"maxLength: the keyword maxLength cannot be enforced for {self.counted} characters; at "
                "most "
                f"{MAX_COUNTED} are possible"
            )
        return found

    def _checked(self, schema: Schema, path: str, depth: int) -> Any:
        if isinstance(schema, bool):
            return schema
        where = path or "the schema"
        if not isinstance(schema, Mapping):
            raise GrammarError(f"{where}: must be an object, or true or false")
        if depth > MAX_DEPTH:
            raise GrammarError(f"{where}: schemas may be {MAX_DEPTH} deep")
        self._schemas += 1
        if self._schemas > _MOST_SCHEMAS:
            raise GrammarError(f"{where}: becomes more than {_MOST_SCHEMAS} schemas; give a simpler one")
        place = f"{path}." if path else ""
        self._check_form(schema, place)
        rewriting = Rewriting(schema, place, self._document)
        rewriting.run()
        written = _Written(self, rewriting.rest, path, depth)
        parts = [self._checked(part, path, depth + 1) for part in rewriting.parts]
        return written.with_parts(parts)

    def _check_form(self, schema: Mapping[str, Any], place: str) -> None:
        if "x-guidance" in schema:
            raise GrammarError(f"{place}x-guidance: is reserved; leave it out")
        refused = next((key for key in schema if key in _REFUSED), None)
        if refused is not None:
            raise GrammarError(f"{place}{refused}: the keyword {refused} cannot be enforced; leave it out")
        given = schema.get("type")
        types = [given] if isinstance(given, str) else given
        if "type" in schema:
            if not isinstance(types, list) or not types or not all(isinstance(one, str) for one in types):
                raise GrammarError(f"{place}type: must be a type, or a list of types")
            wrong = next((one for one in types if one not in TYPES), None)
            if wrong is not None:
                raise GrammarError(f"{place}type: Invalid type: {wrong[:60]}")

    def reference(self, reference: Any, place: str) -> str:
        """As the library is given it."""
        self._combines = True
        if not isinstance(reference, str):
            raise GrammarError(f"{place}: must be a text")
        if self._document.is_foreign:
            if reference.startswith("#/") and not reference.startswith(_ROOTS):
                raise GrammarError(f"{place}: give what it refers to in $defs")
            return reference
        if reference not in self._names:
            target = self._document.resolved(reference)
            if target is self._root:
                return "#"
            self._names[reference] = name = f"d{len(self._names)}"
            self._todo.append((reference, name))
        return f"#/$defs/{self._names[reference]}"

    def count(self, characters: int) -> None:
        if characters > _FEW:
            self._counts.add(characters)


class _Written:
    """A schema of which each keyword is one of the library's."""

    def __init__(self, all_: _Preparing, schema: Mapping[str, Any], path: str, depth: int) -> None:
        self._all, self._schema, self._path, self._depth = all_, schema, path, depth
        self._place = f"{path}." if path else ""
        self._types = types_of(schema)
        self._parts: list[Any] = []
        self.found: dict[str, Any] = {}
        for key, value in schema.items():
            writer = _WRITERS.get(key)
            if writer is not None:
                writer(self, key, value)
            elif all_._document.is_foreign and key in _FOREIGN:
                self.found[key] = value
        self._numbers()
        self._check_properties()

    def with_parts(self, parts: list[Any]) -> Any:
        parts = [*self._parts, *parts]
        if False in parts:
            return False
        if parts:
            # (Behind what the schema itself says: names come in its order.)
            before = self.found.pop("allOf", [])
            self.found["allOf"] = [*before, *parts]
        self._all._combines |= bool(self.found.keys() & _COMBINING)
        return self.found

    def _inner(self, schema: Any, name: str) -> Any:
        return self._all._checked(schema, f"{self._place}{name}", self._depth + 1)

    def as_is(self, key: str, value: Any) -> None:
        self.found[key] = value

    def schema(self, key: str, value: Any) -> None:
        self.found[key] = self._inner(value, key)

    def schemas(self, key: str, value: Any) -> None:
        if not isinstance(value, list):
            if key == "items":
                self.schema(key, value)
                return
            raise GrammarError(f"{self._place}{key}: must be a list of schemas")
        if not value and key in ("anyOf", "allOf"):
            raise GrammarError(f"{self._place}{key}: must have at least one schema")
        self.found[key] = [self._inner(one, f"{key}[{number}]") for number, one in enumerate(value)]

    def properties(self, key: str, value: Any) -> None:
        named = self._named(key, value)
        self.found[key] = {name: self._inner(one, f"{key}.{name}") for name, one in named.items()}

    def pattern_properties(self, key: str, value: Any) -> None:
        self.found[key] = {}
        for name, one in self._named(key, value).items():
            place = f"{self._place}{key}"
            pattern = str(name) if isinstance(name, Rust) else single(name, place)
            if pattern in self.found[key]:
                raise GrammarError(f"{place}: two of its patterns mean the same")
            self._all.count(0 if isinstance(name, Rust) else counted_in(name, place))
            self.found[key][pattern] = self._inner(one, f"{key}.{name}")

    def definitions(self, key: str, value: Any) -> None:
        """Those that are reached are written by reference."""
        if self._all._document.is_foreign:
            self.properties(key, value)

    def _named(self, key: str, value: Any) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            raise GrammarError(f"{self._place}{key}: must be an object")
        return value

    def required(self, key: str, value: Any) -> None:
        if isinstance(value, bool):  # (draft 3: of the property, not of the object)
            return
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise GrammarError(f"{self._place}{key}: must be a list of names")
        self.found[key] = list(dict.fromkeys(value))

    def reference(self, key: str, value: Any) -> None:
        self.found[key] = self._all.reference(value, f"{self._place}{key}")

    def values(self, key: str, value: Any) -> None:
        if key == "enum" and (not isinstance(value, list) or not value):
            raise GrammarError(f"{self._place}enum: must be a list of values, with at least one")
        check_constant(value, f"{self._place}{key}")
        self.found[key] = written(value)

    def least(self, key: str, value: Any, most: int) -> None:
        count = size(value, f"{self._place}{key}", most)
        if count:
            self.found[key] = count
            if key == "minLength" and "maxLength" not in self._schema:
                self._all.count(count)

    def most(self, key: str, value: Any, most: int) -> None:
        if isinstance(value, int | float) and value >= UNREACHABLE:
            return
        count = self.found[key] = size(value, f"{self._place}{key}", most)
        if key == "maxLength":
            self._all.count(count)

    def pattern(self, _: str, value: Any) -> None:
        place = f"{self._place}pattern"
        if not isinstance(value, str):
            raise GrammarError(f"{place}: must be a text")
        if not isinstance(value, Rust):
            self._all.count(counted_in(value, place))
        found = translated(value, place)
        if len(found) == 1 and len(found[0]) == 1:
            self.found["pattern"] = found[0][0]
            return
        options = [{"type": "string", "allOf": [{"pattern": one} for one in each]} for each in found]
        self._texts(options)

    def format(self, _: str, value: Any) -> None:
        if not isinstance(value, str):
            raise GrammarError(f"{self._place}format: must be a text")
        if value in KEPT_FORMATS:
            self.found["format"] = KEPT_FORMATS[value]
        elif value in FORMATS:
            self._texts([{"type": "string", "pattern": FORMATS[value], **LENGTHS.get(value, {})}])

    def _texts(self, options: list[Any]) -> None:
        """What is a text is one of these."""
        others = as_type(self._types - {"string"})
        options = [*options, *([{"type": others}] if others else [])]
        self._parts.append(False if not options else options[0] if len(options) == 1 else {"anyOf": options})

    def _numbers(self) -> None:
        if self._schema.keys() & set(KEYWORDS):
            types = self._types & {"number", "integer"}
            found = bounds(self._schema, types, self._place)
            self.found |= found
            if "multipleOf" in found:
                self._all._multiples.append(found["multipleOf"])

    def _check_properties(self) -> None:
        """A name may come twice among those that are not listed in `properties`; who reads the object sees
        one."""
        least = self.found.get("minProperties", 0)
        if least - len(self.found.get("required") or ()) < 2:
            return
        if self.found.get("additionalProperties") is not False or self.found.get("patternProperties"):
            raise GrammarError(
                f"{self._place}minProperties: minProperties above 1 cannot be enforced where names are free; "
                "list "
                "them in properties and set additionalProperties to false, or leave it out"
            )


def _place_of(reference: str) -> str:
    return reference.partition("#")[2].strip("/").replace("/", ".")


def _writers() -> dict[str, Callable[[_Written, str, Any], None]]:
    def least(most: int) -> Callable[[_Written, str, Any], None]:
        return lambda written, key, value: written.least(key, value, most)

    def most(most: int) -> Callable[[_Written, str, Any], None]:
        return lambda written, key, value: written.most(key, value, most)

    return {
        "type": _Written.as_is,
        "$ref": _Written.reference,
        "const": _Written.values,
        "enum": _Written.values,
        **dict.fromkeys(("allOf", "anyOf", "prefixItems", "items"), _Written.schemas),
        **dict.fromkeys(("additionalItems", "additionalProperties"), _Written.schema),
        "properties": _Written.properties,
        "patternProperties": _Written.pattern_properties,
        **dict.fromkeys(("$defs", "definitions"), _Written.definitions),
        "required": _Written.required,
        "minLength": least(MAX_COUNT),
        "minItems": least(MAX_ITEMS),
        "minProperties": least(MAX_ITEMS),
        "maxLength": most(MAX_COUNT),
        "maxItems": most(MAX_ITEMS),
        "maxProperties": most(MAX_COUNT),
        "pattern": _Written.pattern,
        "format": _Written.format,
    }


_WRITERS = _writers()
