"""Calls that a model writes as Python: `[weather(city="Paris", days=2), time()]`.

Their arguments are passed on as JSON while they come.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from baton.gateway.parsing.emitting import Output
from baton.gateway.parsing.python_values import python_value
from baton.gateway.parsing.reading import Reading, Step
from baton.gateway.parsing.results import BROKEN, DONE, MAX_HELD, NOT, Result

_NAME = re.compile(r"[A-Za-z0-9_.:/\-]*")
KEY = re.compile(r"[^\s=,()\[\]{}'\"<>]*")
"""Of a parameter: whatever schemas have that ends at its `=`."""


def python_calls(
    reading: Reading, output: Output, known: Callable[[str], bool], *, lines: bool = False
) -> Step[Result]:
    """A list of calls of tools that are known; `lines`: or one a line, without brackets."""
    if lines:
        yield from reading.spaces()
    if not (yield from reading.literal("[")):
        return (yield from _lines(reading, output, known)) if lines else NOT
    result = NOT
    while True:
        yield from reading.spaces()
        if result is DONE and (yield from reading.literal("]")):
            return DONE
        result = yield from _call(reading, output, known, first=result is NOT)
        if result is not DONE:
            return result
        yield from reading.spaces()
        if (yield from reading.literal("]")):
            return DONE
        if not (yield from reading.literal(",")):
            return DONE


def _lines(reading: Reading, output: Output, known: Callable[[str], bool]) -> Step[Result]:
    result = NOT
    while True:
        yield from reading.spaces()
        more = yield from reading.peek()
        if result is DONE and _NAME.match(more or "<")[0] == "":  # type: ignore[index]
            return DONE
        result = yield from _call(reading, output, known, first=result is NOT)
        if result is not DONE:
            return result


def _call(reading: Reading, output: Output, known: Callable[[str], bool], *, first: bool) -> Step[Result]:
    failed = NOT if first else BROKEN
    name = yield from reading.word(_NAME)
    if not known(name) or not (yield from reading.literal("(")):
        return failed
    opening = "{"
    while True:
        yield from reading.spaces()
        if (yield from reading.literal(")")):
            break
        key = yield from reading.word(KEY)
        blank = yield from reading.spaces()
        if not key or not (yield from reading.literal("=")):
            if opening == "{" and first:
                return NOT
            reading.unread(key + blank)
            return BROKEN
        if opening == "{":
            if first and reading.held > MAX_HELD:
                return NOT
            reading.release()
            output.begin(name)
        yield from reading.spaces()
        output.arguments(opening + json.dumps(key, ensure_ascii=False) + ": ")
        opening = ", "
        if not (yield from python_value(reading, output.arguments)):
            return BROKEN
        yield from reading.spaces()
        if (yield from reading.literal(")")):
            break
        if not (yield from reading.literal(",")):
            return BROKEN
    if opening == "{":
        if first and reading.held > MAX_HELD:
            return NOT
        reading.release()
        output.begin(name)
    output.arguments("{}" if opening == "{" else "}")
    output.complete()
    return DONE
