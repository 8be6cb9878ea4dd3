"""What the embedded model learned from is written as its chat template writes it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from random import Random

import pytest

from baton.gateway.parsing.choice import Formats, choose
from baton.gateway.text.tokenizer import Tokenizer
from baton.model.checkpoint.hub import resolve_model


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(resolve_model(None))


def test_conversations_are_written_as_the_template_does(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "tools"))
    try:
        import tiny_calls
        from tiny_tokenizer import CHAT_TEMPLATE
    finally:
        made_here = [name for name in sys.modules if name.startswith("tiny_")]
    try:
        assert tokenizer.template_source == CHAT_TEMPLATE

        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False)

        def pieces(text: str) -> list[str]:
            return [tokenizer.decode([one], skip_special_tokens=False) for one in encode(text)]

        thought = 0
        for index in range(60):
            rng = Random(f"test/{index}")
            if index % 4:
                turns, tools = tiny_calls.call_turns(rng, pieces)
            else:
                turns, tools = tiny_calls.think_turns(rng, 300, lambda text: len(encode(text))), []
            made = "".join(text for text, _ in tiny_calls.written(turns, tools))
            thought += "<think>" in made
            shown = tokenizer.render_chat(
                [turn.message for turn in turns], tools=tools or None, add_generation_prompt=False
            )
            assert re.sub(r"<think>\n(.|\n)*?</think>\n{0,2}", "", made) == shown
        assert thought > 10
    finally:
        for name in made_here:
            sys.modules.pop(name, None)


def test_the_template_shows_formats_and_markers(tokenizer: Tokenizer) -> None:
    formats = choose(tokenizer.template_source)
    assert formats == Formats("hermes", "qwen3", template_opens=True)
    for marker in formats.markers:
        (token,) = tokenizer.encode(marker, add_special_tokens=False)
        assert token not in tokenizer.special_ids
        assert tokenizer.special_names[marker] == token, "a grammar may say when it comes"
    user = [{"role": "user", "content": "Hi"}]
    plain = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.render_chat(user) == plain
    for variables, opened in (
        ({"enable_thinking": True}, True),
        ({"enable_thinking": False, "reasoning_effort": "low"}, False),
        ({"reasoning_effort": "low"}, True),
        ({"reasoning_effort": "none"}, False),
    ):
        assert tokenizer.render_chat(user, variables=variables) == plain + "<think>\n" * opened


def test_the_template_takes_any_schema(tokenizer: Tokenizer) -> None:
    """Types that are lists, nothing at all, references, true: the model reads `any`."""
    schema = {
        "properties": {"a": True, "b": {"type": ["string", "null"]}, "c": {"$ref": "#/$defs/x"}, "items": {}}
    }
    tools = [
        {"type": "function", "function": {"name": "f", "description": "One\ntwo.", "parameters": schema}},
        {"type": "function", "function": {"name": "g"}},
    ]
    text = tokenizer.render_chat([{"role": "user", "content": "Hi"}], tools=tools)
    listed = ", ".join(f'"{name}": optional any' for name in ("a", "b", "c", "items"))
    assert f'One two. {{"name": "f", "arguments": {{{listed}}}}}\n' in text
    assert '{"name": "g", "arguments": {}}\n' in text
