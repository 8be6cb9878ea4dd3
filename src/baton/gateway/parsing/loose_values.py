"""JSON whose keys have no quotes and whose texts stand between marks, as Gemma's models write it; passed on
as JSON while it comes.

A text may hold its own end mark: it ends only where the object or the list goes on behind it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from baton.gateway.parsing.coercion import ANY, coerced
from baton.gateway.parsing.json_text import MAX_DEPTH, escaped, json_value, text_value
from baton.gateway.parsing.reading import Give, Reading, Step, markers_of

_BARE = re.compile(r"[^,}\]]*")
_KEY = re.compile(r"[^:,{}\[\]]*")


def loose_object(
    reading: Reading, give: Give, quote: str, types: Mapping[str, tuple[str, ...]], depth: int = 0
) -> Step[bool]:
    """Reads an object and gives it as JSON; False: it is none.  `types`: of its values, where they are
    known."""
    if depth > MAX_DEPTH or not (yield from reading.literal("{")):
        return False
    give("{")
    begun = False
    while True:
        yield from reading.spaces()
        if (yield from reading.literal("}")):
            give("}")
            return True
        if (yield from reading.literal(quote)):
            key, _ = yield from reading.upto(markers_of((quote,)))
            yield from reading.word(_KEY)
        elif (yield from reading.peek()) == '"':
            key = (yield from text_value(reading)) or ""
            yield from reading.spaces()
        else:
            key = (yield from reading.word(_KEY)).strip()
        if not (yield from reading.literal(":")):
            return False
        give((", " if begun else "") + json.dumps(key, ensure_ascii=False) + ": ")
        begun = True
        yield from reading.spaces()
        if not (yield from _value(reading, give, quote, types.get(key, ()), depth)):
            return False
        yield from reading.spaces()
        if not (yield from reading.literal(",")) and (yield from reading.peek()) != "}":
            return False


def _value(reading: Reading, give: Give, quote: str, kinds: tuple[str, ...], depth: int) -> Step[bool]:
    if (yield from reading.literal(quote)):
        return (yield from _text(reading, give, quote, kinds))
    first = yield from reading.peek()
    if first == "{":
        return (yield from loose_object(reading, give, quote, {}, depth + 1))
    if first == "[":
        return (yield from _list(reading, give, quote, depth + 1))
    if first == '"':
        return (yield from json_value(reading, give))
    text = yield from reading.word(_BARE)
    if not (yield from reading.peek()):  # (it may go on)
        return False
    give(coerced(text.strip(), kinds or (ANY,)))
    return True


def _list(reading: Reading, give: Give, quote: str, depth: int) -> Step[bool]:
    if depth > MAX_DEPTH or not (yield from reading.literal("[")):
        return False
    give("[")
    begun = False
    while True:
        yield from reading.spaces()
        if (yield from reading.literal("]")):
            give("]")
            return True
        if begun:
            give(", ")
        begun = True
        if not (yield from _value(reading, give, quote, (), depth)):
            return False
        yield from reading.spaces()
        if not (yield from reading.literal(",")) and (yield from reading.peek()) != "]":
            return False


def _text(reading: Reading, give: Give, quote: str, kinds: tuple[str, ...]) -> Step[bool]:
    """What follows the opening mark."""
    pieces: list[str] = []
    streams = not kinds or "string" in kinds
    if streams:
        give('"')
    put: Give = (lambda text: give(escaped(text))) if streams else pieces.append
    while True:
        found = yield from reading.until(markers_of((quote,)), put)
        if not found:
            return False
        if (yield from reading.ahead(_goes_on(reading))):
            break
        put(found)
    give('"' if streams else coerced("".join(pieces), kinds))
    return True


def _goes_on(reading: Reading) -> Step[bool]:
    """Whether the object or list around a text does."""
    yield from reading.spaces()
    following = yield from reading.peek()
    return not following or following in ",}]"
