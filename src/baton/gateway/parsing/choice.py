"""Which formats a model writes in: as the server was told, else as its chat template shows them."""

from __future__ import annotations

import re

import msgspec

from baton.gateway.parsing.formats import CALL_NAMES, CALLS, THINK_NAMES, THINKS
from baton.gateway.parsing.frames import Calls, Think
from baton.gateway.parsing.parser import HARMONY_MARKERS
from baton.gateway.parsing.templates.parser import begins_thinking as template_begins_thinking
from baton.gateway.parsing.templates.template import CALLS as CALLS_FIELD
from baton.gateway.parsing.templates.template import ResponseTemplate, TemplateError, load

AUTO, NONE, HF = "auto", "none", "hf"
"""`HF`: the checkpoint's `response_template` is run as it stands."""

# In this order: a template may show what another format has, too.
_CALL_SIGNS = (
    ("openai", ("<|channel|>", "<|message|>")),
    ("deepseek_v32", ("｜DSML｜",)),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("minimax_m2", ("minimax:tool_call", "<invoke name=")),
    ("glm45", ("<arg_key>",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("mistral_v11", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("ernie45", ("<tool_call>", "<response>")),
    ("hermes", ("<tool_call>",)),
    ("granite", ("<|tool_call|>",)),
    ("jamba", ("<tool_calls>",)),
    ("phi4_mini_json", ("functools[",)),
    ("pythonic", ("<|python_start|>",)),
    ("pythonic", ("[func_name1(",)),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ('"parameters": dictionary of argument name',)),
)
_TEMPLATE_CALL_SIGNS = (
    ("deepseek_v41", ("｜DSML｜ calls",)),
    ("deepseek_v4", ("｜DSML｜tool_calls",)),
    ("kimi_k3", ("<|open|>", "<|close|>", "<|sep|>")),
    ("step3", ("<steptml:invoke",)),
    ("hy_v3", ("<tool_sep>", "<arg_key>")),
    ("seed_oss", ("<seed:tool_call>",)),
    ("longcat", ("<longcat_tool_call>",)),
    ("internlm", ("<|action_start|>", "<|plugin|>")),
    ("apertus", ("<|tools_prefix|>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("gemma4", ("<|tool_call>", "<tool_call|>")),
    ("functiongemma", ("<start_function_call>",)),
    *_CALL_SIGNS,
    ("olmo3", ("<function_calls>",)),
    ("granite-20b-fc", ("<function_call>",)),
)
"""Of chat templates; a `response_template` in a format that is not among those above is run itself."""
_THINK_SIGNS = (
    ("openai_gptoss", ("<|channel|>", "<|message|>")),
    ("mistral", ("[THINK]",)),
    ("seed_oss", ("<seed:think>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>", "</think>")),
    ("qwen3", ("</think>",)),
)
_TEMPLATE_THINK_SIGNS = (
    ("kimi_k3", ("<|open|>", "<|close|>", "<|sep|>")),
    ("hunyuan_a13b", ("</think>", "<answer>")),
    ("minimax_m3", ("<mm:think>",)),
    ("gemma4", ("<|channel>", "<channel|>")),
    *_THINK_SIGNS,
)
"""Of chat templates."""
_OPENS = re.compile(r"""(<think>|\[THINK\]|<seed:think>)(\\n|\s)*['"]\s*-?\}\}""")
"""A text that a template writes and that ends where reasoning begins."""


class Formats(msgspec.Struct, frozen=True):
    """The formats of a model, by name; "": there is none, or none that is known."""

    calls: str = ""
    think: str = ""
    template_opens: bool = False
    """Where the model shall think, its chat template opens the region: the model never does."""
    template: str = ""
    """The `response_template` that reads answers, as JSON, where the names are `HF`."""

    @property
    def response(self) -> ResponseTemplate | None:
        """The template that reads answers; None: the formats do."""
        return load(self.template) if self.template else None

    @property
    def calling(self) -> Calls | None:
        return CALLS.get(self.calls)

    @property
    def thinking(self) -> Think | None:
        if self.response is not None:
            return self.response.think if self.think else None
        return THINKS[self.think] if self.think else None

    def thinking_in(self, opened: bool) -> Think | None:
        """The format of reasoning in an answer; `opened`: it begins inside of it."""
        return None if self.template_opens and not opened else self.thinking

    @property
    def is_harmony(self) -> bool:
        return "openai" in (self.calls, self.think[:6])

    @property
    def thinks(self) -> bool:
        """It is known how the model writes reasoning."""
        return self.thinking is not None or self.is_harmony

    @property
    def markers(self) -> frozenset[str]:
        """Texts that a model may have as special tokens, and that the parser has to see."""
        marks = set(HARMONY_MARKERS) if self.is_harmony else set[str]()
        if self.response is not None:
            marks |= self.response.marks
        if self.thinking is not None:
            marks |= self.thinking.words
        if self.calling is not None:
            marks |= self.calling.words
        return frozenset(marks)

    def begins_thinking(self, prompt: str, *, continued: str | None = None) -> bool:
        """Whether the answer to this prompt begins inside of reasoning.  `continued`: the text of the last
        message, which the answer continues."""
        if self.response is not None and self.think:
            return template_begins_thinking(self.response, prompt, continued=continued)
        return begins_thinking(self.thinking, prompt, continued=continued)


def choose(template: str | None, calls: str = AUTO, think: str = AUTO, *, response: str = "") -> Formats:
    """By the names of flags (`CALL_NAMES`, `THINK_NAMES`, `HF`), else by what `response` shows, the
    checkpoint's `response_template` (how transformers reads answers), else by what the chat template does.
    A `response` that shows no known format for one of its fields is run itself.  Raises `TemplateError`."""
    source = template or ""
    shown = response.replace("\\", "")  # (markers stand in it as expressions)
    if HF in (calls, think) or (calls == think == AUTO and _is_new(response, shown)):
        return _by_template(response, calls, think)
    return Formats(
        _chosen(shown, calls, _CALL_SIGNS, CALL_NAMES)
        or _chosen(source, calls, _TEMPLATE_CALL_SIGNS, CALL_NAMES),
        _chosen(shown, think, _THINK_SIGNS, THINK_NAMES)
        or _chosen(source, think, _TEMPLATE_THINK_SIGNS, THINK_NAMES),
        _OPENS.search(source, max(0, source.rfind("add_generation_prompt"))) is not None,
    )


def _is_new(response: str, shown: str) -> bool:
    """The template can be run, and has calls or reasoning in a format that is not among ours."""
    try:
        template = load(response) if response else None
    except TemplateError:
        return False
    if template is None:
        return False
    calls = CALLS_FIELD in template.fields and not _chosen(shown, AUTO, _CALL_SIGNS, CALL_NAMES)
    return calls or (template.reasoning != "" and not _chosen(shown, AUTO, _THINK_SIGNS, THINK_NAMES))


def _by_template(response: str, calls: str, think: str) -> Formats:
    if not {calls, think} <= {AUTO, NONE, HF}:
        raise TemplateError(
            "--tool-call-parser hf and --reasoning-parser hf go together: one response_template reads both"
        )
    if not response:
        raise TemplateError(f"{HF}: the model's tokenizer_config.json has no response_template")
    template = load(response)
    return Formats(
        HF if CALLS_FIELD in template.fields and calls != NONE else "",
        HF if template.reasoning and think != NONE else "",
        False,
        response,
    )


def _chosen(
    source: str, name: str, signs: tuple[tuple[str, tuple[str, ...]], ...], names: dict[str, str]
) -> str:
    if name == NONE:
        return ""
    if name != AUTO:
        return names[name]
    return next((format for format, texts in signs if all(text in source for text in texts)), "")


def begins_thinking(think: Think | None, prompt: str, *, continued: str | None = None) -> bool:
    """Whether the answer begins inside of reasoning: the prompt opens the region at its end, or the format
    says so and the prompt does not close it.  `continued`: the text of the last message, which the answer
    continues."""
    if think is None:
        return False
    if continued is not None:
        return continued.rfind(think.open) > continued.rfind(think.close)
    end = prompt.rstrip()
    return end.endswith(think.open) or (think.from_start and not end.endswith(think.close))
