"""What a careless or hostile agent may send: schemas, tools, messages; and what the server has to say to it.

Each attack is a few requests.  A refusal is a 4xx that names the field; what is accepted is answered, and
what such an answer is bound to binds it.  `tests/e2e/test_hostile_requests.py` asks each once,
`agents.py` sends them over and over beside streams.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

TEMPLATE = """\
{%- if loops is defined %}
{%- for i in range(loops) %}{% for j in range(10000) %}{% endfor %}{% endfor %}{% endif %}
{%- if size is defined %}{{ 'x' * size }}{% endif %}
{%- if tools %}<tools>{{ tools | length }}</tools> calls: <tool_call></tool_call>{% endif %}
{%- for message in messages %}{{ message.role + ': ' + (message.content or '') + '\\n' }}{% endfor %}"""
"""A chat template that shows Hermes' calls, and has switches with which a request makes it cost much."""


class Hostile(NamedTuple):
    """A request, and what must become of it."""

    path: str
    body: Callable[[], bytes]
    status: int
    """`EITHER`: 200, or 400."""
    says: str = ""
    """What stands in the error: the field, and words of the fix."""


def _json(value: Any) -> Callable[[], bytes]:
    return cache(lambda: json.dumps(value).encode())


def _chat(status: int, says: str = "", /, **more: Any) -> Hostile:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, **more}
    return Hostile(CHAT, _json(body), status, says)


def _bound(kind: str, value: Any, status: int = 400, says: str = "structured_outputs") -> Hostile:
    return _chat(status, says, structured_outputs={kind: value})


def _schema(schema: Any, status: int = 400, says: str = "") -> Hostile:
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    return _chat(
        status,
        says or ("response_format.json_schema.schema" if status == 400 else ""),
        response_format=wanted,
    )


def _tool(number: int | None = None, **more: Any) -> dict[str, Any]:
    function = {"parameters": {"type": "object", "properties": {"a": {"type": "string"}}}, **more}
    return {"type": "function", "function": function | ({} if number is None else {"name": f"f{number}"})}


def _nested(opening: str, closing: str, depth: int, inside: str) -> str:
    return opening * depth + inside + closing * depth


def _messages(*messages: dict[str, Any], says: str) -> Hostile:
    return Hostile(CHAT, _json({"messages": list(messages), "max_tokens": 4}), 400, says)


def _raw(text: Callable[[], str], status: int, says: str) -> Hostile:
    return Hostile(CHAT, cache(lambda: text().encode()), status, says)


_USER = {"role": "user", "content": "hello"}
_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_HEAD = '{"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "response_format": '
_HEAD += '{"type": "json_schema", "json_schema": {"name": "n", "schema": '


def _wide(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"property_{i}": {"type": "string"} for i in range(count)}}


def _long_schema(size: int) -> Callable[[], str]:
    def text() -> str:
        one = json.dumps({"type": "string", "description": "d" * 900})
        properties = ",".join(f'"p{i}":{one}' for i in range(size // (len(one) + 10)))
        return f'{_HEAD}{{"type": "object", "properties": {{{properties}}}}}}}}}}}'

    return text


def _cycle(length: int) -> dict[str, Any]:
    definitions = {f"d{i}": {"$ref": f"#/$defs/d{(i + 1) % length}"} for i in range(length)}
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


def _doubling(depth: int) -> dict[str, Any]:
    """Small to write down, of 2^depth parts where it is written out."""
    definitions: dict[str, Any] = {"d0": {"type": "null"}}
    for i in range(1, depth):
        one = {"$ref": f"#/$defs/d{i - 1}"}
        definitions[f"d{i}"] = {"type": "array", "prefixItems": [one, one], "minItems": 2, "items": False}
    return {"$defs": definitions, "$ref": f"#/$defs/d{depth - 1}"}


def _of_object(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}}


def _deep(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


REFUSED = 400
EITHER = 0
"""How fast the machine is decides: compiling takes about as long as it may."""
HOSTILE: dict[str, list[Hostile]] = {
    "wrong schemas": [
        _schema({"type": "objct"}),
        _schema({"type": "object", "properties": []}),
        _schema(["no", "schema"]),
        _schema({"$ref": "#/$defs/nowhere"}),
        _schema({"$ref": "https://example.com/a.json"}),
        _schema({"type": "integer", "minimum": 5, "maximum": 1}),
        _schema({"type": "string", "pattern": "("}),
        _schema({"not": {"multipleOf": 2}}, says="not"),
        _schema(None),
        _bound("json", "{"),
        _bound("regex", "(("),
        _bound("grammar", "start: nowhere"),
        _bound("choice", []),
        _chat(REFUSED, "response_format", response_format={"type": "json_shema"}),
        _chat(REFUSED, "response_format", response_format="json"),
        _chat(REFUSED, "structured_outputs", structured_outputs={"json": {}, "regex": "a"}),
    ],
    "tools without names": [
        _chat(REFUSED, "tools[0].function.name", tools=[_tool()]),
        _chat(REFUSED, "tools[0].function.name", tools=[_tool(name="")]),
        _chat(REFUSED, "tools[0].function.name", tools=[_tool(name="a b\n")]),
        _chat(REFUSED, "tools[0]", tools=[{"type": "function"}]),
        _chat(200, tools=[{"type": "web_search"}]),
        _chat(REFUSED, "tools", tools="all"),
        _chat(REFUSED, "more than once", tools=[_tool(1), _tool(1)]),
        _chat(REFUSED, "tools[0].function.parameters", tools=[_tool(1, parameters=[1])]),
        _chat(REFUSED, "must be 'object'", tools=[_tool(1, parameters={"type": "string"})]),
    ],
    "unknown tool in tool_choice": [
        _chat(
            REFUSED,
            "tool_choice",
            tools=[_tool(1)],
            tool_choice={"type": "function", "function": {"name": "other"}},
        ),
        _chat(REFUSED, "tool_choice", tools=[_tool(1)], tool_choice="f1"),
        _chat(REFUSED, "tool_choice", tool_choice="required"),
        _chat(REFUSED, "tool_choice", tools=[_tool(1)], tool_choice={"type": "function"}),
    ],
    "messages out of order": [
        _messages({"role": "tool", "tool_call_id": "c1", "content": "a"}, says="messages[0]"),
        _messages(_USER, {"role": "tool", "tool_call_id": "c1", "content": "a"}, says="messages[1]"),
        _messages(
            _USER,
            {"role": "assistant", "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "other", "content": "a"},
            says="messages[2]",
        ),
        _messages({"role": 7, "content": "a"}, says="messages[0].role"),
        _messages({"content": "a"}, says="messages[0]"),
        _messages(_USER, {"role": "assistant", "tool_calls": [{"id": "c"}]}, says="messages[1].tool_calls"),
        _messages(_USER, {"role": "assistant", "tool_calls": "f"}, says="messages[1].tool_calls"),
        _messages(says="messages"),
    ],
    "10,000 tools": [
        _chat(REFUSED, "tools", tools=[_tool(i) for i in range(10_000)]),
        _chat(200, tools=[_tool(i) for i in range(500)], tool_choice="auto"),
        _chat(
            EITHER,
            "",
            tools=[_tool(i, description="d" * 300) for i in range(1024)],
            tool_choice="required",
        ),
    ],
    "a 10 MB schema": [
        _raw(_long_schema(10 << 20), 413, "send less"),
        _raw(_long_schema(3 << 20), REFUSED, "response_format.json_schema.schema"),
        _raw(_long_schema(240 << 10), EITHER, ""),
    ],
    "recursion": [
        _schema({"$ref": "#"}),
        _schema(_cycle(2)),
        _schema(_cycle(2000)),
        _schema(_doubling(40), 200),
        _schema(_deep(59), 200),
        _schema(_deep(100)),
        _schema(_deep(900)),
        _raw(lambda: _HEAD + _nested('{"items":', "}", 100_000, "{}") + "}}}", REFUSED, ""),
        _raw(lambda: '{"messages": ' + _nested("[", "]", 500_000, "") + "}", REFUSED, ""),
        _chat(200, tools=[_tool(1, parameters=_of_object(_deep(200)))], tool_choice="required"),
    ],
    "regexes that explode": [
        _bound("regex", "(a+)+b", 200, ""),
        _bound("regex", "(a|a)*(a|a)*(a|a)*b", 200, ""),
        _bound("regex", "((a{1,100}){1,100}){1,100}", 200, ""),
        _bound("regex", "a{1,1000000}", 200, ""),
        _bound("regex", "(.*a){100}.{100}", 200, ""),
        _bound("regex", r"(\p{L}{1,500}\p{N}){1,500}", 200, ""),
        _bound("regex", ".*a.{24}", 200, ""),
        _bound("regex", "(" * 5000 + "a" + ")" * 5000),
        _bound("regex", "|".join(f"(a{{{i}}}b)+" for i in range(1, 400)), 200, ""),
        _schema({"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$"}, 200),
    ],
    "grammars that explode": [
        _bound("grammar", 'start: start start | "a"', 200, ""),
        _bound(
            "grammar",
            "start: a\n"
            + "\n".join(
                f"{n}: {m} {m} {m}"
                for n, m in zip("abcdefghijklmnopqrst", "bcdefghijklmnopqrstu", strict=True)
            )
            + '\nu: "x" | ',
            200,
            "",
        ),
        _bound(
            "grammar",
            "start: "
            + " ".join(f"r{i}" for i in range(20_000))
            + "\n"
            + "\n".join(f'r{i}: "a"?' for i in range(20_000)),
        ),
        _bound("grammar", 'start: ("a"? ' * 4000 + ")" * 4000),
        _bound("grammar", 'start: (("a"~1..1000)~1..1000)~1..1000', 200, ""),
        _bound(
            "grammar",
            "start: A\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(60)) + '\nA60: "x"\nA: A0',
        ),
        _bound("grammar", "start: start"),
    ],
    "enum of 100,000": [
        _schema({"enum": [f"value {i}" for i in range(100_000)]}),
        _schema({"enum": list(range(30_000))}, EITHER),
        _bound("choice", [f"{i}" for i in range(100_000)]),
        _schema(
            {"type": "object", "properties": {"a": {"enum": [f"{i:05}" for i in range(20_000)]}}}, EITHER
        ),
    ],
    "wide schemas": [
        _schema({**_wide(2500), "additionalProperties": False}, EITHER),
        _schema({**_wide(200), "additionalProperties": False}, 200),
        _schema({"anyOf": [{**_wide(20), "required": [f"property_{i % 20}"]} for i in range(200)]}),
        _schema({"allOf": [{"properties": {f"p{i}": {"type": "string"}}} for i in range(500)]}),
        _schema({"patternProperties": {f"^(a|b)*{i}$": {"type": "null"} for i in range(200)}}, EITHER),
    ],
    "10,000 stop strings": [
        _chat(REFUSED, "stop", stop=[f"s{i}" for i in range(10_000)]),
        _chat(REFUSED, "stop", stop=["x" * 1_000_000]),
        _chat(REFUSED, "stop_token_ids", stop_token_ids=list(range(-5, 10_000))),
        _chat(REFUSED, "stop", stop=[""]),
    ],
    "templates' arguments": [
        _chat(REFUSED, "chat_template_kwargs", chat_template_kwargs={"messages": []}),
        _chat(REFUSED, "chat_template_kwargs", chat_template_kwargs={"tools": [1]}),
        _chat(REFUSED, "chat_template_kwargs", chat_template_kwargs=[1]),
        _chat(REFUSED, "chat_template_kwargs", chat_template_kwargs={"loops": "a"}),
        _chat(REFUSED, "", chat_template_kwargs={"size": 400_000_000}),
        _chat(REFUSED, "", chat_template_kwargs={"loops": 100_000}),
        _chat(200, chat_template_kwargs={"__class__": "a", "self": 1, "cycler": 2, "range": None}),
    ],
    "unbalanced calls from the model": [
        _chat(200, tools=[_tool(1)], max_tokens=300, structured_outputs={"regex": text})
        for text in (
            r"(<tool_call>){20}",
            r'<tool_call>\{"name": "f1", "arguments": (\{"a": ){60}',
            r"(</tool_call>){20}",
            r'<tool_call>\n(\[){100}\{"name": 3\}',
            r'(<tool_call>\{"name": "f1", "arguments": \{\}\}</tool_ca){5}',
        )
    ],
}
"""By name of the attack."""


def thrash() -> Iterator[Hostile]:
    """Schemas that nobody has asked for before, one after the other."""
    number = 0
    while True:
        number += 1
        yield _schema(
            {**_wide(30), "title": f"number {number}", "required": [f"property_{number % 30}"]}, 200
        )
