"""`StructuredOutputs`: what an answer must be, as a user asks for it, in vLLM's names.

    SamplingParams(structured_outputs=StructuredOutputs(json={"type": "object"}))

Whether it can be kept is checked where it becomes a grammar (`grammar/`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_NEEDS = {
    "json": "a JSON schema, an object or its text",
    "regex": "a text",
    "choice": "a list of texts, with at least one",
    "grammar": "a text",
    "json_object": "true",
    "structural_tag": "an object, or its text",
}


_UNKEPT = {
    "disable_additional_properties": "set additionalProperties to false in the schema",
    "whitespace_pattern": "set disable_any_whitespace for none, or leave it out",
}
"""vLLM's fields that are not kept, and what helps."""


def asks_nothing(value: object) -> bool:
    """None or False.  (0 equals False, and is a wrong value.)"""
    return value is None or value is False


class StructuredOutputs(msgspec.Struct, kw_only=True, frozen=True):
    """Exactly one of these."""

    json: Any = None
    """A JSON schema: an object, or its text."""
    regex: str | None = None
    """What the whole answer matches."""
    choice: Sequence[str] | None = None
    """The answers that are possible."""
    grammar: str | None = None
    """A context-free grammar in Lark's notation, or in llama.cpp's GBNF."""
    json_object: bool | None = None
    """True: any JSON object."""
    structural_tag: Any = None
    """Free text in which some frames are constrained: `{"structures": [{"begin", "schema", "end"}],
    "triggers": […]}`, an object, or its text."""

    disable_any_whitespace: bool = False
    """Of `json` and `json_object`: no white space between the parts."""
    disable_fallback: bool = False
    """Without effect: what cannot be kept is always refused."""
    disable_additional_properties: bool = False
    """Refused: a schema says it by `additionalProperties`."""
    whitespace_pattern: str | None = None
    """Refused: white space is a space, or a new line and its indentation."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Those that were given."""
        return tuple(name for name in KINDS if not asks_nothing(getattr(self, name)))

    def problem(self) -> str | None:
        """What is wrong with it at first sight."""
        kinds = self.kinds
        if len(kinds) != 1:
            return f"give exactly one of {', '.join(KINDS)}, not {' and '.join(kinds) or 'none'}"
        for name, instead in _UNKEPT.items():
            if not asks_nothing(getattr(self, name)):
                return f"{name}: is not supported; {instead}"
        value = getattr(self, kinds[0])
        match kinds[0]:
            case "regex" | "grammar":
                fits = isinstance(value, str)
            case "choice":
                fits = isinstance(value, Sequence) and not isinstance(value, str)
                fits = fits and len(value) > 0 and all(isinstance(text, str) for text in value)
            case "json_object":
                fits = value is True
            case _:
                fits = isinstance(value, str | bool | Mapping)
        return None if fits else f"{kinds[0]}: {repr(value)[:100]} must be {_NEEDS[kinds[0]]}"
