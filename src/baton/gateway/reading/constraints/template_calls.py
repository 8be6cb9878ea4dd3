"""How a model with a `response_template` writes calls: found by trying what the template reads.

A template says how calls are read, not how they are written.  Where its markers are texts, or expressions
that are nearly texts, candidates for the writing are made of them; the first one that the template itself
reads as the call that was written is it.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache

from baton.gateway.parsing.deltas import Parsed
from baton.gateway.parsing.templates.parser import TemplateParser
from baton.gateway.parsing.templates.template import CALLS, Marker, load

_GROUP = re.compile(r"\(\?P<name>[^()]*\)")
_ARGUMENTS = {"a": 1, "b": "x"}
_BODIES = (("", ""), ('{"name": "NAME", "arguments": ', "}"), ('{"name": "NAME", "parameters": ', "}"))


@lru_cache(maxsize=4)
def written(template: str) -> tuple[str, str] | None:
    """(before, behind) the arguments as JSON, `NAME` for the name; None: no way was found.

    `template`: as JSON."""
    response = load(template)
    field = response.fields.get(CALLS)
    if field is None or field.opens is None or field.closes is None:
        return None
    for opening in _texts(field.opens):
        for closing in _texts(field.closes):
            for begin, end in _BODIES:
                before, behind = opening + begin, end + closing
                parsed = Parsed()
                parser = TemplateParser(response)
                parsed.add(parser.push(before.replace("NAME", "f") + json.dumps(_ARGUMENTS) + behind))
                parsed.add(parser.finish())
                calls = [(one.name, json.loads("".join(one.arguments))) for one in parsed.calls]
                if calls == [("f", _ARGUMENTS)] and not parsed.content and not parsed.reasoning:
                    return before, behind
    return None


def _texts(marker: Marker) -> tuple[str, ...]:
    if marker.texts:
        return marker.texts
    bare = _GROUP.sub("NAME", marker.pattern.pattern).replace("\\s*", "").replace("\\n", "\n")
    return (bare.replace("\\", ""),)
