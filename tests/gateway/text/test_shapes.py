"""Templates are asked what they want by rendering, not by searching their source."""

from __future__ import annotations

from typing import Any

import pytest

from baton.gateway.api.call_arguments import read_arguments
from baton.gateway.api.messages import read_messages
from baton.gateway.text.chat_template import ChatTemplate, ChatTemplateError
from baton.gateway.text.shapes import Kind
from tests.gateway.reading.chat_templates import (
    ALTERNATES,
    CHANNELS,
    CHATML,
    HEADERS,
    NONE_TELLS_CALLS,
    PARTS_AND_THOUGHTS,
    TAGS,
    TURNS,
)

USER = {"role": "user", "content": "Hi."}
CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": '{"city": "Rome"}'}}
RESULT = {"role": "tool", "tool_call_id": "call00001", "content": "done"}


def render(source: str, *messages: dict[str, Any]) -> str:
    return ChatTemplate(source).render(read_messages(messages, "openai"), add_generation_prompt=False)


def test_words_in_a_source_say_nothing() -> None:
    """Comments, prompts, and questions about other fields."""
    source = (
        "{# developer, tools; content is none #}{{ 'You are a developer with tools.' }}"
        "{% for m in messages %}{% if m.reasoning_content is not none %}{% endif %}"
        "{{ '<' + m.role + '>' + m.content }}{% endfor %}"
    )
    shapes = ChatTemplate(source).shapes
    assert (shapes.knows_developer, shapes.shows_tools) == (False, False)
    assert shapes.turn(Kind(text=False, thought=False, calls=True)).empty == ""
    assert render(source, {"role": "developer", "content": "x"}).endswith("<system>x")
    # (The name comes about while it is rendered.)
    hidden = "{% for m in messages %}{{ m.content }}{{ '!' if m.role == 'devel' ~ 'oper' }}{% endfor %}"
    assert render(hidden, {"role": "developer", "content": "x"}) == "x!"
    assert ChatTemplate(CHANNELS).shapes.knows_developer


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{{ messages[0].content }}", True),
        ("{% set all = tools if tools else [] %}{{ all | length }}{{ messages[0].content }}", True),
        ("{% if messages[0].role == 'system' %}{{ tools }}{% endif %}{{ messages[0].content }}", True),
        ("{{ messages[0].content }} {# tools #} tools", False),
        ("{% if xml_tools %}{{ xml_tools }}{% endif %}{{ messages[0].content }}", False),
        ("{{ messages[0].nothing.at.all }}{{ tools }}", False),
    ],
)
def test_whether_tools_are_shown(source: str, shown: bool) -> None:
    assert ChatTemplate(source).shapes.shows_tools is shown


@pytest.mark.parametrize("content", [None, "", []])
@pytest.mark.parametrize(
    "source",
    [CHATML, NONE_TELLS_CALLS, ALTERNATES, PARTS_AND_THOUGHTS, HEADERS, CHANNELS, TAGS],
    ids=["chatml", "none", "alternates", "parts", "headers", "channels", "tags"],
)
def test_calls_are_shown_whatever_stands_beside_them(source: str, content: Any) -> None:
    turn = {"role": "assistant", "content": content, "tool_calls": [CALL]}
    text = render(source, USER, turn, RESULT)
    assert "Rome" in text
    assert "None" not in text
    turn = {"role": "assistant", "content": "I look.", "reasoning": "I think.", "tool_calls": [CALL]}
    text = render(source, USER, turn, RESULT)
    assert "Rome" in text
    assert "I look." in text
    if source in (CHATML, PARTS_AND_THOUGHTS, CHANNELS, TAGS):
        assert "I think." in text


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_every_name_of_thoughts_is_read(name: str) -> None:
    for source in (CHATML, PARTS_AND_THOUGHTS, TAGS):
        assert "I think." in render(
            source, USER, {"role": "assistant", "content": "Yes.", name: "I think."}, USER
        )
    turn = {"role": "assistant", "content": None, name: "I think.", "tool_calls": [CALL]}
    assert "I think." in render(CHANNELS, USER, turn, RESULT)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "thinking", "thinking": "I think."},
        {"type": "thinking", "thinking": [{"type": "text", "text": "I think."}]},
        {"type": "reasoning", "reasoning": "I think."},
        {"type": "reasoning", "text": "I think."},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "I think."}]},
    ],
)
def test_thoughts_may_be_parts(part: dict[str, Any]) -> None:
    message = {"role": "assistant", "content": [part, {"type": "text", "text": "Yes."}]}
    assert "<think>I think.</think>Yes." in render(CHATML, USER, message, USER)


def test_parts_are_read_by_role() -> None:
    """A template may read all parts of a user's, and the first of a system message."""
    source = (
        "{% for m in messages %}{% if m.role == 'system' %}"
        "{{ m.content if m.content is string else m.content[0].text }}"
        "{% else %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endif %}{% endfor %}"
    )
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    both = [{"role": role, "content": parts} for role in ("system", "user")]
    assert render(source, *both) == "a\nb[a][b]"
    assert render(source, {"role": "user", "content": "a"}) == "[a]"


def test_arguments_are_a_text_where_a_template_wants_one() -> None:
    source = (
        "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
        "{% if c.function.arguments is not string %}{{ raise_exception('a text!') }}{% endif %}"
        "{{ c.function.arguments }}{% endfor %}{% endfor %}"
    )
    cut = {**CALL, "function": {"name": "f", "arguments": '{"city": "Ro'}}
    for call, said in ((CALL, '{"city": "Rome"}'), (cut, '{"city": "Ro')):
        assert said in render(source, USER, {"role": "assistant", "content": None, "tool_calls": [call]})


def test_strict_templates_get_what_they_take() -> None:
    system = {"role": "system", "content": "Be brief."}
    done = {"role": "assistant", "content": "Done."}
    silent = {"role": "assistant", "content": None}
    assert render(TURNS, system, USER, USER, done, USER).count("<turn>") == 3
    assert "Be brief.\n\nHi.\n\nHi." in render(TURNS, system, USER, USER)
    assert render(PARTS_AND_THOUGHTS, USER, silent, USER) == "[user]Hi.\n\nHi."
    assert "[INST]Hi.[/INST]Done.</s>[INST]Be brief.\n\nHi.[/INST]" in render(
        ALTERNATES, USER, done, system, USER
    )
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    text = render(TURNS, USER, called, RESULT)
    assert '{"name": "f", "arguments": {"city": "Rome"}}' in text, "no other way to say it here"
    assert "done" in text
    with pytest.raises(ChatTemplateError, match="no role king"):
        render(ALTERNATES, {"role": "king", "content": "x"})
    for_tools = "{% for t in tools %}{{ t }}{% endfor %}{{ messages[0].content }}"
    assert render(for_tools, USER) == "Hi."


def test_questions_are_put_once(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(CHATML)
    messages = read_messages([USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT])
    template.render(messages)
    monkeypatch.setattr(template.shapes, "_render", lambda *_: pytest.fail("asked again"))
    template.render(messages)


@pytest.mark.parametrize(
    ("given", "value", "whole"),
    [
        ("", {}, True),
        (None, {}, True),
        ("null", {}, True),
        ({"a": 1}, {"a": 1}, True),
        ('{"a": 1}', {"a": 1}, True),
        ("{", {}, False),
        ('{"ci', {"ci": None}, False),
        ('{"city"', {"city": None}, False),
        ('{"city": ', {"city": None}, False),
        ('{"city": "Pa', {"city": "Pa"}, False),
        ('{"city": "Pa\\', {"city": "Pa"}, False),
        ('{"city": "Pa\\u00', {"city": "Pa"}, False),
        ('{"city": "Pa\\ud83d\\ude', {"city": "Pa"}, False),
        ('{"a": [1, {"b": tr', {"a": [1, {}]}, False),
        ('{"a": [1, {"b": "c"}], "d": 12', {"a": [1, {"b": "c"}], "d": 12}, False),
        ('{"a": 1}}', {"a": 1}, False),
        ("[1, 2]", {"arguments": [1, 2]}, False),
        ('"Paris"', {"arguments": "Paris"}, False),
        ("Paris", {"arguments": "Paris"}, False),
        ([1, 2], {"arguments": [1, 2]}, False),
    ],
)
def test_arguments_are_the_nearest_object(given: Any, value: dict[str, Any], whole: bool) -> None:
    assert read_arguments(given) == (value, whole)
    if isinstance(given, str) and given.strip() not in ("", "null"):
        assert str(read_arguments(given)[0]) == given
