"""Generators that read a call, one for each kind of frame.

Each is called behind the marker that opened the frame, which is marked in the text, and returns what became
of it.  `NOT` means that nothing was given: the caller goes back and takes the marker as text.  As soon as a
call has begun, it stays one, as its name is with the client; if its arguments turn out to be no JSON
(`BROKEN`), they end where they stopped to be, and what follows is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from enum import Enum

from baton.gateway.parsing.emitting import Output
from baton.gateway.parsing.formats import Frame, JsonFrame, NamedFrame, TaggedFrame
from baton.gateway.parsing.json_text import escaped, json_object, json_value, object_in, text_value
from baton.gateway.parsing.reading import Reading, Step, markers_of, nothing

MAX_HELD = 1 << 14
"""Characters in which a call must say its name and begin its arguments."""
_TAIL = re.compile(r"[\s}\]]*")

Types = Mapping[str, Mapping[str, tuple[str, ...]]]
"""Tool → parameter → types of JSON that it may have; a parameter that is not there is a text."""


class Result(Enum):
    NOT = 0
    BROKEN = 1
    DONE = 2


NOT, BROKEN, DONE = Result.NOT, Result.BROKEN, Result.DONE


class CallReader:
    """Reads calls of one text into an `Output`."""

    def __init__(self, reading: Reading, output: Output, types: Types) -> None:
        self._reading = reading
        self._output = output
        self._types = types

    def read(self, frame: Frame, opened: str) -> Step[Result]:
        match frame:
            case JsonFrame():
                result = yield from self.json(frame)
            case NamedFrame():
                result = yield from self._named(frame)
            case TaggedFrame():
                result = yield from self._tagged(frame, opened)
            case _:
                raise TypeError(f"no reader for {type(frame).__name__}")
        return result

    # -- JSON

    def json(self, frame: Frame) -> Step[Result]:
        reading = self._reading
        yield from reading.spaces()
        many = yield from reading.literal("[")
        yield from reading.spaces()
        result = yield from self.json_call()
        while many and result is DONE:
            reading.mark()
            yield from reading.spaces()
            again = yield from reading.literal(",")
            yield from reading.spaces()
            result = (yield from self.json_call()) if again else NOT
            if result is NOT:
                reading.back()
                result = DONE
                break
        if many and result is DONE:
            reading.mark()
            yield from reading.spaces()
            if (yield from reading.literal("]")):
                reading.release()
            else:
                reading.back()
        if result is DONE:
            yield from self._close(frame)
        return result

    def json_call(self, known: Callable[[str], bool] | None = None) -> Step[Result]:
        """`{"name": …, "arguments": {…}}`; `known`: whether there is such a tool, and the arguments must be
        there."""
        reading, output = self._reading, self._output
        if not (yield from reading.literal("{")):
            return NOT
        name: str | None = None
        held: list[str] | None = None
        """Arguments that came before the name."""
        begun = False
        while True:
            yield from reading.spaces()
            if (yield from reading.literal("}")):
                break
            key = yield from text_value(reading)
            yield from reading.spaces()
            if key is None or not (yield from reading.literal(":")):
                return self._ended(begun)
            yield from reading.spaces()
            if key == "name" and name is None:
                name = yield from text_value(reading)
                if not name or (known is not None and not known(name)):
                    return NOT
            elif key in ("arguments", "parameters") and not begun and held is None:
                if name is not None:
                    result = yield from self._arguments(name)
                    if result is not DONE:
                        return result
                    begun = True
                else:
                    held = []
                    if not (yield from self._value_of_arguments(held.append)):
                        return NOT
            elif not (yield from json_value(reading, nothing)):
                return self._ended(begun)
            yield from reading.spaces()
            if (yield from reading.literal("}")):
                break
            if not (yield from reading.literal(",")):
                return self._ended(begun)
        if begun:
            return DONE
        if name is None or (known is not None and held is None) or not self._begin(name):
            return NOT
        output.arguments("".join(held) if held is not None else "{}")
        output.complete()
        return DONE

    def _ended(self, begun: bool) -> Result:
        """The object goes on in no way that is known, maybe behind its arguments."""
        return DONE if begun else NOT

    def _arguments(self, name: str) -> Step[Result]:
        """Begins the call with the arguments that follow."""
        reading, output = self._reading, self._output
        if (yield from reading.peek()) == "{":
            return (yield from self.object(name))
        held: list[str] = []
        if not (yield from self._value_of_arguments(held.append)) or not self._begin(name):
            return NOT
        output.arguments("".join(held))
        output.complete()
        return DONE

    def object(self, name: str, id: str | None = None) -> Step[Result]:
        """Begins the call with the object that follows."""
        begun = False

        def begin() -> bool:
            nonlocal begun
            begun = self._begin(name, id)
            return begun

        whole = yield from json_object(self._reading, self._output.arguments, begin)
        if not begun:
            return NOT
        if not whole:
            return BROKEN
        self._output.complete()
        return DONE

    def _value_of_arguments(self, give: Callable[[str], None]) -> Step[bool]:
        """An object, a text that is one, or null."""
        reading = self._reading
        first = yield from reading.peek()
        if first == "{":
            return (yield from json_object(reading, give))
        if first == '"':
            text = yield from text_value(reading)
            inner = None if text is None else object_in(text or "{}")
            if inner is None:
                return False
            give(inner)
            return True
        null: list[str] = []
        if not (yield from json_value(reading, null.append)) or null != ["null"]:
            return False
        give("{}")
        return True

    def _begin(self, name: str, id: str | None = None) -> bool:
        if self._reading.held > MAX_HELD or not name.strip():
            return False
        self._reading.release()
        self._output.begin(name.strip(), id)
        return True

    def _close(self, frame: Frame) -> Step[None]:
        """What belongs to the frame behind a call: its end, and before it spaces and brackets too many."""
        reading, close = self._reading, frame.close.lstrip()
        if close:
            reading.mark()
            yield from reading.word(_TAIL)
            if (yield from reading.literal(close)):
                reading.release()
            else:
                reading.back()

    # -- a name, then JSON

    def _named(self, frame: NamedFrame) -> Step[Result]:
        reading = self._reading
        yield from reading.spaces()
        first = yield from reading.peek()
        if frame.or_json and first and first in "[{":
            return (yield from self.json(frame))
        if frame.before:
            _, found = yield from reading.upto(markers_of((frame.before,)))
            if not found:
                return NOT
        text, found = yield from reading.upto(markers_of((*frame.ends, "{")))
        id: str | None = None
        for end, until in frame.skips:
            if found == end:
                id, found = yield from reading.upto(markers_of((until, "{")))
        named = re.fullmatch(frame.pattern, text.strip())
        if not found or named is None:
            return NOT
        if found == "{":
            reading.unread("{")
        yield from reading.spaces()
        id = named.groupdict().get("id") or (id or "").strip() or None
        result = yield from self.object(named["name"], id)
        if result is DONE:
            yield from self._close(frame)
        return result

    # -- tags

    def _tagged(self, frame: TaggedFrame, opened: str) -> Step[Result]:
        reading, output = self._reading, self._output
        if opened != frame.head:
            yield from reading.spaces()
            if frame.head and not (yield from reading.literal(frame.head)):
                return NOT
        name, found = yield from reading.upto(markers_of(frame.name_end))
        name = name.strip()
        if not found or not name or any(c.isspace() or c in '<>"' for c in name):
            return NOT
        if not self._begin(name):
            return NOT
        if found in (frame.key, frame.close):
            reading.unread(found)
        types = self._types.get(name, {})
        ends = tuple(end for end in (frame.key, frame.foot or frame.close) if end)
        opening = "{"
        while True:
            yield from reading.spaces()
            end = yield from reading.one_of(ends)
            if not end:
                return BROKEN
            if end != frame.key:
                break
            key, found = yield from reading.upto(markers_of((frame.key_end,)))
            if not found:
                return BROKEN
            kinds = types.get(key.strip(), ("string",))
            if frame.typed:
                flag, found = yield from reading.upto(markers_of(('">',)))
                kinds = ("string",) if flag == "true" else ("json",)
            if frame.value:
                yield from reading.spaces()
                if not (yield from reading.literal(frame.value)):
                    return BROKEN
            output.arguments(opening + json.dumps(key.strip(), ensure_ascii=False) + ": ")
            opening = ", "
            if not (yield from self._tagged_value(frame, kinds)):
                return BROKEN
        output.arguments("{}" if opening == "{" else "}")
        output.complete()
        if frame.foot and frame.close:
            reading.mark()
            yield from reading.spaces()
            if (yield from reading.literal(frame.close)):
                reading.release()
            else:
                reading.back()
        return DONE

    def _tagged_value(self, frame: TaggedFrame, kinds: tuple[str, ...]) -> Step[bool]:
        """Gives a value as JSON; False: it did not end."""
        reading, output = self._reading, self._output
        ends = markers_of((frame.value_end, *frame.stray_ends))
        if frame.lines:
            yield from reading.literal("\n")
        if kinds != ("string",):
            text, found = yield from reading.upto(ends)
            if found:
                output.arguments(coerced(text.strip("\n") if frame.lines else text, kinds))
        else:
            output.arguments('"')
            held = ""

            def give(text: str) -> None:
                nonlocal held
                text, held = held + text, ""
                if frame.lines and text.endswith("\n"):
                    text, held = text[:-1], "\n"
                output.arguments(escaped(text))

            found = yield from reading.until(ends, give)
            forgotten = not found or found in frame.stray_ends
            output.arguments((escaped(held) if forgotten else "") + ('"' if found else ""))
        if found in frame.stray_ends:
            reading.unread(found[1:])
        return bool(found)


def coerced(text: str, kinds: tuple[str, ...]) -> str:
    """A value that stands as text, as JSON of one of these types; a JSON string if it is none of them."""
    bare = text.strip()
    word = {"True": "true", "False": "false", "None": "null"}.get(bare, bare)
    reading = Reading(word, ended=True)
    pieces: list[str] = []
    step = json_value(reading, pieces.append)
    try:
        next(step)
    except StopIteration as end:
        if end.value and reading.at == len(word) and _is_one(word, kinds):
            return "".join(pieces)
    return json.dumps(text, ensure_ascii=False)


_KINDS = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}


def _is_one(word: str, kinds: tuple[str, ...]) -> bool:
    kind = _KINDS.get(word[0], "number")
    if kind == "number":
        whole = re.fullmatch(r"-?[0-9]+(\.0+)?", word) is not None
        return bool({"number", "json"} & set(kinds)) or (whole and "integer" in kinds)
    # (A text in quotes, where a text may stand, has them.)
    return "json" in kinds or (kind in kinds and kind != "string")
