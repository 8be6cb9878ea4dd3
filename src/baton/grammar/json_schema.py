"""JSON schemas: what is not kept in every case is refused by its keyword and where it stands.

llguidance refuses most of what it cannot do; this module refuses what it takes and does not keep, and
writes formats and patterns as it takes them (`formats.py`, `patterns.py`).  The suite of tests of the
specification is the judge (`benchmarks/json_schema_suite.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.grammar.description import GrammarError
from baton.grammar.formats import FORMATS, KEPT_FORMATS
from baton.grammar.limits import MAX_DEPTH
from baton.grammar.patterns import translated

_WHITE_SPACE = r"\x20|\r?\n[\x20\x09]{{0,{}}}"
"""Where JSON may have white space: none, a space, or a new line and its indentation.  (With any number of
them a model may go on with white space for ever.)"""
_INDENTATION = 40

_REFUSED = frozenset(
    {
        "not",
        "if",
        "then",
        "else",
        "dependentSchemas",
        "dependentRequired",
        "dependencies",
        "propertyNames",
        "contains",
        "minContains",
        "maxContains",
        "unevaluatedItems",
        "unevaluatedProperties",
        "$dynamicRef",
        "$recursiveRef",
    }
)
_NEUTRAL: dict[str, Any] = {"uniqueItems": False, "nullable": False}
"""Keywords that ask for nothing with this value, and are refused with any other."""
_SCHEMA = frozenset({"items", "additionalItems", "additionalProperties"})
_SCHEMAS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""What schemas stand in: one, a list, a mapping of names.  Nothing else of a schema is looked at."""


def prepared(schema: Any, most_spaces: int | None = None) -> dict[str, Any]:
    """As llguidance takes it.  `most_spaces`: one after the other.  Raises `GrammarError`."""
    options = {**_white_space(most_spaces), "lenient": False, "coerce_one_of": False}
    if schema is True:
        return {"x-guidance": options}
    if not isinstance(schema, Mapping):
        raise GrammarError("a schema must be an object")
    return {**_checked(schema, "", 0), "x-guidance": options}


def _white_space(most: int | None) -> dict[str, Any]:
    if most == 0:
        return {"whitespace_flexible": False}
    if most == 1:
        return {"whitespace_pattern": r"\x20|\n"}
    indentation = _INDENTATION if most is None else min(_INDENTATION, most - 2)
    return {"whitespace_pattern": _WHITE_SPACE.format(indentation)}


def _checked(schema: Any, path: str, depth: int) -> Any:
    if isinstance(schema, bool):
        return schema
    where = path or "the schema"
    if not isinstance(schema, Mapping):
        raise GrammarError(f"{where}: must be an object, or true or false")
    if depth > MAX_DEPTH:
        raise GrammarError(f"{where}: schemas may be {MAX_DEPTH} deep")
    found: dict[str, Any] = {}
    for key, value in schema.items():
        place = f"{path}.{key}".lstrip(".")
        if key in _REFUSED:
            raise GrammarError(f"{place}: the keyword {key} cannot be enforced; leave it out")
        if key in _NEUTRAL:
            if value != _NEUTRAL[key]:
                raise GrammarError(f"{place}: the keyword {key} cannot be enforced; leave it out")
            continue
        if key == "x-guidance":
            raise GrammarError(f"{place}: is reserved; leave it out")
        if key in _NAMED and isinstance(value, Mapping):
            found[key] = {
                (translated(name, place) if key == "patternProperties" else name): _checked(
                    one, f"{place}.{name}", depth + 1
                )
                for name, one in value.items()
            }
        elif key in _SCHEMAS and isinstance(value, list):
            found[key] = [_checked(one, f"{place}[{i}]", depth + 1) for i, one in enumerate(value)]
        elif key in _SCHEMA:
            found[key] = _checked(value, place, depth + 1)
        else:
            found[key] = value
    _check_properties(found, where)
    return _with_patterns(found, path)


def _check_properties(schema: Mapping[str, Any], where: str) -> None:
    """A name may come twice among those that are not listed in `properties`; who reads the object sees
    one."""
    least = schema.get("minProperties")
    if not isinstance(least, int | float) or least < 2 or len(schema.get("required") or ()) >= least:
        return
    if schema.get("additionalProperties") is not False or schema.get("patternProperties"):
        raise GrammarError(
            f"{where}: minProperties above 1 cannot be enforced where names are free; list them in "
            "properties and set additionalProperties to false, or leave it out"
        )


def _with_patterns(schema: dict[str, Any], path: str) -> dict[str, Any]:
    """Formats that llguidance has otherwise become patterns, and these what it reads."""
    if isinstance(schema.get("pattern"), str):
        schema["pattern"] = translated(schema["pattern"], f"{path}.pattern".lstrip("."))
    name = schema.get("format")
    if name is None:
        return schema
    if not isinstance(name, str) or (name not in FORMATS and name not in KEPT_FORMATS):
        known = ", ".join(sorted({*FORMATS, *KEPT_FORMATS}))
        place = f"{path}.format".lstrip(".")
        raise GrammarError(f"{place}: the format {str(name)[:100]!r} cannot be enforced; it may be {known}")
    if name in FORMATS:
        del schema["format"]
        more: dict[str, Any] = {"type": "string", "pattern": FORMATS[name]}
        if name == "hostname":
            more["maxLength"] = 253
        # (What is no string has no format: it only binds strings.)
        others = {"type": ["null", "boolean", "number", "array", "object"]}
        both = more if schema.get("type") == "string" else {"anyOf": [more, others]}
        if "allOf" in schema:
            schema["allOf"] = [*schema["allOf"], both]
        else:
            schema["allOf"] = [both]
    return schema
