"""Calls that a request demands, and the schemas that bind them, as a description of the answer (`Structure`).

The frames are those of `parsing.formats`, written instead of read.  What an answer has before its calls or
its content (reasoning) is free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from baton.gateway.api.custom import INPUT
from baton.gateway.api.tools import Tools
from baton.gateway.errors import BadRequest
from baton.gateway.parsing.choice import Formats
from baton.gateway.parsing.frames import Think
from baton.gateway.reading.constraints.functions import Function
from baton.gateway.reading.constraints.template_calls import written
from baton.grammar.description import (
    AnyText,
    Choice,
    Content,
    Either,
    Ending,
    Json,
    Lark,
    Regex,
    Repeat,
    Structure,
    Tag,
    Tagged,
    Text,
    Until,
)
from baton.grammar.description import Sequence as Parts

_SPACES = Regex(r"[ \n]{0,4}")
_SAYS_NOTHING = frozenset({"type", "description", "title", "default", "examples", "$comment"})
"""Keywords that leave a text free."""


class Writing(NamedTuple):
    """How a format writes calls."""

    call: Callable[[Function], Content]
    before: str = ""
    """Before the first one; what tells that calls follow, where text may stand as well."""
    between: str = "\n"
    after: str = ""
    once: bool = False
    """No more than one call is possible."""


def structure_of(
    formats: Formats,
    tools: Tools,
    functions: Sequence[Function],
    *,
    parallel: bool,
    thinking: bool,
    content: Content | None = None,
    budget: int | None = None,
) -> Structure | None:
    """What the answer must be; None: whatever.  `functions`: the tools with the schemas that bind their
    arguments.  `content`: what binds an answer that calls nothing.  `thinking`: the answer begins inside of
    reasoning, which has `budget` tokens at most.  Raises `BadRequest` for schemas that this format cannot
    keep."""
    think = formats.thinking_in(thinking)
    if think is None and not formats.is_harmony:
        budget = None
    demanded = tools.demanded
    if not tools.wanted or not (demanded or tools.strict or tools.bound or content is not None):
        answer = content
    else:
        if tools.named:
            functions = [one for one in functions if one.name == tools.choice]
        answer = _answer(formats, functions, demanded, parallel and not tools.named, content)
    if answer is None:
        if budget is None:
            return None
        answer = _anything(formats)
    elif formats.is_harmony and answer is content:
        answer = Parts([Text("<|channel|>final<|message|>"), answer])
    if formats.is_harmony:
        return Structure(_after_analysis(answer, budget))
    return Structure(_after_thoughts(think, answer, thinking, budget))


def _answer(
    formats: Formats,
    functions: Sequence[Function],
    demanded: bool,
    parallel: bool,
    content: Content | None,
) -> Content:
    writing = _writing(formats)
    calls = Either([writing.call(one) for one in functions])
    several = Repeat(calls, separator=writing.between) if parallel and not writing.once else calls
    frame = Parts([Text(writing.before), several, Text(writing.after)])
    if demanded:
        return frame
    if formats.is_harmony:
        final: Content = AnyText() if content is None else content
        return Either([frame, Parts([Text("<|channel|>final<|message|>"), final])])
    if content is not None:
        return Either([frame, content])
    if writing.before:
        # (A trigger is one token where the model has it as one.)
        marks = [mark for mark in formats.markers if writing.before.startswith(mark)]
        trigger = max(marks, key=len, default=writing.before)
        return Tagged([Tag(writing.before, Parts([several, Text(writing.after)]))], [trigger])
    triggers = _TRIGGERS if formats.response is None else {formats.calls: _begin(formats).split("NAME")[0]}
    if formats.calls not in triggers:  # the answer's first character tells
        return Either([frame, Regex(r"([^\s{\[](.|\n)*)?")])
    trigger = triggers[formats.calls]
    return Tagged([_tag(trigger, writing.call(one)) for one in functions], [trigger])


def _writing(formats: Formats) -> Writing:
    """Raises `BadRequest` where a `response_template` says only how calls are read."""
    if formats.response is None:
        return _WRITING[formats.calls]
    found = written(formats.template)
    if found is None:
        raise BadRequest(
            "tools: this model's response_template tells how calls are read, not how they are written: they "
            "cannot be demanded, be strict, or stand beside response_format; start the server with "
            "--tool-call-parser NAME",
            param="tools",
            code="unsupported_parameter",
        )
    return Writing(_json(*found))


def _begin(formats: Formats) -> str:
    """What stands before a call, with `NAME` for its name."""
    found = written(formats.template)
    return "" if found is None else found[0]


def _tag(trigger: str, call: Content) -> Tag:
    """The call, which begins with the trigger."""
    if not isinstance(call, Parts) or not isinstance(call.parts[0], Text):
        raise TypeError("a call begins with a text")
    if not call.parts[0].text.startswith(trigger):
        raise ValueError(f"{call.parts[0].text!r} does not begin with {trigger!r}")
    return Tag(call.parts[0].text, Parts(call.parts[1:]))


# -- reasoning before it


def _anything(formats: Formats) -> Content:
    """What an unbound answer has after its thoughts: text, and the format's tokens."""
    opening = formats.thinking.open if formats.thinking is not None else "<|channel|>analysis"
    text = AnyText(without=opening)
    marks = sorted(formats.markers - {opening})
    return Parts([text, Repeat(Parts([Either([Text(mark) for mark in marks]), text]), least=0)])


def _after_thoughts(think: Think | None, answer: Content, thinking: bool, budget: int | None) -> Content:
    if think is None:
        return answer
    thoughts = Parts([_thoughts(think.close, budget), _SPACES, answer])
    return thoughts if thinking else Either([Parts([_SPACES, Text(think.open), thoughts]), answer])


def _after_analysis(answer: Content, budget: int | None) -> Content:
    thoughts = _thoughts("<|end|>", budget)
    analysis = Parts([Text("<|channel|>analysis<|message|>"), thoughts, Text("<|start|>assistant"), answer])
    return Either([analysis, answer])


def _thoughts(end: str, budget: int | None) -> Content:
    """With what ends them."""
    if budget is None:
        return _until(end, Text(""))
    return Until([Ending(Text(end), Text(""))], most_tokens=budget)


def _until(end: str, then: Content) -> Content:
    """Any text up to this, and what follows it."""
    return Tagged([Tag(end, then)], [end], at_least_one=True, stop_after_first=True)


# -- frames


def _json(begin: str, end: str) -> Callable[[Function], Content]:
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


Frame = Callable[[str, bool], tuple[str, str]]
"""What stands before and behind a parameter's value, by its key and whether it is a text."""


def _tags(begin: str, frame: Frame, end: str) -> Callable[[Function], Content]:
    def call(function: Function) -> Content:
        head = Text(begin.replace("NAME", function.name))
        return Parts([head, parameters(frame, function), Text(end)])

    return call


def parameters(frame: Frame, function: Function, *, bare: bool = False) -> Content:
    """Arguments as tags, in the order of the schema; `bare`: a line break may stand before one, none
    behind.  Raises `BadRequest`."""
    if function.grammar:
        before, behind = frame(INPUT, True)
        return Parts([Text(before), Lark(function.grammar, behind)])
    parts: list[Content] = []
    for key, schema, required in _properties(function):
        is_text = _is_text(schema)
        before, behind = frame(key, is_text)
        value = _tag_value(function, key, schema, is_text, behind.rstrip() if bare else behind)
        one = Parts([*([Regex("\n?")] if bare else []), Text(before), value])
        parts.append(one if required else Repeat(one, least=0, most=1))
    return Parts(parts)


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
    return _until(behind.strip(), Text(behind[len(behind.rstrip()) :]))


def _python(function: Function) -> Content:
    if function.grammar:
        return Parts([Text(f'{function.name}({INPUT}="'), Lark(function.grammar), Text('")')])
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


STYLES: dict[str, Frame] = {
    "qwen_xml": lambda key, _: (f"<parameter={key}>\n", "\n</parameter>\n"),
    "minimax_xml": lambda key, _: (f'<parameter name="{key}">', "</parameter>\n"),
    "deepseek_xml": lambda key, text: (
        f'<｜DSML｜parameter name="{key}" string="{"true" if text else "false"}">',
        "</｜DSML｜parameter>\n",
    ),
    "glm_xml": lambda key, _: (f"<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n"),
}
"""By xgrammar's names."""
_OBJECT = _json('{"name": "NAME", "arguments": ', "}")
_HERMES = Writing(_json('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>"))
_WRITING: dict[str, Writing] = {
    "hermes": _HERMES,
    "ernie45": _HERMES,
    "llama3_json": Writing(_json('{"name": "NAME", "parameters": ', "}"), between="; "),
    "mistral": Writing(_OBJECT, "[TOOL_CALLS][", ", ", "]"),
    "mistral_v11": Writing(_json("[TOOL_CALLS]NAME[ARGS]", ""), between=""),
    "deepseek_v3": Writing(
        _json("<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n", "\n```<｜tool▁call▁end｜>"),
        "<｜tool▁calls▁begin｜>",
        "\n",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": Writing(
        _json("<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        "<｜tool▁calls▁begin｜>",
        "",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v32": Writing(
        _tags(
            '<｜DSML｜invoke name="NAME">\n',
            STYLES["deepseek_xml"],
            "</｜DSML｜invoke>",
        ),
        "<｜DSML｜function_calls>\n",
        "\n",
        "\n</｜DSML｜function_calls>",
    ),
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
        _json("<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", ""), once=True
    ),
}
_TRIGGERS = {
    "hermes": "<tool_call>",
    "ernie45": "<tool_call>",
    "mistral_v11": "[TOOL_CALLS]",
    "qwen3_coder": "<tool_call>",
    "glm45": "<tool_call>",
}
"""Of formats that have nothing before all calls."""
