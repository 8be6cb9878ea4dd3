"""How models frame reasoning and calls, as data.  Names are those of vLLM's parsers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Think:
    """A region of reasoning before the answer."""

    open: str
    close: str
    from_start: bool = False
    """An answer begins with reasoning even where neither the prompt nor the model opens it."""
    ends_at_call: bool = False
    """A call ends it too."""


@dataclass(frozen=True, kw_only=True)
class Frame:
    """What all frames of calls have."""

    open: tuple[str, ...]
    """A call begins at one of these."""
    close: str = ""
    """What follows it."""

    @property
    def words(self) -> set[str]:
        """Its markers, as they may be tokens."""
        texts = {*self.open, self.close.strip().removeprefix("```")}
        if isinstance(self, NamedFrame):
            texts |= {self.before, *self.ends}
        if isinstance(self, TaggedFrame):
            texts |= {self.head, self.key, self.key_end, self.value, self.value_end, self.foot}
        return {text for text in texts if text}


@dataclass(frozen=True, kw_only=True)
class JsonFrame(Frame):
    """`{"name": …, "arguments": {…}}`, or a list of such."""


@dataclass(frozen=True, kw_only=True)
class NamedFrame(Frame):
    """The name as it is, then the arguments as a JSON object."""

    before: str = ""
    """The name follows this; what stands before is of no interest."""
    ends: tuple[str, ...]
    """The name ends at one of these, or at the first `{`."""
    pattern: str = r"(?P<name>[^\s{}\"']+)"
    """What stands there as name, as a whole; `id`, if there is such a group, names the call."""
    skips: tuple[tuple[str, str], ...] = ()
    """(marker that ends the name, what ends the text after it): that text is of no interest."""
    or_json: bool = False
    """Or what a `JsonFrame` has."""


@dataclass(frozen=True, kw_only=True)
class TaggedFrame(Frame):
    """A tag for each argument, with its value as text: JSON is made of it by the tool's schema."""

    head: str = ""
    """Before the name."""
    name_end: tuple[str, ...]
    """After the name; those that begin a parameter or end the call are not part of it."""
    key: str
    """Before a parameter's key."""
    key_end: str
    value: str = ""
    """Between key and value, after spaces."""
    value_end: str
    stray_ends: tuple[str, ...] = ()
    """What ends a value whose own end was forgotten; not part of it."""
    foot: str = ""
    """After the last parameter."""
    typed: bool = False
    """After the key follows `true">` for a text, `false">` for JSON."""
    lines: bool = True
    """A line break at each end of a value is not part of it."""


@dataclass(frozen=True, kw_only=True)
class LeadingJson(Frame):
    """An answer that is a call from its first character: `{"name": …, "parameters": {…}}`, or several,
    between them `;`.  The name must be one of the request's tools."""


@dataclass(frozen=True, kw_only=True)
class LeadingPython(Frame):
    """The same as Python's calls: `[f(a=1), g(b="x")]`."""


@dataclass(frozen=True)
class Calls:
    """A format of calls."""

    frames: tuple[Frame, ...] = ()
    dropped: tuple[str, ...] = ()
    """Around calls, and of no interest themselves."""
    harmony: bool = False
    """gpt-oss: messages on channels; reasoning too."""
    short_ids: bool = False
    """Ids of calls have nine letters and digits."""


_HERMES = JsonFrame(open=("<tool_call>",), close="</tool_call>")
_CODER = TaggedFrame(
    open=("<tool_call>", "<function="),
    head="<function=",
    name_end=(">",),
    key="<parameter=",
    key_end=">",
    value_end="</parameter>",
    stray_ends=("\n<parameter=", "\n</function>"),
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
_MINIMAX = TaggedFrame(
    open=('<invoke name="',),
    name_end=('">',),
    key='<parameter name="',
    key_end='">',
    value_end="</parameter>",
    foot="</invoke>",
)
_DSML = TaggedFrame(
    open=('<｜DSML｜invoke name="',),
    name_end=('">',),
    key='<｜DSML｜parameter name="',
    key_end='" string="',
    value_end="</｜DSML｜parameter>",
    foot="</｜DSML｜invoke>",
    typed=True,
    lines=False,
)
_DEEPSEEK_OUTER = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_MISTRAL = NamedFrame(
    open=("[TOOL_CALLS]",),
    ends=("[ARGS]", "[CALL_ID]"),
    skips=(("[CALL_ID]", "[ARGS]"),),
    or_json=True,
)

CALLS: dict[str, Calls] = {
    "hermes": Calls((_HERMES,)),
    "ernie45": Calls((_HERMES,), dropped=("<response>", "</response>")),
    "qwen3_coder": Calls((_CODER,)),
    "glm45": Calls((_GLM,)),
    "minimax_m2": Calls((_MINIMAX,), dropped=("<minimax:tool_call>", "</minimax:tool_call>")),
    "llama3_json": Calls((LeadingJson(open=("<|python_tag|>",)),)),
    "mistral": Calls((_MISTRAL,), short_ids=True),
    "mistral_v11": Calls((_MISTRAL,), short_ids=True),
    "deepseek_v3": Calls(
        (
            NamedFrame(
                open=("<｜tool▁call▁begin｜>",),
                before="<｜tool▁sep｜>",
                ends=("\n```json\n",),
                close="\n```<｜tool▁call▁end｜>",
            ),
        ),
        dropped=_DEEPSEEK_OUTER,
    ),
    "deepseek_v31": Calls(
        (NamedFrame(open=("<｜tool▁call▁begin｜>",), ends=("<｜tool▁sep｜>",), close="<｜tool▁call▁end｜>"),),
        dropped=_DEEPSEEK_OUTER,
    ),
    "deepseek_v32": Calls((_DSML,), dropped=("<｜DSML｜function_calls>", "</｜DSML｜function_calls>")),
    "kimi_k2": Calls(
        (
            NamedFrame(
                open=("<|tool_call_begin|>",),
                ends=("<|tool_call_argument_begin|>",),
                pattern=r"(?P<id>(?:functions\.)?(?P<name>[^\s{}\"':]+)(?::\d+)?)",
                close="<|tool_call_end|>",
            ),
        ),
        dropped=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    "granite": Calls((JsonFrame(open=("<|tool_call|>", "<tool_call>")),)),
    "jamba": Calls((JsonFrame(open=("<tool_calls>",), close="</tool_calls>"),)),
    "phi4_mini_json": Calls((JsonFrame(open=("functools",)),)),
    "pythonic": Calls((LeadingPython(open=("<|python_start|>",)),), dropped=("<|python_end|>",)),
    "openai": Calls(harmony=True),
}
CALL_NAMES = {
    **{name: name for name in CALLS},
    "qwen3_xml": "qwen3_coder",
    "qwen": "hermes",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "olmo3": "pythonic",
    "hunyuan_a13b": "jamba",
    "granite-20b-fc": "granite",
    "glm47": "glm45",
    "gpt_oss": "openai",
    "harmony": "openai",
}
"""Name of a flag's value → that of the format."""

_TAGS = Think(open="<think>", close="</think>")
THINKS: dict[str, Think | None] = {
    "qwen3": _TAGS,
    "deepseek_r1": Think(open="<think>", close="</think>", from_start=True),
    "kimi_k2": Think(open="<think>", close="</think>", ends_at_call=True),
    "mistral": Think(open="[THINK]", close="[/THINK]"),
    "seed_oss": Think(open="<seed:think>", close="</seed:think>"),
    "openai_gptoss": None,
}
"""None: harmony, which has it in its channels."""
THINK_NAMES = {
    **{name: name for name in THINKS},
    "deepseek_v3": "qwen3",
    "ernie45": "qwen3",
    "glm45": "qwen3",
    "holo2": "qwen3",
    "hunyuan_a13b": "qwen3",
    "olmo3": "qwen3",
    "minimax_m2": "deepseek_r1",
    "nemotron_v3": "deepseek_r1",
    "step3": "deepseek_r1",
    "gpt_oss": "openai_gptoss",
    "harmony": "openai_gptoss",
}
"""Name of a flag's value → that of the format."""


def _markers() -> frozenset[str]:
    thinks = (think for think in THINKS.values() if think is not None)
    marks = {mark for think in thinks for mark in (think.open, think.close)}
    for calls in CALLS.values():
        marks |= {*calls.dropped, *(word for frame in calls.frames for word in frame.words)}
    return frozenset(marks)


MARKERS = _markers()
"""Of all formats."""
