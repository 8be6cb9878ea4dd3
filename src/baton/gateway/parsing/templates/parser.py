"""Runs a `ResponseTemplate` over what a model writes, while it comes.

Theory.  Text is in one region at a time: in the one between (`ResponseTemplate.between`), or in one that its
opening marker began and that lasts to its closing one.  In the first, all opening markers are looked for; in
the others, their own end alone.  The match that begins first counts, the longest of those.  A match that more
text could change waits, and so does the text from where it begins.  The parser takes characters one by one:
what it decides is a function of the characters, however they come.

Text of `content` and of reasoning is given as it comes; a call is given whole when its region closes, because
only then it is known what its text is.  A region that is no call is plain text, markers and all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import regex

from baton.gateway.parsing.coercion import coerced
from baton.gateway.parsing.deltas import Content, Delta, append
from baton.gateway.parsing.emitting import Output, Words
from baton.gateway.parsing.reading import nothing
from baton.gateway.parsing.results import MAX_HELD
from baton.gateway.parsing.tags import Types
from baton.gateway.parsing.templates.template import (
    CALLS,
    CONTENT,
    TIMEOUT_S,
    Field,
    Marker,
    ResponseTemplate,
)
from baton.gateway.parsing.templates.values import shaped, value_of

_Call = tuple[str, str, str | None]
"""Name, arguments as JSON, the model's own id."""
_MAX_READ, _BEHIND = 4096, 256
"""Characters that are read and kept, and how many of them stay when they are dropped."""


class TemplateParser:
    """Parses one answer.  Its methods are those of `parser.ResponseParser`."""

    __slots__ = (
        "_at",
        "_body",
        "_buffer",
        "_calling",
        "_ended",
        "_field",
        "_groups",
        "_opened",
        "_output",
        "_reasons",
        "_template",
        "_types",
        "_watched",
    )

    def __init__(
        self,
        template: ResponseTemplate,
        *,
        calling: bool = True,
        reasons: bool = True,
        types: Types | None = None,
        thinking: bool = False,
        parallel: bool = True,
        demanded: bool = False,
    ) -> None:
        """`calling` and `reasons` false: such a region is plain text.  `thinking`: the text begins inside of
        reasoning.  `demanded`: the answer is calls alone."""
        self._template = template
        self._calling = calling
        self._reasons = reasons
        self._types = types or {}
        self._output = output = Output(parallel=parallel)
        content = template.fields.get(CONTENT)
        output.content = Words(
            nothing if demanded else lambda text: append(output.deltas, Content(text)),
            strict=content is None or content.strips,
        )
        self._buffer = ""
        self._at = 0
        """Place in the buffer up to which it is read."""
        self._body: list[str] = []
        """Of a region of calls, what came of it."""
        self._groups: Mapping[str, str] = {}
        self._opened = ""
        """The marker that began the region."""
        self._ended = False
        self._watched: tuple[tuple[Field | None, Marker], ...] = ()
        """What is looked for: markers, with the field that each opens (None: it ends the region)."""
        self._enter(template.fields[template.reasoning] if thinking and template.reasoning else None)

    @property
    def thinking(self) -> bool:
        """The text goes on inside of reasoning."""
        return self._reasons and self._field is not None and self._field.name == self._template.reasoning

    @property
    def num_complete(self) -> int:
        """Calls whose arguments are a JSON object."""
        return self._output.num_complete

    @property
    def holds(self) -> bool:
        """What came last may be the beginning of a marker."""
        return self._at < len(self._buffer)

    def push(self, text: str) -> list[Delta]:
        """What this piece of the text decides."""
        for character in text:
            self._buffer += character
            self._read()
            if self._at > _MAX_READ:  # (by characters, not by pieces: an expression may look behind)
                drop = self._at - _BEHIND
                self._buffer, self._at = self._buffer[drop:], _BEHIND
        return self._output.take()

    def finish(self, *, whole: bool = False) -> list[Delta]:
        """What was held back; the text is over."""
        self._ended = True
        self._read()
        self._give(self._buffer[self._at :])
        self._buffer, self._at = "", 0
        self._leave("")
        output = self._output
        for words, name in ((output.reasoning, self._template.reasoning), (output.content, CONTENT)):
            field = self._template.fields.get(name)
            if field is None or field.strips:
                words.region()
            words.end()
        return output.take()

    # -- reading

    def _read(self) -> None:
        """As far as it can be decided."""
        empty = -1
        while True:
            marker, found, held = self._next()
            if found is None:
                self._give(self._buffer[self._at : held])
                self._at = held
                return
            self._give(self._buffer[self._at : found.start()])
            self._at = found.end()
            if found.start() == found.end():  # (a place without characters would be found for ever)
                if empty == self._at:
                    return
                empty = self._at
            self._leave(found[0])
            if marker is not None:
                self._enter(marker)
                self._opened = found[0]
                self._groups = {key: text for key, text in found.groupdict().items() if text is not None}

    def _next(self) -> tuple[Field | None, regex.Match[str] | None, int]:
        """(the field that the next marker opens, None: it closes; its match; up to where text is certain)."""
        best: regex.Match[str] | None = None
        opens: Field | None = None
        held = len(self._buffer)
        for field, marker in self._watched:
            found = self._search(marker)
            if found is None:
                continue
            if not self._ended and (found.partial or self._may_grow(marker, found)):
                held = min(held, found.start())
            elif best is None or (found.start(), -len(found[0])) < (best.start(), -len(best[0])):
                best, opens = found, field
        if held < len(self._buffer) - MAX_HELD:
            held = len(self._buffer)
        if best is not None and best.start() >= held and not self._ended:
            best = None
        return opens, best, held

    def _search(self, marker: Marker) -> regex.Match[str] | None:
        try:
            return marker.pattern.search(self._buffer, self._at, partial=not self._ended, timeout=TIMEOUT_S)
        except TimeoutError:
            self._watched = tuple(one for one in self._watched if one[1] is not marker)
            return None

    def _may_grow(self, marker: Marker, found: regex.Match[str]) -> bool:
        """More text may make another match of it."""
        at_edge: bool = found.end() == len(self._buffer)
        if not marker.extends:
            return at_edge and not found[0]
        try:
            longer = marker.pattern.fullmatch(self._buffer, found.start(), partial=True, timeout=TIMEOUT_S)
        except TimeoutError:
            return False
        return at_edge or longer is not None

    # -- regions

    def _enter(self, field: Field | None) -> None:
        """None: the region between."""
        fields, between = self._template.fields, self._template.between
        if field is not None:
            self._field: Field | None = field
            closing = field.closes
        else:
            self._field = None if between is None else fields[between]
            closing = None if self._field is None else self._field.closes
        opening = fields.values() if field is None else ()
        watched: list[tuple[Field | None, Marker]] = [(one, one.opens) for one in opening if one.opens]
        self._watched = tuple(watched if closing is None else [*watched, (None, closing)])
        if field is not None and field.name != CALLS and field.join is None:
            self._words(field).separate()

    def _leave(self, closed: str) -> None:
        """The region is over; the text goes on in the one between."""
        field, body = self._field, "".join(self._body)
        if field is not None and field.name == CALLS:
            self._call(field, body, closed)
        elif field is not None:
            words = self._words(field)
            if field.strips:
                words.region()
            if field.join is not None:
                words.separate(field.join)
        self._body, self._groups, self._opened = [], {}, ""
        self._enter(None)

    def _give(self, text: str) -> None:
        if not text or self._field is None:
            return
        if self._field.name == CALLS:
            self._body.append(text)
        else:
            self._words(self._field).push(text)

    def _words(self, field: Field) -> Words:
        thinks = self._reasons and field.name == self._template.reasoning
        return self._output.reasoning if thinks else self._output.content

    # -- calls

    def _call(self, field: Field, body: str, closed: str) -> None:
        calls: list[_Call] = []
        if self._calling and (closed or field.closes is None):
            try:
                value = shaped(
                    value_of(body, field.kind, field.args), field.transform, field.each, self._groups
                )
                calls = [self._called(one) for one in (value if isinstance(value, list) else [value])]
            except (ValueError, TimeoutError):
                calls = []
        for name, arguments, id in calls:
            self._output.begin(name, id)
            self._output.arguments(arguments)
            self._output.complete()
        if not calls:
            self._output.content.push(self._opened + body + closed)

    def _called(self, value: Any) -> _Call:
        """Raises `ValueError` if it is no call."""
        function = value.get("function", value) if isinstance(value, dict) else None
        if (
            not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
            or not function["name"]
        ):
            raise ValueError("a call has a name")
        arguments = function.get("arguments", function.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not isinstance(arguments, dict):
            raise ValueError("arguments are an object")
        kinds = self._types.get(function["name"], {})
        arguments = {key: _typed(one, kinds.get(key, ("string",))) for key, one in arguments.items()}
        id = value.get("id")
        return (
            function["name"],
            json.dumps(arguments, ensure_ascii=False),
            id if isinstance(id, str) else None,
        )


def _typed(value: Any, kinds: tuple[str, ...]) -> Any:
    """A text as what the tool's schema wants there."""
    if isinstance(value, list) and "array" not in kinds:
        return [_typed(one, kinds) for one in value]
    if not isinstance(value, str) or kinds == ("string",):
        return value
    return json.loads(coerced(value, kinds))


def begins_thinking(template: ResponseTemplate, prompt: str, *, continued: str | None = None) -> bool:
    """Whether the answer begins inside of reasoning: the end of the prompt, from where the template says that
    the answer begins, opens the region.  `continued`: the text of the last message, which it continues."""
    if not template.reasoning:
        return False
    text = prompt if continued is None else continued
    if continued is None:
        ends = [found.end() for found in template.anchor.finditer(prompt)]
        text = prompt[ends[-1] :] if ends else ""
    parser = TemplateParser(template)
    parser.push(text[-MAX_HELD:])
    return parser.thinking
