"""How each format writes calls, as descriptions of what may be written: the frames of `parsing.formats`,
written instead of read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from baton.gateway.api.custom import INPUT
from baton.gateway.errors import BadRequest
from baton.gateway.parsing.python_calls import KEY
from baton.gateway.reading.constraints.functions import Function
from baton.grammar.description import (
    Choice,
    Content,
    Either,
    Json,
    Lark,
    Regex,
    Repeat,
    Tag,
    Tagged,
    Text,
)
from baton.grammar.description import Sequence as Parts

_SAYS_NOTHING = frozenset({"type", "description", "title", "default", "examples", "$comment"})
"""Keywords that leave a text free."""
_TAG_KEY = re.compile(r"[^<>\"'\s](?:[^<>\"'\n]{0,198}[^<>\"'\s])?")
"""Names of parameters that tags can hold."""


class Writing(NamedTuple):
    """How a format writes calls."""

    call: Callable[[Function], Content]
    before: str = ""
    """Before the first one; what tells that calls follow, where text may stand as well."""
    between: str = "\n"
    after: str = ""
    once: bool = False
    """No more than one call is possible."""


def until(end: str, then: Content) -> Content:
    """Any text up to this, and what follows it."""
    return Tagged([Tag(end, then)], [end], at_least_one=True, stop_after_first=True)


def json_call(begin: str, end: str) -> Callable[[Function], Content]:
    """`NAME` in them stands for the name."""

    def call(function: Function) -> Content:
        return Parts([Text(begin.replace("NAME", function.name)), *function.arguments, Text(end)])

    return call


def _kimi(function: Function) -> Content:
    return Parts(
        [
            Text(f"<|tool_call_begin|>functions.{function.name}:"),
            Regex("[0-9]{1,3}"),
            Text("<|tool_call_argument_begin|>"),
            *function.arguments,
            Text("<|tool_call_end|>"),
        ]
    )


Frame = Callable[[str, str], tuple[str, str]]
"""What stands before and behind a parameter's value, by its key and its type (`string`: a text)."""


def _tags(begin: str, frame: Frame, end: str) -> Callable[[Function], Content]:
    def call(function: Function) -> Content:
        head = Text(begin.replace("NAME", function.name))
        return Parts([head, parameters(frame, function), Text(end)])

    return call


def parameters(frame: Frame, function: Function, *, bare: bool = False) -> Content:
    """Arguments as tags, in the order of the schema; `bare`: a line break may stand before one, none
    behind.  Raises `BadRequest`."""
    if function.grammar:
        before, behind = frame(INPUT, "string")
        return Parts([Text(before), Lark(function.grammar, behind)])
    parts: list[Content] = []
    for key, schema, required in _properties(function):
        _check_key(function, key, _TAG_KEY)
        is_text = _is_text(schema)
        before, behind = frame(key, "string" if is_text else _type(schema))
        value = _tag_value(function, key, schema, is_text, behind.rstrip() if bare else behind)
        one = Parts([*([Regex("\n?")] if bare else []), Text(before), value])
        parts.append(one if required else Repeat(one, least=0, most=1))
    return Parts(parts)


def _check_key(function: Function, key: str, pattern: re.Pattern[str]) -> None:
    """The parser is to read what is written here.  Raises `BadRequest`."""
    if not key or pattern.fullmatch(key) is None:
        raise BadRequest(
            f"tools: the name of the parameter {key[:100]!r} of {function.name!r} cannot be written in the "
            "format in which this model calls; give it another one",
            param="tools",
        )


def _tag_value(function: Function, key: str, schema: Any, is_text: bool, behind: str) -> Content:
    """With what stands behind it."""
    if not is_text:
        return Parts([Json(_with_definitions(function, schema)), Text(behind)])
    if isinstance(schema.get("enum"), list):
        return Parts([Choice([str(one) for one in schema["enum"]]), Text(behind)])
    if isinstance(schema.get("const"), str):
        return Parts([Text(schema["const"]), Text(behind)])
    unkept = next((keyword for keyword in schema if keyword not in _SAYS_NOTHING), None)
    if unkept is not None:
        raise BadRequest(
            f"tools: {unkept!r} of the parameter {key!r} of {function.name!r} cannot be kept in the format "
            "in which this model calls; leave it out",
            param="tools",
        )
    # (A line break before the end is not part of it for the parser, and may stand.)
    return until(behind.strip(), Text(behind[len(behind.rstrip()) :]))


def _python(function: Function) -> Content:
    if function.grammar:
        return Parts([Text(f'{function.name}({INPUT}="'), Lark(function.grammar), Text('")')])
    for key, _, _ in _properties(function):
        _check_key(function, key, KEY)
    listed = [
        (Parts([Text(f"{key}="), Json(_with_definitions(function, schema))]), required)
        for key, schema, required in _properties(function)
    ]
    required = [one for one, must in listed if must]
    content = _optional([one for one, must in listed if not must], begun=bool(required))
    parts: list[Content] = []
    for one in required:
        parts += [Text(", "), one] if parts else [one]
    return Parts([Text(f"{function.name}("), *parts, content, Text(")")])


def _optional(parts: Sequence[Content], *, begun: bool) -> Content:
    """Any of these, in this order, with commas between them."""
    if not parts:
        return Text("")
    one = Parts([Text(", "), parts[0]]) if begun else parts[0]
    return Either([Parts([one, _optional(parts[1:], begun=True)]), _optional(parts[1:], begun=begun)])


def _properties(function: Function) -> list[tuple[str, Any, bool]]:
    """(key, schema, whether it must be there)."""
    properties = function.schema.get("properties")
    required = function.schema.get("required")
    must = set(required) if isinstance(required, list) else set[Any]()
    return [
        (str(key), schema, key in must)
        for key, schema in (properties.items() if isinstance(properties, Mapping) else ())
    ]


def _is_text(schema: Any) -> bool:
    return not isinstance(schema, Mapping) or schema.get("type") == "string"


def _with_definitions(function: Function, schema: Any) -> Any:
    """References in it lead to definitions at the root."""
    there = {name: function.schema[name] for name in ("$defs", "definitions") if name in function.schema}
    return {**there, **schema} if there and isinstance(schema, Mapping) else schema


def _type(schema: Any) -> str:
    """Of a parameter that is no text."""
    declared = schema.get("type") if isinstance(schema, Mapping) else None
    if not isinstance(declared, str):
        return "object"
    return "number" if declared == "integer" else declared


def _dsml(key: str, kind: str, space: str = "") -> tuple[str, str]:
    text = "true" if kind == "string" else "false"
    return f'<｜DSML｜{space}parameter name="{key}" string="{text}">', f"</｜DSML｜{space}parameter>\n"


def _xtml(key: str, kind: str) -> tuple[str, str]:
    key = key.replace("&", "&amp;")
    return f'<|open|>argument key="{key}" type="{kind}"<|sep|>', "<|close|>argument<|sep|>"


def _numbered(function: Function) -> Content:
    head = Parts(
        [Text(f'<|open|>call tool="{function.name}" index="'), Regex("[1-9][0-9]{0,2}"), Text('"<|sep|>')]
    )
    return Parts([head, parameters(_xtml, function), Text("<|close|>call<|sep|>")])


STYLES: dict[str, Frame] = {
    "qwen_xml": lambda key, _: (f"<parameter={key}>\n", "\n</parameter>\n"),
    "minimax_xml": lambda key, _: (f'<parameter name="{key}">', "</parameter>\n"),
    "deepseek_xml": lambda key, kind: _dsml(key, kind),
    "glm_xml": lambda key, _: (f"<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n"),
}
"""By xgrammar's names."""


def _dsml_calls(outer: str, space: str = "") -> Writing:
    mark = f"｜DSML｜{space}"
    call = _tags(
        f'<{mark}invoke name="NAME">\n', lambda key, kind: _dsml(key, kind, space), f"</{mark}invoke>"
    )
    return Writing(call, f"<{mark}{outer}>\n", "\n", f"\n</{mark}{outer}>")


_OBJECT = json_call('{"name": "NAME", "arguments": ', "}")
_HERMES = Writing(json_call('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>"))
WRITING: dict[str, Writing] = {
    "hermes": _HERMES,
    "ernie45": _HERMES,
    "llama3_json": Writing(json_call('{"name": "NAME", "parameters": ', "}"), between="; "),
    "mistral": Writing(_OBJECT, "[TOOL_CALLS][", ", ", "]"),
    "mistral_v11": Writing(json_call("[TOOL_CALLS]NAME[ARGS]", ""), between=""),
    "deepseek_v3": Writing(
        json_call("<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n", "\n```<｜tool▁call▁end｜>"),
        "<｜tool▁calls▁begin｜>",
        "\n",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": Writing(
        json_call("<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        "<｜tool▁calls▁begin｜>",
        "",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v32": _dsml_calls("function_calls"),
    "deepseek_v4": _dsml_calls("tool_calls"),
    "deepseek_v41": _dsml_calls("calls", " "),
    "kimi_k3": Writing(_numbered, "<|open|>tools<|sep|>", "", "<|close|>tools<|sep|>"),
    "mimo": Writing(
        _tags(
            "<tool_call>\n<function=NAME>\n",
            lambda key, _: (f"<parameter={key}>", "</parameter>\n"),
            "</function>\n</tool_call>",
        )
    ),
    "seed_oss": Writing(
        _tags("<seed:tool_call>\n<function=NAME>\n", STYLES["qwen_xml"], "</function>\n</seed:tool_call>")
    ),
    "hy_v3": Writing(
        _tags("<tool_call>NAME<tool_sep>\n", STYLES["glm_xml"], "</tool_call>"),
        "<tool_calls>\n",
        "\n",
        "\n</tool_calls>",
    ),
    "step3": Writing(
        _tags(
            '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="NAME">\n',
            lambda key, _: (f'<steptml:parameter name="{key}">', "</steptml:parameter>\n"),
            "</steptml:invoke><｜tool_call_end｜>",
        ),
        "<｜tool_calls_begin｜>",
        "",
        "<｜tool_calls_end｜>",
    ),
    "xlam": Writing(_OBJECT, "[", ", ", "]"),
    "granite-20b-fc": Writing(json_call('<function_call> {"name": "NAME", "arguments": ', "}")),
    "internlm": Writing(
        json_call('<|action_start|><|plugin|>\n{"name": "NAME", "parameters": ', "}<|action_end|>")
    ),
    "longcat": Writing(
        json_call('<longcat_tool_call>\n{"name": "NAME", "arguments": ', "}\n</longcat_tool_call>")
    ),
    "apertus": Writing(json_call('{"NAME": ', "}"), "<|tools_prefix|>[", ", ", "]<|tools_suffix|>"),
    "olmo3": Writing(_python, "<function_calls>", "\n", "</function_calls>"),
    "lfm2": Writing(_python, "<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
    "gemma4": Writing(json_call("<|tool_call>call:NAME", "<tool_call|>"), between=""),
    "functiongemma": Writing(json_call("<start_function_call>call:NAME", "<end_function_call>"), between=""),
    "kimi_k2": Writing(_kimi, "<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
    "qwen3_coder": Writing(
        _tags(
            "<tool_call>\n<function=NAME>\n",
            STYLES["qwen_xml"],
            "</function>\n</tool_call>",
        )
    ),
    "glm45": Writing(
        _tags(
            "<tool_call>NAME\n",
            STYLES["glm_xml"],
            "</tool_call>",
        )
    ),
    "minimax_m2": Writing(
        _tags(
            '<invoke name="NAME">\n',
            STYLES["minimax_xml"],
            "</invoke>",
        ),
        "<minimax:tool_call>\n",
        "\n",
        "\n</minimax:tool_call>",
    ),
    "granite": Writing(_OBJECT, "<|tool_call|>[", ", ", "]"),
    "jamba": Writing(_OBJECT, "<tool_calls>[", ", ", "]</tool_calls>"),
    "phi4_mini_json": Writing(_OBJECT, "functools[", ", ", "]"),
    "pythonic": Writing(_python, "[", ", ", "]"),
    "openai": Writing(
        json_call("<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", ""), once=True
    ),
}
TRIGGERS = {
    "hermes": "<tool_call>",
    "ernie45": "<tool_call>",
    "mistral_v11": "[TOOL_CALLS]",
    "qwen3_coder": "<tool_call>",
    "glm45": "<tool_call>",
    "mimo": "<tool_call>",
    "seed_oss": "<seed:tool_call>",
    "granite-20b-fc": "<function_call>",
    "internlm": "<|action_start|>",
    "longcat": "<longcat_tool_call>",
    "gemma4": "<|tool_call>",
    "functiongemma": "<start_function_call>",
}
"""Of formats that have nothing before all calls."""
