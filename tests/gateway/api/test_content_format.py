"""How a message's text parts come to the template: as the template reads them, or as a flag says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from baton.gateway.api.messages import read_messages
from baton.gateway.text.chat_template import MAX_TEMPLATE, ChatTemplate, ChatTemplateError, check_template
from tests.gateway.conftest import END
from tests.gateway.harness import GatewayServer

GEMMA_3 = """\
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}{%- set first = messages[0]['content'] -%}
    {%- else -%}{%- set first = messages[0]['content'][0]['text'] -%}{%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set first = "" -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for message in loop_messages -%}
    {{ '<' + message['role'] + '>' + (first if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endfor -%}"""
ALWAYS_PARTS = (
    "{% for m in messages %}{{ m.role }}:{% for c in m.content | selectattr('type', 'equalto', 'text') %}"
    "[{{ c.text }}]{% endfor %}{% endfor %}"
)
MACRO = (
    "{% macro show(content, n) %}{% if content is string %}{{ content }}{% else %}{% for c in content %}"
    "[{{ c.text }}]{% endfor %}{% endif %}{% endmacro %}"
    "{% for message in messages %}{{ show(message.content, 1) }}{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}:{{ m['content'] }};{% endfor %}"
CHARACTERS = "{% for m in messages %}{% for w in m.name %}{{ w }}{% endfor %}{{ m.content }}{% endfor %}"
PARTS = [{"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]}]


@pytest.mark.parametrize(
    ("template", "found", "rendered"),
    [
        (GEMMA_3, "openai", "<user>ab"),
        (ALWAYS_PARTS, "openai", "user:[a ][b]"),
        (MACRO, "openai", "[a ][b]"),
        ("{% set c = messages[0].content %}{% for p in c %}{{ p.text }}{% endfor %}", "openai", "a b"),
        ("{% set all = messages %}{% for m in all %}{% for p in m['content'] %}{{ p.text }}|{% endfor %}"
         "{% endfor %}", "openai", "a |b|"),
        (PLAIN, "string", "user:a \nb;"),
        (CHARACTERS, "string", "a \nb"),
    ],
)  # fmt: skip
def test_the_format_follows_from_the_template(template: str, found: str, rendered: str):
    made = ChatTemplate(template)
    assert made.shapes.reads("user").parts == (found == "openai")
    assert made.render(read_messages(PARTS, "openai")) == rendered


def test_a_plain_text_stays_one_where_the_template_asks_and_is_a_part_where_it_does_not():
    plain = read_messages([{"role": "user", "content": "hi"}], "openai")
    assert ChatTemplate(GEMMA_3).render(plain) == "<user>hi"
    assert ChatTemplate(ALWAYS_PARTS).render(plain) == "user:[hi]"
    options: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    assert ChatTemplate(ALWAYS_PARTS).render(plain, **options) == "user:[hi"
    assert ChatTemplate(GEMMA_3).render(read_messages(PARTS, "openai"), **options) == "<user>ab"
    assert plain == [{"role": "user", "content": "hi"}], "what the client sent stays as it is"


def test_no_template_keeps_the_server_from_saying_so():
    for source in ("{% for %}", "{{ " + "(" * 50_000 + ")" * 50_000 + " }}"):
        with pytest.raises(ChatTemplateError, match="does not compile"):
            check_template(source)
    with pytest.raises(ChatTemplateError, match="characters; at most"):
        check_template("x" * (MAX_TEMPLATE + 1))
    check_template("{{ 'x' * 10**12 }}")  # (constants are not computed here)


@pytest.mark.parametrize(("asked", "expected"), [("auto", "user:[a ][b]"), ("string", "user:[a \nb]")])
def test_over_http(byte_level: Path, vocab: int, tmp_path: Path, asked: str, expected: str):
    shutil.copytree(byte_level, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": ALWAYS_PARTS}))
    with GatewayServer(tmp_path, eos=END, vocab=vocab, content_format=asked) as server:
        with server.http() as http:
            answer = http.post("/tokenize", json={"messages": PARTS})
            text = http.post("/detokenize", json={"tokens": answer.json()["tokens"]})
        assert text.json()["prompt"] == expected
