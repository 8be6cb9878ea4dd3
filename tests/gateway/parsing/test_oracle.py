"""The parser of transformers reads well-formed answers as ours does, in the formats that it knows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton.gateway.parsing.choice import Formats, choose
from baton.gateway.parsing.formats import CALLS
from tests.gateway.parsing.fixtures import TYPES, answers, meaning, read

pytest.importorskip("transformers.utils.chat_parsing")
START = "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("family", "calls", "think"), [("qwen3", "hermes", "qwen3"), ("qwen3_5", "qwen3_coder", "qwen3")]
)
def test_a_response_template_shows_the_formats(family: str, calls: str, think: str) -> None:
    """Where the chat template shows nothing, or others; flags go before it."""
    response = json.dumps(template_of(family))
    for template in ("{{ tools }}", "{{ tools }}[TOOL_CALLS][THINK]"):
        assert choose(template, response=response) == Formats(calls, think)
    assert choose("", "mistral", "none", response=response) == Formats("mistral", "")


def template_of(family: str) -> dict[str, Any]:
    from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS as templates

    return next(template for families, template in templates.items() if family in families)


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": list(kinds)} for key, kinds in properties.items()},
            },
        },
    }
    for name, properties in TYPES.items()
]


@pytest.mark.parametrize(("format", "family"), [("hermes", "qwen3"), ("qwen3_coder", "qwen3_5")])
def test_transformers_reads_the_same(format: str, family: str) -> None:
    from transformers.utils.chat_parsing import parse_response

    template = template_of(family)
    count = 0
    for answer in answers():
        if answer.calls is not CALLS[format]:
            continue
        prefix = START + ("<think>" if answer.thinking else "")
        theirs = parse_response(answer.text, template, prefix=prefix, tools=TOOLS)
        content, reasoning, calls = meaning(read(answer, [answer.text]))
        assert content.strip() == theirs.get("content", "").strip(), answer.text
        assert reasoning == (theirs.get("reasoning_content") or "")
        called = [one["function"] for one in theirs.get("tool_calls") or ()]
        ours = [(name, json.loads(arguments)) for name, arguments, _ in calls]
        assert ours == [(one["name"], one["arguments"]) for one in called], answer.text
        count += 1
    assert count > 20
