"""The tools of a request as calls are described by them: names, and what binds their arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from baton.gateway.api.custom import INPUT
from baton.gateway.api.tools import Tools
from baton.grammar.description import Content, Json, Lark, Text

ANY_OBJECT: dict[str, Any] = {"type": "object"}
_SAYS_WHAT = frozenset({"type", "$ref", "anyOf", "oneOf", "allOf"})
"""Keywords of a schema that may say of which type it is."""


class Function(NamedTuple):
    """A tool that may be called."""

    name: str
    schema: Mapping[str, Any]
    grammar: str = ""
    """Of the text that is its only argument."""

    @property
    def arguments(self) -> list[Content]:
        """As JSON."""
        if not self.grammar:
            return [Json(dict(self.schema))]
        return [Text('{"' + INPUT + '": "'), Lark(self.grammar), Text('"}')]


def functions_of(tools: Tools) -> list[Function]:
    schemas: dict[str, Any] = msgspec.json.decode(tools.schemas)
    return [
        Function(name, _of_object(schemas.get(name, ANY_OBJECT)), tools.grammars.get(name, ""))
        for name in tools.names
    ]


def _of_object(schema: dict[str, Any]) -> dict[str, Any]:
    """Arguments are an object also where the schema does not say so."""
    return schema if _SAYS_WHAT & schema.keys() else {**ANY_OBJECT, **schema}


def loosened(functions: Sequence[Function], tools: Tools) -> list[Function]:
    """Any object where a schema need not be kept."""
    return [one if one.name in tools.strict else Function(one.name, ANY_OBJECT) for one in functions]
