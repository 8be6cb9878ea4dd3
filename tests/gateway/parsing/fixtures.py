"""Answers of models in every format, made by combination, with what they mean."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from baton.gateway.parsing.deltas import Parsed
from baton.gateway.parsing.formats import CALLS, THINKS
from baton.gateway.parsing.frames import Calls, Think
from baton.gateway.parsing.parser import ResponseParser
from baton.gateway.parsing.tags import Types

ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"city": "Paris"},
    {"city": 'Say "hi"\\ to </b> the\tlast {one} [é😀]', "days": 3},
    {"text": "a\n\n  b\nc", "flag": True, "none": None},
    {"list": [1, -2.5, 1e3, [], {}], "deep": {"a": {"b": [{"c": "}]"}]}}},
]
TYPES: Types = {
    name: {
        "city": ("string",),
        "text": ("string",),
        "days": ("integer",),
        "flag": ("boolean",),
        "none": ("null", "string"),
        "list": ("array",),
        "deep": ("object",),
    }
    for name in ("weather", "get_time", "x")
}
CALLS_OF: list[list[tuple[str, dict[str, Any]]]] = [
    [("weather", ARGUMENTS[1])],
    [("get_time", ARGUMENTS[0])],
    [("weather", ARGUMENTS[2]), ("get_time", ARGUMENTS[3])],
    [("x", ARGUMENTS[4])],
]


@dataclass
class Answer:
    """A text, how it is to be read, and what it means (`content` None: the same however it is cut)."""

    text: str
    think: Think | None = None
    calls: Calls | None = None
    thinking: bool = False
    content: str | None = None
    reasoning: str = ""
    called: list[tuple[str, Any]] = field(default_factory=list)

    def parser(self, **options: Any) -> ResponseParser:
        return ResponseParser(
            self.think, self.calls, tools=TYPES, types=TYPES, thinking=self.thinking, **options
        )


def dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def framed(name: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """As models of this format write calls."""
    objects = [dump({"name": tool, "arguments": arguments}) for tool, arguments in calls]
    match name:
        case "hermes" | "ernie45":
            return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)
        case "qwen3_coder":
            return "\n".join(_coder(*call) for call in calls)
        case "mimo":
            return "\n".join(_coder(*call, line="") for call in calls)
        case "seed_oss":
            return "\n".join(_coder(*call, prefix="seed:") for call in calls)
        case "hy_v3":
            inner = "".join(
                f"<tool_call>{tool}<tool_sep>\n"
                + "".join(
                    f"<arg_key>{key}</arg_key>\n<arg_value>{_text(value)}</arg_value>\n"
                    for key, value in arguments.items()
                )
                + "</tool_call>\n"
                for tool, arguments in calls
            )
            return f"<tool_calls>\n{inner}</tool_calls>"
        case "step3":
            inner = "".join(
                f"<｜tool_call_begin｜>function<｜tool_sep｜>{inner}<｜tool_call_end｜>"
                for inner in (_invoke(*call, prefix="steptml:") for call in calls)
            )
            return f"<｜tool_calls_begin｜>{inner}<｜tool_calls_end｜>"
        case "kimi_k3":
            inner = "".join(_xtml(number, *call) for number, call in enumerate(calls, 1))
            return f"<|open|>tools<|sep|>{inner}<|close|>tools<|sep|>"
        case "glm45":
            return "\n".join(
                f"<tool_call>{tool}\n"
                + "".join(
                    f"<arg_key>{key}</arg_key>\n<arg_value>{_text(value)}</arg_value>\n"
                    for key, value in arguments.items()
                )
                + "</tool_call>"
                for tool, arguments in calls
            )
        case "minimax_m2":
            inner = "\n".join(_invoke(*call) for call in calls)
            return f"<minimax:tool_call>\n{inner}\n</minimax:tool_call>"
        case "llama3_json":
            return "; ".join(one.replace('"arguments"', '"parameters"', 1) for one in objects)
        case "mistral":
            return "[TOOL_CALLS][" + ", ".join(objects) + "]"
        case "mistral_v11":
            return "".join(f"[TOOL_CALLS]{tool}[ARGS]{dump(arguments)}" for tool, arguments in calls)
        case "deepseek_v3":
            return _deepseek(f"function<｜tool▁sep｜>{t}\n```json\n{dump(a)}\n```" for t, a in calls)
        case "deepseek_v31":
            return _deepseek(f"{t}<｜tool▁sep｜>{dump(a)}" for t, a in calls)
        case "deepseek_v32" | "deepseek_v4" | "deepseek_v41":
            outer = {"deepseek_v32": "function_calls", "deepseek_v4": "tool_calls"}.get(name, " calls")
            inner = "\n".join(_dsml(*call, space=" " * outer.startswith(" ")) for call in calls)
            return f"<｜DSML｜{outer}>\n{inner}\n</｜DSML｜{outer}>"
        case "xlam":
            return "[" + ", ".join(objects) + "]"
        case "granite-20b-fc":
            return "".join(f"<function_call> {one}" for one in objects)
        case "internlm":
            return "".join(f"<|action_start|><|plugin|>\n{one}\n<|action_end|>\n" for one in objects)
        case "longcat":
            return "\n".join(f"<longcat_tool_call>\n{one}\n</longcat_tool_call>" for one in objects)
        case "apertus":
            inner = ", ".join(dump({tool: arguments}) for tool, arguments in calls)
            return f"<|tools_prefix|>[{inner}]<|tools_suffix|>"
        case "olmo3":
            return "<function_calls>" + "\n".join(_python(*call) for call in calls) + "</function_calls>"
        case "lfm2":
            inner = ", ".join(_python(*call) for call in calls)
            return f"<|tool_call_start|>[{inner}]<|tool_call_end|>"
        case "gemma4":
            quote = '<|"|>'
            return "".join(f"<|tool_call>call:{t}{_loose(a, quote)}<tool_call|>" for t, a in calls)
        case "functiongemma":
            return "".join(
                f"<start_function_call>call:{t}{_loose(a, '<escape>')}<end_function_call>" for t, a in calls
            )
        case "kimi_k2":
            inner = "".join(
                f"<|tool_call_begin|>functions.{t}:{i}<|tool_call_argument_begin|>{dump(a)}<|tool_call_end|>"
                for i, (t, a) in enumerate(calls)
            )
            return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"
        case "granite":
            return "<|tool_call|>[" + ", ".join(objects) + "]"
        case "jamba":
            return "<tool_calls>[\n" + ",\n".join(objects) + "\n]</tool_calls>"
        case "phi4_mini_json":
            return "functools[" + ", ".join(objects) + "]"
        case "pythonic":
            return "[" + ", ".join(_python(*call) for call in calls) + "]"
        case "openai":
            return "".join(
                f"<|channel|>commentary to=functions.{tool} <|constrain|>json<|message|>{dump(arguments)}"
                + "<|call|>"
                + ("<|start|>assistant" if number + 1 < len(calls) else "")
                for number, (tool, arguments) in enumerate(calls)
            )
    raise KeyError(name)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else dump(value)


def _coder(tool: str, arguments: dict[str, Any], line: str = "\n", prefix: str = "") -> str:
    inner = "".join(
        f"<parameter={key}>{line}{_text(value)}{line}</parameter>\n" for key, value in arguments.items()
    )
    return f"<{prefix}tool_call>\n<function={tool}>\n{inner}</function>\n</{prefix}tool_call>"


def _invoke(tool: str, arguments: dict[str, Any], prefix: str = "") -> str:
    inner = "".join(
        f'<{prefix}parameter name="{key}">{_text(value)}</{prefix}parameter>\n'
        for key, value in arguments.items()
    )
    return f'<{prefix}invoke name="{tool}">\n{inner}</{prefix}invoke>'


def _dsml(tool: str, arguments: dict[str, Any], space: str = "") -> str:
    mark = f"｜DSML｜{space}"
    inner = "".join(
        f'<{mark}parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">'
        f"{_text(value)}</{mark}parameter>\n"
        for key, value in arguments.items()
    )
    return f'<{mark}invoke name="{tool}">\n{inner}</{mark}invoke>'


_JSON_TYPES = {str: "string", bool: "boolean", type(None): "null", list: "array", dict: "object"}


def _xtml(number: int, tool: str, arguments: dict[str, Any]) -> str:
    inner = "".join(
        f'<|open|>argument key="{key}" type="{_JSON_TYPES.get(type(value), "number")}"<|sep|>'
        f"{_text(value)}<|close|>argument<|sep|>"
        for key, value in arguments.items()
    )
    return f'<|open|>call tool="{tool}" index="{number}"<|sep|>{inner}<|close|>call<|sep|>'


def _python(tool: str, arguments: dict[str, Any]) -> str:
    return f"{tool}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def _loose(value: Any, quote: str) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_loose(one, quote)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_loose(one, quote) for one in value) + "]"
    return f"{quote}{value}{quote}" if isinstance(value, str) else dump(value)


def _deepseek(calls: Iterator[str]) -> str:
    inner = "\n".join(f"<｜tool▁call▁begin｜>{one}<｜tool▁call▁end｜>" for one in calls)
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def answers() -> list[Answer]:
    """Well-formed ones: every format × calls × text before × reasoning."""
    found: list[Answer] = []
    for name, calls in CALLS.items():
        if calls.harmony:
            found += _harmony(calls)
            continue
        leading = name in ("llama3_json", "pythonic", "xlam")
        befores = [""] if leading else ["", "I look.", "1 < 2\n\n"]
        for several, before in itertools.product(CALLS_OF, befores):
            for think, thought in ((None, ""), (THINKS["qwen3"], "hm\n\n<tool> 😀")):
                opened = bool(thought and len(found) % 2)
                start = "" if not thought else ("" if opened else "<think>") + f"\n{thought}\n</think>\n\n"
                text = start + before + framed(name, several)
                found.append(Answer(text, think, calls, opened, before.rstrip(), thought, several))
        for text in ("", "Hello", " Hello\n\nworld \n", "a <b> [c] {d} <｜ é\n\n"):
            found.append(Answer(text, THINKS["qwen3"], calls, content=text))
    return found


def _harmony(calls: Calls) -> list[Answer]:
    found = [
        Answer("<|channel|>final<|message|>Hello", None, calls, content="Hello"),
        Answer("Hello", None, calls, content="Hello"),
        Answer(
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
            None,
            calls,
            content="Yes.",
            reasoning="hm",
        ),
    ]
    for several in CALLS_OF:
        start = "<|channel|>analysis<|message|>I call.<|end|><|start|>assistant"
        found.append(Answer(start + framed("openai", several), None, calls, False, "", "I call.", several))
    return found


def broken(seed: int = 7, per: int = 3) -> list[Answer]:
    """The same cut off, with characters lost, doubled, or put in, and regions in the wrong order."""
    rng = random.Random(seed)
    found: list[Answer] = []
    for answer in answers():
        text = answer.text
        for _ in range(per if len(text) > 8 else 0):
            place = rng.randrange(len(text))
            length = rng.choice((1, 1, 2, 9))
            change = rng.choice(("cut", "lose", "double", "junk", "swap"))
            match change:
                case "cut":
                    new = text[:place]
                case "lose":
                    new = text[:place] + text[place + length :]
                case "double":
                    new = text[: place + length] + text[place:]
                case "junk":
                    junk = rng.choice(
                        ('"', "}", "{", "</tool_call>", "<tool_call>", "<think>", "</think>", "\\", "'")
                    )
                    new = text[:place] + junk + text[place:]
                case _:
                    new = text[place:] + text[:place]
            found.append(Answer(new, answer.think, answer.calls, answer.thinking))
    return found


def read(answer: Answer, pieces: list[str], **options: Any) -> Parsed:
    parser = answer.parser(**options)
    parsed = Parsed()
    for piece in pieces:
        parsed.add(parser.push(piece))
    parsed.add(parser.finish())
    return parsed


def meaning(parsed: Parsed) -> tuple[str, str, list[tuple[str, str, str | None]]]:
    return (
        "".join(parsed.content),
        "".join(parsed.reasoning),
        [(one.name, "".join(one.arguments), one.id) for one in parsed.calls],
    )
