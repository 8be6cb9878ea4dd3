"""A value that holds any marker of any format comes out whole, however the text is cut."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest

from baton.gateway.parsing.formats import CALLS, THINKS
from baton.gateway.parsing.parser import HARMONY_MARKERS
from tests.gateway.parsing.fixtures import Answer, framed, meaning, read

PLACES = (
    "{m}",
    "{m} after",
    "before {m}",
    "a {m} b",
    "a{m}b",
    "{m}{m}",
    "a {m}\n{m} b",
    "a\n{m}\nb",
    "a\n{m}",
    "{m}\nb",
    "\n{m}\n",
    '{{"a": "{m}"}}',
    "'{m}', \"{m}\"",
)
OWN = ("<parameter=x>", '<parameter name="x">', "<function=f>", "<arg_key>x</arg_key>", '<invoke name="f">')
"""Whole tags, of which markers are the beginning."""
OTHERS = ("</tool_call>\n<tool_call>", "</parameter></parameter>", "```\n", "</div>")
ALL = os.environ.get("ALL_MARKERS") == "1"
"""Every marker at every place, and not a sample."""
COUNTS: dict[str, int] = {}


def every_marker() -> list[str]:
    found = {marker for think in THINKS.values() if think for marker in (*think.opens, *think.closes)}
    for calls in CALLS.values():
        found |= {*calls.dropped, *(marker for frame in calls.frames for marker in frame.markers)}
    return sorted(one for one in {*found, *HARMONY_MARKERS, *OWN, *OTHERS} if one.strip())


def values_of(marker: str) -> Iterator[tuple[str, Any]]:
    """(parameter, value)."""
    for place in PLACES:
        yield "text", place.format(m=marker)
    yield "deep", {"a": marker, "b": [f"x {marker}\n", {"c": f"{marker}{marker}"}]}
    yield "list", [marker, f"{marker} y", 1]


@pytest.mark.parametrize("name", CALLS)
def test_a_value_with_any_marker_is_whole(name: str) -> None:
    rng = random.Random(name)
    count = 0
    for marker in every_marker():
        for key, value in values_of(marker):
            if not ALL and rng.random() > 0.2:
                continue
            for arguments in (
                {key: value},
                {"city": "Paris", key: value, "days": 3},
            ):
                called = [("weather", arguments)] * rng.choice((1, 1, 2) if name != "openai" else (1,))
                text = framed(name, called)
                answer = Answer(text, None, CALLS[name])
                places = sorted(rng.choices(range(len(text) + 1), k=rng.randint(1, 12)))
                cut = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
                for pieces in ([text], list(text)) if not count % 7 else ([text], cut):
                    content, reasoning, calls = meaning(read(answer, pieces))
                    count += 1
                    assert [(one, json.loads(a)) for one, a, _ in calls] == called, (marker, text, calls)
                    assert (content, reasoning) == ("", ""), (marker, text)
    assert count > (5_000 if ALL else 1_000)
    COUNTS[name] = count


def test_many_cases_were_tried() -> None:
    assert sum(COUNTS.values()) > 30_000 or len(COUNTS) < len(CALLS), COUNTS
