"""The formats of models, by vLLM's names of parsers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from baton.gateway.parsing.frames import (
    Calls,
    JsonFrame,
    LeadingJson,
    LeadingPython,
    LooseFrame,
    NamedFrame,
    PythonFrame,
    TaggedFrame,
    Think,
)

_HERMES = JsonFrame(open=("<tool_call>",), close="</tool_call>")
_CODER = TaggedFrame(
    open=("<tool_call>", "<function="),
    head="<function=",
    name_end=(">",),
    key="<parameter=",
    key_end=">",
    value_end="</parameter>",
    foot="</function>",
    close="</tool_call>",
)
_GLM = TaggedFrame(
    open=("<tool_call>",),
    name_end=("\n", "<arg_key>", "</tool_call>"),
    key="<arg_key>",
    key_end="</arg_key>",
    value="<arg_value>",
    value_end="</arg_value>",
    close="</tool_call>",
    lines=False,
)
_HUNYUAN = replace(_GLM, name_end=("<tool_sep>",), outer="</tool_calls>")
_MINIMAX = TaggedFrame(
    open=("<invoke name=",),
    name_end=(">",),
    key="<parameter name=",
    key_end=">",
    value_end="</parameter>",
    foot="</invoke>",
    outer="</minimax:tool_call>",
    lines=False,
)
_STEP = TaggedFrame(
    open=("<steptml:invoke name=",),
    name_end=(">",),
    key="<steptml:parameter name=",
    key_end=">",
    value_end="</steptml:parameter>",
    foot="</steptml:invoke>",
    close="<｜tool_call_end｜>",
    outer="<｜tool_calls_end｜>",
    lines=False,
)
_XTML = TaggedFrame(
    open=("<|open|>call ",),
    name_end=("<|sep|>",),
    name_pattern=r'(?:.*\s)?tool="(?P<name>[^"]+)".*',
    key="<|open|>argument ",
    key_end="<|sep|>",
    key_pattern=r'(?:(?:key="(?P<key>[^"]*)"|type="(?P<type>[^"]*)"|\w+="[^"]*")\s*)+',
    value_end="<|close|>argument<|sep|>",
    foot="<|close|>call<|sep|>",
    outer="<|close|>tools<|sep|>",
    lines=False,
    escapes=True,
)


def _dsml(outer: str, space: str = "", *others: str) -> Calls:
    """DeepSeek's tags; `space` after their prefix, `others`: more ways to write the outer one."""
    mark = f"｜DSML｜{space}"
    frame = TaggedFrame(
        open=(f"<{mark}invoke name=",),
        name_end=(">",),
        key=f"<{mark}parameter name=",
        key_end=">",
        key_pattern=r'\s*"(?P<key>[^"]+)"(?:\s+string="(?P<string>[^"]*)")?\s*',
        value_end=f"</{mark}parameter>",
        foot=f"</{mark}invoke>",
        outer=f"</{mark}{outer}>",
        lines=False,
    )
    return Calls((frame,), dropped=(f"<{mark}{outer}>", *(f"<{mark}{one}>" for one in others), frame.outer))


_DEEPSEEK_OUTER = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_MISTRAL = NamedFrame(
    open=("[TOOL_CALLS]",),
    ends=("[ARGS]", "[CALL_ID]"),
    skips=(("[CALL_ID]", "[ARGS]"),),
    or_json=True,
)
_STEP_OUTER = ("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>function<｜tool_sep｜>")
_XTML_OUTER = (
    *(f"<|open|>{one}<|sep|>" for one in ("tools", "response")),
    *(f"<|close|>{one}<|sep|>" for one in ("tools", "response", "message")),
)

CALLS: dict[str, Calls] = {
    "hermes": Calls((_HERMES,)),
    "ernie45": Calls((_HERMES,), dropped=("<response>", "</response>")),
    "qwen3_coder": Calls((_CODER,)),
    "mimo": Calls((replace(_CODER, lines=False),)),
    "seed_oss": Calls(
        (replace(_CODER, open=("<seed:tool_call>", "<function="), close="</seed:tool_call>"),),
    ),
    "glm45": Calls((_GLM,)),
    "hy_v3": Calls((_HUNYUAN,), dropped=("<tool_calls>", "</tool_calls>")),
    "minimax_m2": Calls((_MINIMAX,), dropped=("<minimax:tool_call>", "</minimax:tool_call>")),
    "step3": Calls((_STEP,), dropped=(*_STEP_OUTER, "<｜tool_call_end｜>", "<｜tool_calls_end｜>")),
    "llama3_json": Calls((LeadingJson(open=("<|python_tag|>",)),)),
    "xlam": Calls(
        (
            LeadingJson(open=(), listed=True),
            JsonFrame(open=("<tool_call>",), close="</tool_call>", known=True),
            JsonFrame(open=("[TOOL_CALLS]",), known=True),
            JsonFrame(open=("```json",), close="```", known=True),
        )
    ),
    "mistral": Calls((_MISTRAL,), short_ids=True),
    "mistral_v11": Calls((_MISTRAL,), short_ids=True),
    "deepseek_v3": Calls(
        (
            NamedFrame(
                open=("<｜tool▁call▁begin｜>",),
                before="<｜tool▁sep｜>",
                ends=("\n```json\n", "```json"),
                close="\n```<｜tool▁call▁end｜>",
            ),
        ),
        dropped=_DEEPSEEK_OUTER,
    ),
    "deepseek_v31": Calls(
        (NamedFrame(open=("<｜tool▁call▁begin｜>",), ends=("<｜tool▁sep｜>",), close="<｜tool▁call▁end｜>"),),
        dropped=_DEEPSEEK_OUTER,
    ),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls", "", "toolcalls", "tool"),
    "deepseek_v41": _dsml("calls", " "),
    "kimi_k2": Calls(
        (
            NamedFrame(
                open=("<|tool_call_begin|>",),
                ends=("<|tool_call_argument_begin|>",),
                pattern=r"(?P<id>(?:functions\.)?(?P<name>[^\s{}\"']+?)(?::\d+)?)",
                close="<|tool_call_end|>",
            ),
        ),
        dropped=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    "kimi_k3": Calls((_XTML,), dropped=_XTML_OUTER),
    "granite": Calls((JsonFrame(open=("<|tool_call|>", "<tool_call>")),)),
    "granite-20b-fc": Calls((JsonFrame(open=("<function_call>",)),)),
    "jamba": Calls((JsonFrame(open=("<tool_calls>",), close="</tool_calls>"),)),
    "internlm": Calls((JsonFrame(open=("<|action_start|><|plugin|>",), close="<|action_end|>"),)),
    "longcat": Calls((JsonFrame(open=("<longcat_tool_call>",), close="</longcat_tool_call>"),)),
    "apertus": Calls((JsonFrame(open=("<|tools_prefix|>",), close="<|tools_suffix|>", keyed=True),)),
    "phi4_mini_json": Calls((JsonFrame(open=("functools",)),)),
    "pythonic": Calls((LeadingPython(open=("<|python_start|>",)),), dropped=("<|python_end|>",)),
    "olmo3": Calls((PythonFrame(open=("<function_calls>",), close="</function_calls>", lines=True),)),
    "lfm2": Calls((PythonFrame(open=("<|tool_call_start|>",), close="<|tool_call_end|>"),)),
    "gemma4": Calls(
        (LooseFrame(open=("<|tool_call>",), close="<tool_call|>", before="call:", quote='<|"|>'),),
    ),
    "functiongemma": Calls(
        (
            LooseFrame(
                open=("<start_function_call>",),
                close="<end_function_call>",
                before="call:",
                quote="<escape>",
            ),
        ),
    ),
    "openai": Calls(harmony=True),
}
CALL_NAMES = {
    **{name: name for name in CALLS},
    "qwen3_xml": "qwen3_coder",
    "step3p5": "qwen3_coder",
    "step5": "qwen3_coder",
    "qwen": "hermes",
    "qwen3_json": "hermes",
    "granite4": "hermes",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "hunyuan_a13b": "jamba",
    "glm47": "glm45",
    "ling3": "glm45",
    "gpt_oss": "openai",
    "harmony": "openai",
}
"""Name of a flag's value → that of the format."""
UNREAD_CALLS = {
    "beam": "hf",
    "cohere_command3": "granite",
    "cohere_command4": "granite",
    "dots": "minimax_m2",
    "gigachat3": "granite",
    "hy_v4": "hy_v3",
    "inkling": "hf",
    "k2_horizon": "glm45",
    "minicpm5": "qwen3_coder",
    "minimax_m3": "minimax_m2",
    "muse": "minimax_m2",
    "muse_glimmer": "minimax_m2",
    "musespark1x": "minimax_m2",
    "plamo3": "kimi_k2",
    "poolside_v1": "glm45",
}
"""vLLM's names of formats that are not read here → the one that is nearest."""

_TAGS = Think(open="<think>", close="</think>")
THINKS: dict[str, Think | None] = {
    "qwen3": _TAGS,
    "deepseek_r1": replace(_TAGS, from_start=True),
    "kimi_k2": replace(_TAGS, ends_at_call=True),
    "kimi_k3": Think(open="<|open|>think<|sep|>", close="<|close|>think<|sep|>"),
    "hunyuan_a13b": replace(_TAGS, dropped=("<answer>", "</answer>")),
    "minimax_m3": Think(open="<mm:think>", close="</mm:think>"),
    "mistral": Think(open="[THINK]", close="[/THINK]"),
    "seed_oss": Think(open="<seed:think>", close="</seed:think>"),
    "gemma4": Think(open="<|channel>thought", close="<channel|>"),
    "granite": Think(
        open="Here is my thought process:",
        close="Here is my response:",
        also=(("Here's my thought process:", "Here's my response:"),),
    ),
    "openai_gptoss": None,
}
"""None: harmony, which has it in its channels."""
THINK_NAMES = {
    **{name: name for name in THINKS},
    "deepseek_v3": "qwen3",
    "deepseek_v4": "deepseek_r1",
    "deepseek_v41": "deepseek_r1",
    "ernie45": "qwen3",
    "glm45": "qwen3",
    "glm47": "qwen3",
    "granite_thinking_parser": "qwen3",
    "holo2": "qwen3",
    "hy_v3": "qwen3",
    "ling3": "qwen3",
    "mimo": "qwen3",
    "olmo3": "qwen3",
    "minimax_m2": "deepseek_r1",
    "nemotron_v3": "deepseek_r1",
    "step3": "deepseek_r1",
    "step3p5": "deepseek_r1",
    "step5": "deepseek_r1",
    "gpt_oss": "openai_gptoss",
    "harmony": "openai_gptoss",
}
"""Name of a flag's value → that of the format."""
UNREAD_THINKS = {
    "beam": "hf",
    "cohere_command3": "qwen3",
    "cohere_command4": "qwen3",
    "hy_v4": "hy_v3",
    "inkling": "hf",
    "k2_horizon": "qwen3",
    "minicpmv": "qwen3",
    "minimax_m2_append_think": "minimax_m2",
    "muse": "hf",
    "muse_glimmer": "hf",
    "musespark1x": "hf",
    "plamo3": "qwen3",
    "poolside_v1": "qwen3",
}
"""vLLM's names of formats that are not read here → the one that is nearest."""


def _markers() -> frozenset[str]:
    marks = {mark for think in THINKS.values() if think is not None for mark in think.words}
    for calls in CALLS.values():
        marks |= calls.words
    return frozenset(marks)


MARKERS = _markers()
"""Tags of all formats."""


def check_call_name(name: str) -> None:
    """Checks a value of `--tool-call-parser`.  Raises `ValueError` with what to give."""
    _check(name, CALL_NAMES, UNREAD_CALLS)


def check_think_name(name: str) -> None:
    """Checks a value of `--reasoning-parser`.  Raises `ValueError` with what to give."""
    _check(name, THINK_NAMES, UNREAD_THINKS)


def _check(name: str, read: Mapping[str, str], unread: Mapping[str, str]) -> None:
    known = ("auto", "none", "hf", *read)
    if name in unread:
        raise ValueError(f"the format {name!r} is not read here; the one that is nearest is {unread[name]!r}")
    if name not in known:
        raise ValueError(f"give one of {', '.join(known)}")
