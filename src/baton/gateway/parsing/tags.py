"""Reads calls whose arguments stand in tags, one for each, with values as text.

Theory.  A value is free text and may hold any tag, its own end as well.  So an end tag ends it only where the
call goes on behind it: with a next parameter, or with the end of the call.  That is looked at ahead, without
giving anything.  Where a value itself shows such calls (it opened a parameter that is not ours), or where its
end was forgotten, both readings are possible; then the rest of the text decides, up to `MAX_HELD`
characters: if there is one end tag more than parameters, the value goes on to there.  Until that is known,
what follows is held back.  A value whose end never comes is not closed, and neither is its call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum

from baton.gateway.parsing.coercion import ANY, QUOTED, WRAPPERS, coerced, unwrapped
from baton.gateway.parsing.emitting import Output
from baton.gateway.parsing.frames import TaggedFrame
from baton.gateway.parsing.json_text import escaped
from baton.gateway.parsing.reading import Give, Reading, Step, markers_of, nothing
from baton.gateway.parsing.results import BROKEN, DONE, MAX_HELD, NOT, Result

Types = Mapping[str, Mapping[str, tuple[str, ...]]]
"""Tool → parameter → types of JSON that it may have; without any, it is a text."""
_MAX_KEY = 256
"""Characters of a parameter's opening tag."""
_STRING = ("string",)


class After(Enum):
    """What stands behind an end tag."""

    TEXT = 0
    """The value goes on."""
    PARAMETER = 1
    FOOT = 2
    """The call's end, without that of its frame."""
    CLOSED = 3
    """The ends of call and frame."""
    LAST = 4
    """The same, and then another call, or the text's end."""
    CUT = 5
    """The text is over before it could be seen."""


class TagReader:
    """Reads calls of one text into an `Output`."""

    def __init__(
        self, reading: Reading, output: Output, types: Types, begin: Callable[[str, str | None], bool]
    ) -> None:
        """`begin`: begins a call with this name and id, if it may be one."""
        self._reading = reading
        self._output = output
        self._types = types
        self._begin = begin

    def read(self, frame: TaggedFrame, opened: str) -> Step[Result]:
        reading, output = self._reading, self._output
        if opened != frame.head:
            yield from reading.spaces()
            if frame.head and not (yield from reading.literal(frame.head)):
                return NOT
        text, found = yield from reading.upto(markers_of(frame.name_end))
        named = re.fullmatch(frame.name_pattern, text.strip())
        if not found or named is None or not self._begin(_plain(frame, named["name"]), None):
            return NOT
        if found in (frame.key, frame.close, frame.foot):
            reading.unread(found)
        types = self._types.get(_plain(frame, named["name"]), {})
        ends = (*frame.closers, frame.key)
        given: set[str] = set()
        while True:
            yield from reading.spaces()
            end = yield from reading.one_of(ends)
            if not end:
                return BROKEN
            if end != frame.key:
                break
            tag = yield from self._key(frame)
            if tag is None:
                return BROKEN
            if frame.value:
                yield from reading.spaces()
                if not (yield from reading.literal(frame.value)):
                    return BROKEN
            key = _plain(frame, tag["key"].strip())
            opening = ", " if given else "{"
            wraps = not given and bool(types) and key in WRAPPERS and key not in types
            given.add(key)
            if wraps:
                inner = yield from self._wrapped(frame, types, given)
                if inner is None:
                    return BROKEN
                whole = unwrapped(inner, list(types)) if inner else None
                after = yield from reading.ahead(self._after(frame))
                if whole is not None and after not in (After.PARAMETER, After.TEXT, After.CUT):
                    output.arguments(whole)
                    yield from reading.spaces()
                    end = yield from reading.one_of(ends)
                    output.complete()
                    yield from self._close(frame, end)
                    return DONE
                output.arguments(opening + _quoted(key) + ": " + inner)
                continue
            kinds = _kinds(tag, types.get(key, ()))
            output.arguments(opening + _quoted(key) + ": ")
            if not (yield from self._value(frame, kinds, types, given)):
                return BROKEN
        output.arguments("}" if given else "{}")
        output.complete()
        yield from self._close(frame, end)
        return DONE

    def _close(self, frame: TaggedFrame, end: str) -> Step[None]:
        """The end of the frame behind that of the call, if it is there."""
        reading = self._reading
        if end == frame.foot and frame.close:
            reading.mark()
            yield from reading.spaces()
            if (yield from reading.literal(frame.close)):
                reading.release()
            else:
                reading.back()

    def _key(self, frame: TaggedFrame) -> Step[re.Match[str] | None]:
        """The rest of a parameter's opening tag; None: it is none."""
        reading, text = self._reading, ""
        while len(text) < _MAX_KEY:
            if (yield from reading.literal(frame.key_end)):
                return re.fullmatch(frame.key_pattern, text)
            character = yield from reading.peek()
            if not character or character in "\n<":
                break
            reading.at += 1
            text += character
        return None

    # -- values

    def _wrapped(self, frame: TaggedFrame, types: Mapping[str, object], given: set[str]) -> Step[str | None]:
        """A value as JSON that may be all arguments; None: it does not end."""
        pieces: list[str] = []
        whole = yield from self._text(frame, types, given, pieces.append)
        return coerced("".join(pieces), ("object", "string")) if whole else None

    def _value(
        self, frame: TaggedFrame, kinds: tuple[str, ...], types: Mapping[str, object], given: set[str]
    ) -> Step[bool]:
        """Gives a value as JSON; False: it did not end."""
        output = self._output
        if kinds != _STRING:
            pieces: list[str] = []
            whole = yield from self._text(frame, types, given, pieces.append)
            if whole:
                output.arguments(coerced("".join(pieces), kinds))
            return whole
        output.arguments('"')
        whole = yield from self._text(frame, types, given, lambda text: output.arguments(escaped(text)))
        if whole:
            output.arguments('"')
        return whole

    def _text(
        self, frame: TaggedFrame, types: Mapping[str, object], given: set[str], give: Give
    ) -> Step[bool]:
        """Gives a value's text as it comes and reads its end; False: it has none."""
        reading = self._reading
        held = ""
        """A line break that may belong to the end."""

        def put(text: str) -> None:
            nonlocal held
            text, held = held + text, ""
            if text.endswith("\n"):
                text, held = text[:-1], "\n"
            if text:
                give(text)

        if frame.lines:
            yield from reading.literal("\n")
        marks = markers_of((frame.value_end, *frame.closers, frame.key))
        depth = 0
        """Parameters that the value itself has opened."""
        while True:
            found = yield from reading.until(marks, put)
            if not found:
                give(held)
                return False
            if found == frame.value_end:
                after = yield from reading.ahead(self._after(frame))
                if (yield from self._ends(frame, after, depth)):
                    if not frame.lines:
                        give(held)
                    return True
                depth = max(0, depth - 1)
            elif held and (yield from self._forgotten(frame, found, types, given)):
                reading.unread(found)
                return True
            elif found == frame.key and (yield from reading.ahead(self._key(frame))) is not None:
                depth += 1
            put(found)

    def _ends(self, frame: TaggedFrame, after: After, depth: int) -> Step[bool]:
        """Whether the end tag before this place ends the value."""
        if after is After.CUT or after is After.TEXT:
            return after is After.CUT
        if depth:
            if after not in (After.PARAMETER, After.LAST):
                return False
        elif after is not After.FOOT:
            return True
        return not (yield from self._reading.ahead(self._closes_later(frame)))

    def _forgotten(
        self, frame: TaggedFrame, found: str, types: Mapping[str, object], given: set[str]
    ) -> Step[bool]:
        """Whether this tag, at a line's begin, stands where the value's end was forgotten."""
        reading = self._reading
        reading.unread(found)
        if found == frame.key:
            tag = yield from reading.ahead(self._next_key(frame))
            key = "" if tag is None else _plain(frame, tag["key"].strip())
            may = key in types and key not in given
        else:
            may = (yield from reading.ahead(self._after(frame))) is After.LAST
        if may:
            may = not (yield from reading.ahead(self._closes_later(frame)))
        yield from reading.literal(found)
        return may

    def _next_key(self, frame: TaggedFrame) -> Step[re.Match[str] | None]:
        yield from self._reading.literal(frame.key)
        return (yield from self._key(frame))

    # -- what is looked at ahead

    def _after(self, frame: TaggedFrame) -> Step[After]:
        """What follows."""
        reading = self._reading
        yield from reading.spaces()
        if (yield from reading.literal(frame.key)):
            if (yield from self._key(frame)) is not None:
                return After.PARAMETER
            return After.CUT if reading.ended and not reading.rest else After.TEXT
        closed: list[str] = []
        while closer := (yield from reading.one_of([one for one in frame.closers if one not in closed])):
            closed.append(closer)
            yield from reading.spaces()
        rest = yield from reading.peek()
        cut = reading.ended and self._is_cut(frame)
        if not closed:
            return After.CUT if cut else After.TEXT
        if not rest or cut or (yield from reading.one_of(frame.open)):
            return After.LAST
        return After.CLOSED if closed != [frame.foot] or frame.closers == (frame.foot,) else After.FOOT

    def _is_cut(self, frame: TaggedFrame) -> bool:
        """The text ends in one of these tags."""
        rest = self._reading.rest
        return any(one.startswith(rest) for one in (*frame.closers, frame.key, *frame.open))

    def _closes_later(self, frame: TaggedFrame) -> Step[bool]:
        """Whether there is an end tag more than there are parameters."""
        reading, opened = self._reading, 0
        first = reading.held
        marks = markers_of((frame.value_end, frame.key))
        while True:
            step = reading.until(marks, nothing)
            while True:
                try:
                    next(step)
                except StopIteration as end:
                    found: str = end.value
                    break
                if reading.held - first > MAX_HELD:
                    return False
                yield
            if not found or reading.held - first > MAX_HELD:
                return False
            if found == frame.key:
                opened += (yield from self._key(frame)) is not None
            elif opened:
                opened -= 1
            elif (yield from reading.ahead(self._after(frame))) is not After.TEXT:
                return True


def _kinds(tag: re.Match[str], declared: Sequence[str]) -> tuple[str, ...]:
    """By the tool's schema, else by what the tag says of its value."""
    groups = tag.groupdict()
    says_text = groups.get("string", groups.get("type")) in ("true", "string")
    if declared:
        if says_text and "string" in declared:
            return _STRING
        if groups.get("string") == "false" and tuple(declared) == _STRING:
            return (*declared, QUOTED)
        return tuple(declared)
    if says_text or not {"string", "type"} & groups.keys():
        return _STRING
    return (ANY,)


def _plain(frame: TaggedFrame, text: str) -> str:
    return text.replace("&quot;", '"').replace("&amp;", "&") if frame.escapes else text


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
