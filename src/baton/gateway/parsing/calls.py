"""Generators that read a call, one for each kind of frame.

Each is called behind the marker that opened the frame, which is marked in the text, and returns what became
of it.  `NOT` means that nothing was given: the caller goes back and takes the marker as text.  As soon as a
call has begun, it stays one, as its name is with the client; if its arguments turn out to be no JSON
(`BROKEN`), they end where they stopped to be, and what follows is text.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from baton.gateway.parsing.coercion import WRAPPERS, unwrapped, whole_object
from baton.gateway.parsing.emitting import Output
from baton.gateway.parsing.frames import Frame, JsonFrame, LooseFrame, NamedFrame, PythonFrame, TaggedFrame
from baton.gateway.parsing.json_text import json_object, json_value, object_in, text_value
from baton.gateway.parsing.loose_values import loose_object
from baton.gateway.parsing.python_calls import python_calls
from baton.gateway.parsing.reading import Give, Reading, Step, markers_of, nothing
from baton.gateway.parsing.results import BROKEN, DONE, MAX_ARGUMENTS, MAX_HELD, NOT, Result
from baton.gateway.parsing.tags import TagReader, Types

_TAIL = re.compile(r"[\s}\]]*")
_TOOL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/\-]*")
"""As requests have them."""


class CallReader:
    """Reads calls of one text into an `Output`."""

    def __init__(self, reading: Reading, output: Output, types: Types, known: Callable[[str], bool]) -> None:
        """`known`: whether there is such a tool."""
        self._reading = reading
        self._output = output
        self._types = types
        self._known = known
        self._tags = TagReader(reading, output, types, self._begin)
        self._before = 0
        """Characters of arguments that came before the name."""

    def read(self, frame: Frame, opened: str) -> Step[Result]:
        self._before = 0
        match frame:
            case JsonFrame():
                result = yield from self.json(frame, self._known if frame.known else None)
            case NamedFrame():
                result = yield from self._named(frame)
            case TaggedFrame():
                result = yield from self._tags.read(frame, opened)
            case PythonFrame():
                result = yield from self._python(frame)
            case LooseFrame():
                result = yield from self._loose(frame)
            case _:
                raise TypeError(f"no reader for {type(frame).__name__}")
        return result

    @property
    def is_long(self) -> bool:
        """What was read since the mark is too much for what is not known to be a call yet.  Arguments that
        stand before their name do not count: they may be as long as arguments are."""
        return self._reading.held > MAX_HELD and self._reading.held - self._before > MAX_HELD

    # -- JSON

    def json(self, frame: Frame, known: Callable[[str], bool] | None = None) -> Step[Result]:
        """`known`: as of `json_call`."""
        reading = self._reading
        keyed = isinstance(frame, JsonFrame) and frame.keyed
        yield from reading.spaces()
        many = yield from reading.literal("[")
        yield from reading.spaces()
        result = yield from self._keyed() if keyed else self.json_call(known)
        while many and result is DONE:
            reading.mark()
            yield from reading.spaces()
            again = yield from reading.literal(",")
            yield from reading.spaces()
            if again:
                result = yield from self._keyed() if keyed else self.json_call(known)
            else:
                result = NOT
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
        self._before = 0
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
            elif key in WRAPPERS and not begun and held is None:
                if name is not None:
                    result = yield from self.arguments(name)
                    if result is not DONE:
                        return result
                    begun = True
                else:
                    held = []
                    if not (yield from self._value_of_arguments(self._counted(held.append))):
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
        output.arguments(self._bare(name, "".join(held)) if held is not None else "{}")
        output.complete()
        return DONE

    def _keyed(self) -> Step[Result]:
        """`{NAME: {…}}`."""
        reading = self._reading
        if not (yield from reading.literal("{")):
            return NOT
        yield from reading.spaces()
        name = yield from text_value(reading)
        yield from reading.spaces()
        if not name or not (yield from reading.literal(":")):
            return NOT
        yield from reading.spaces()
        result = yield from self.arguments(name)
        if result is DONE:
            yield from reading.spaces()
            yield from reading.literal("}")
        return result

    def _counted(self, give: Give) -> Give:
        """Gives arguments whose name is not known; they do not count as held."""

        def put(text: str) -> None:
            self._before = min(self._before + len(text), MAX_ARGUMENTS)
            give(text)

        return put

    def _bare(self, name: str, arguments: str) -> str:
        """Without what a model put around all arguments once more."""
        types = self._types.get(name.strip(), {})
        if not types or not any(f'"{wrapper}"' in arguments[:64] for wrapper in WRAPPERS):
            return arguments
        whole = whole_object(arguments)
        if whole is None or len(whole) != 1:
            return arguments
        ((key, value),) = whole.items()
        found = unwrapped(value, list(types)) if key in WRAPPERS and key not in types else None
        return arguments if found is None else found

    def _ended(self, begun: bool) -> Result:
        """The object goes on in no way that is known, maybe behind its arguments."""
        return DONE if begun else NOT

    def arguments(self, name: str, id: str | None = None) -> Step[Result]:
        """Begins the call with the arguments that follow: an object, a text that is one, or null."""
        reading, output = self._reading, self._output
        if (yield from reading.peek()) == "{":
            return (yield from self._object(name, id))
        held: list[str] = []
        if not (yield from self._value_of_arguments(held.append)) or not self._begin(name, id):
            return NOT
        output.arguments(self._bare(name, "".join(held)))
        output.complete()
        return DONE

    def _object(self, name: str, id: str | None = None) -> Step[Result]:
        """Begins the call with the object that follows."""
        begun = False

        def begin() -> bool:
            nonlocal begun
            begun = self._begin(name, id)
            return begun

        give = self._output.arguments
        wrapped = yield from self._reading.ahead(self._wraps(name))
        held: list[str] = []
        whole = yield from json_object(self._reading, held.append if wrapped else give, begin)
        if begun and wrapped:
            give(self._bare(name, "".join(held)) if whole else "".join(held))
        if not begun:
            return NOT
        if not whole:
            return BROKEN
        self._output.complete()
        return DONE

    def _wraps(self, name: str) -> Step[bool]:
        """Whether the object that follows may hold all arguments once more."""
        types = self._types.get(name.strip(), {})
        reading = self._reading
        if not types or not (yield from reading.literal("{")):
            return False
        yield from reading.spaces()
        found = yield from reading.one_of([f'"{key}"' for key in WRAPPERS if key not in types])
        return bool(found)

    def _value_of_arguments(self, give: Callable[[str], None]) -> Step[bool]:
        """An object, a text that is one, or null."""
        reading = self._reading
        first = yield from reading.peek()
        if first == "{":
            return (yield from json_object(reading, give))
        if first == '"':
            self._before = MAX_ARGUMENTS  # (as long as arguments are; it is all read before they begin)
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
        if self.is_long or not name.strip():
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
        # (A call may have no arguments.)
        ends = (frame.close.lstrip(),) if frame.close else frame.open
        if (yield from reading.ahead(reading.one_of(ends))):
            result = self.empty(named["name"], id)
        else:
            result = yield from self.arguments(named["name"], id)
        if result is DONE:
            yield from self._close(frame)
        return result

    def empty(self, name: str, id: str | None = None) -> Result:
        """A call without arguments."""
        if not self._begin(name, id):
            return NOT
        self._output.arguments("{}")
        self._output.complete()
        return DONE

    # -- others between markers

    def _python(self, frame: PythonFrame) -> Step[Result]:
        result = yield from python_calls(self._reading, self._output, _is_name, lines=frame.lines)
        if result is DONE:
            yield from self._close(frame)
        return result

    def _loose(self, frame: LooseFrame) -> Step[Result]:
        reading, output = self._reading, self._output
        yield from reading.spaces()
        if not (yield from reading.literal(frame.before)):
            return NOT
        name, found = yield from reading.upto(markers_of(("{",)))
        if not found or not _is_name(name.strip()) or not self._begin(name):
            return NOT
        reading.unread("{")
        types = self._types.get(name.strip(), {})
        if not (yield from loose_object(reading, output.arguments, frame.quote, types)):
            return BROKEN
        output.complete()
        yield from self._close(frame)
        return DONE


def _is_name(text: str) -> bool:
    return _TOOL_NAME.fullmatch(text) is not None
