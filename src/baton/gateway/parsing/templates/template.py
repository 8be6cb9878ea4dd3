"""A checkpoint's `response_template`: which regions an answer has, and what each of them becomes.

Theory.  The template is a table of fields.  Each field is a region of the answer's text between an opening
and a closing marker (texts or regular expressions); the one field without an opening marker takes the text
between regions.  This module checks the table once and compiles its expressions; `parser.TemplateParser` runs
it.  Fields that have a place in an answer of this server: `content`, `tool_calls`, and reasoning under one of
`REASONING`.  A template with another field is refused, because its text would vanish.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec
import regex

from baton.gateway.parsing.frames import Think
from baton.gateway.parsing.templates.values import KINDS, check_transform

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names that templates give to the field of reasoning."""
CONTENT, CALLS = "content", "tool_calls"
TIMEOUT_S = 1.0
"""Of one search for an expression: a safeguard against an expression that explodes."""
_TOP = {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"}
_FIELD = {"open", "open_pattern", "close", "close_pattern", "content", "content_args"}
_FIELD |= {"repeats", "join", "optional", "transform", "transform_each"}
_MARK = re.compile(r"<[^<>()\s]{1,60}>|\[/?[A-Z_]{2,40}\]")


class TemplateError(ValueError):
    """The template is wrong, or needs what this server does not have."""


@dataclass(frozen=True)
class Marker:
    """What begins or ends a region."""

    pattern: regex.Pattern[str]
    texts: tuple[str, ...] = ()
    """Its texts, longest first; none if it is an expression."""
    extends: bool = False
    """A match at the end of what is there may still become another one."""


@dataclass(frozen=True, kw_only=True)
class Field:
    """A region of the answer."""

    name: str
    opens: Marker | None
    closes: Marker | None
    kind: str
    args: Mapping[str, Any]
    join: str | None
    """Between two regions of this field; None: nothing of the template's is."""
    transform: Any
    each: bool
    """The transform is of each item of a list."""

    @property
    def strips(self) -> bool:
        """Spaces at the ends of its text do not belong to it."""
        return bool(self.args.get("strip", True))


@dataclass(frozen=True)
class ResponseTemplate:
    """A checked template."""

    fields: Mapping[str, Field]
    between: str | None
    """The field that has the text between regions; None: that text is not part of the answer."""
    anchor: regex.Pattern[str]
    """After its last match in the prompt the answer begins."""

    @property
    def reasoning(self) -> str:
        """The name of its field of reasoning; "" if it has none."""
        return next((name for name in REASONING if name in self.fields), "")

    @property
    def think(self) -> Think | None:
        """Its field of reasoning as a region with one text at each end; None: it is not of this kind."""
        field = self.fields.get(self.reasoning)
        if field is None or field.opens is None or field.closes is None:
            return None
        if len(field.opens.texts) != 1 or len(field.closes.texts) != 1:
            return None
        return Think(open=field.opens.texts[0], close=field.closes.texts[0])

    @property
    def marks(self) -> frozenset[str]:
        """Texts that a model may have as special tokens, and that the parser must see."""
        found = set[str]()
        for field in self.fields.values():
            for marker in (field.opens, field.closes):
                if marker is None:
                    continue
                found |= {text.strip() for text in marker.texts}
                for text in (*marker.texts, marker.pattern.pattern.replace("\\", "")):
                    found |= set(_MARK.findall(text))
        return frozenset(found - {""})


@lru_cache(maxsize=4)
def load(text: str) -> ResponseTemplate:
    """Of a template as JSON.  Raises `TemplateError` naming the field that is wrong."""
    source = msgspec.json.decode(text)
    if not isinstance(source, dict) or source.get("version", 1) != 1:
        raise TemplateError("response_template: an object of version 1 is expected")
    if unknown := sorted(source.keys() - _TOP):
        raise TemplateError(f"response_template: unknown keys {unknown}")
    raw = source.get("fields")
    if not isinstance(raw, dict) or not raw:
        raise TemplateError("response_template.fields: an object with one field or more is expected")
    fields = {name: _field(name, one) for name, one in raw.items()}
    if sum(name in REASONING for name in fields) > 1:
        raise TemplateError(f"response_template.fields: only one of {', '.join(REASONING)} is possible")
    between = [name for name, field in fields.items() if field.opens is None]
    if len(between) > 1:
        raise TemplateError(f"response_template.fields: only one may have no 'open', not {between}")
    if between == [CALLS]:
        raise TemplateError("response_template.fields.tool_calls: 'open' is missing")
    anchor = _marker("response_template", source, "start_anchor")
    if anchor is None:
        raise TemplateError("response_template: 'start_anchor' or 'start_anchor_pattern' is missing")
    return ResponseTemplate(fields, between[0] if between else None, anchor.pattern)


def _field(name: str, raw: Any) -> Field:
    scope = f"response_template.fields.{name}"
    if name not in (CONTENT, CALLS, *REASONING):
        raise TemplateError(f"{scope}: an answer of this server has no such field")
    if not isinstance(raw, dict):
        raise TemplateError(f"{scope}: an object is expected")
    if unknown := sorted(raw.keys() - _FIELD):
        raise TemplateError(f"{scope}: unknown keys {unknown}")
    kind, args = raw.get("content", "text"), raw.get("content_args", {})
    if kind not in KINDS or not isinstance(args, dict):
        raise TemplateError(
            f"{scope}.content: one of {', '.join(KINDS)} is expected, and content_args an object"
        )
    join, transform, each = raw.get("join"), raw.get("transform"), raw.get("transform_each", False)
    if join is not None and not (isinstance(join, str) and raw.get("repeats")):
        raise TemplateError(f"{scope}.join: a text is expected, beside 'repeats': true")
    opens, closes = _marker(scope, raw, "open"), _marker(scope, raw, "close")
    if name == CALLS:
        if transform is None and kind not in ("json", "xml-inline", "kv-lines"):
            raise TemplateError(f"{scope}: no call can be made of {kind!r}")
    elif kind != "text" or transform is not None:
        raise TemplateError(f"{scope}: only text without a transform can be streamed")
    try:
        check_transform(transform, args)
    except ValueError as error:
        raise TemplateError(f"{scope}: {error}") from None
    if transform is None and any(one is not None and one.pattern.groupindex for one in (opens, closes)):
        raise TemplateError(f"{scope}: named groups are of use in a transform only, and there is none")
    return Field(
        name=name,
        opens=opens,
        closes=closes,
        kind=kind,
        args=args,
        join=join,
        transform=transform,
        each=bool(each),
    )


def _marker(scope: str, raw: Mapping[str, Any], key: str) -> Marker | None:
    texts, pattern = raw.get(key), raw.get(f"{key}_pattern")
    if texts is not None and pattern is not None:
        raise TemplateError(f"{scope}: only one of {key!r} and '{key}_pattern' is possible")
    if isinstance(pattern, str):
        try:
            return Marker(regex.compile(pattern, regex.DOTALL), extends=True)
        except regex.error as error:
            raise TemplateError(f"{scope}.{key}_pattern: {error}") from None
    if texts is None and pattern is None:
        return None
    listed: Sequence[Any] = (
        [texts] if isinstance(texts, str) else texts if isinstance(texts, list) else [None]
    )
    if not listed or not all(isinstance(text, str) and text for text in listed):
        raise TemplateError(f"{scope}.{key}: a text or a list of texts is expected")
    ordered = tuple(sorted(dict.fromkeys(listed), key=len, reverse=True))
    extends = any(one != other and one.startswith(other) for one in ordered for other in ordered)
    return Marker(regex.compile("|".join(map(regex.escape, ordered))), ordered, extends)
