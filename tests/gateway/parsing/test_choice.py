"""The formats of a model are those that its chat template shows."""

from __future__ import annotations

import pytest

from baton.gateway.parsing.choice import Formats, begins_thinking, choose
from baton.gateway.parsing.formats import (
    CALL_NAMES,
    CALLS,
    MARKERS,
    THINK_NAMES,
    THINKS,
    UNREAD_CALLS,
    UNREAD_THINKS,
    check_call_name,
)

QWEN = "{% if tools %}<tools>{{ tools }}</tools> <tool_call>\n{}</tool_call>{% endif %}<think></think>"


@pytest.mark.parametrize(
    ("template", "calls", "think"),
    [
        (None, "", ""),
        ("{{ messages }}", "", ""),
        (QWEN, "hermes", "qwen3"),
        ("{{ tools }}<tool_call>\n<function=f>\n<parameter=a>\n</think>", "qwen3_coder", "qwen3"),
        ("{{ tools }}<response>\n<tool_call>\n</think>", "ernie45", "qwen3"),
        ("{{ tools }}<tool_call>{f}\n<arg_key>a</arg_key>", "glm45", ""),
        ("{{ tools }}<｜tool▁calls▁begin｜>…\n```json\n", "deepseek_v3", ""),
        ("{{ tools }}<｜tool▁calls▁begin｜>…<｜tool▁sep｜></think>", "deepseek_v31", "qwen3"),
        ("{{ tools }}[TOOL_CALLS][THINK]", "mistral", "mistral"),
        ("{{ tools }}[TOOL_CALLS]f[ARGS]{}", "mistral_v11", ""),
        ("{{ tools }}<|start|>assistant<|channel|>final<|message|>", "openai", "openai_gptoss"),
        ("{{ tools }}<|python_tag|>", "llama3_json", ""),
        ("{{ tools }}[func_name1(params_name1=params_value1)]", "pythonic", ""),
        ("{{ tools }}<|tool_calls_section_begin|></think>", "kimi_k2", "kimi_k2"),
        ("{{ tools }}<｜DSML｜tool_calls></think>", "deepseek_v4", "qwen3"),
        ("{{ tools }}<｜DSML｜function_calls>", "deepseek_v32", ""),
        ("{{ tools }}<tool_call>f<tool_sep><arg_key></think>", "hy_v3", "qwen3"),
        ("{{ tools }}<seed:tool_call><function=f><parameter=a><seed:think>", "seed_oss", "seed_oss"),
        ("{{ tools }}<|tool_call>call:f{}<tool_call|><|channel>thought<channel|>", "gemma4", "gemma4"),
        ("{{ tools }}<tool_calls>[]</tool_calls></think><answer>", "jamba", "hunyuan_a13b"),
        ("{{ tools }}<|tool_call_start|>[f()]<|tool_call_end|>", "lfm2", ""),
        ("{{ tools }}<function_calls>f()</function_calls>", "olmo3", ""),
    ],
)
def test_what_a_template_shows(template: str | None, calls: str, think: str) -> None:
    formats = choose(template)
    assert (formats.calls, formats.think) == (calls, think)


def test_flags_go_before_the_template() -> None:
    assert choose(QWEN, "llama4_json", "deepseek_r1") == Formats("llama3_json", "deepseek_r1")
    assert choose(QWEN, "none", "none") == Formats("", "")
    for name, known in CALL_NAMES.items():
        assert choose("", name).calling is CALLS[known]
    for name, known in THINK_NAMES.items():
        assert choose("", "none", name).thinking is THINKS[known]


def test_a_prompt_that_begins_thinking_at_its_end() -> None:
    think = THINKS["qwen3"]
    assert begins_thinking(think, "<|im_start|>assistant\n<think>\n")
    assert not begins_thinking(think, "<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not begins_thinking(think, "say <think> please<|im_end|>\n<|im_start|>assistant\n")
    assert begins_thinking(think, "", continued="<think>\nSo far")
    assert not begins_thinking(think, "", continued="<think>\nSo far</think>\nYes")
    assert not begins_thinking(None, "<think>")
    always = THINKS["deepseek_r1"]
    assert begins_thinking(always, "<｜Assistant｜>")
    assert not begins_thinking(always, "<｜Assistant｜><think>\n\n</think>")


@pytest.mark.parametrize(
    ("end", "opens"),
    [
        ("{{- '<|im_start|>assistant\\n' }}", False),
        ("{{- '<|im_start|>assistant\\n<think>\\n' }}", True),
        ("{{- '<|im_start|>assistant\\n' }}{% if t %}{{ '<think>' -}}{% endif %}", True),
        (
            "{{- '<|im_start|>assistant\\n' }}{% if not t %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}",
            False,
        ),
    ],
)
def test_templates_that_open_the_region_themselves(end: str, opens: bool) -> None:
    """A model that such a template does not ask to think does not begin to."""
    history = "{{ '<think>\\n' }}{{ reasoning }}</think>{% if add_generation_prompt %}"
    formats = choose(history + end)
    assert formats.template_opens == opens
    assert formats.thinking_in(True) == THINKS["qwen3"]
    assert (formats.thinking_in(False) is None) == opens


def test_only_whole_tags_may_be_tokens() -> None:
    """A tokenizer may have `>` as an added token: it is no marker."""
    for markers in (MARKERS, *(choose("", name, "none").markers for name in CALLS)):
        for marker in markers:
            assert marker[0] + marker[-1] in ("<>", "[]"), marker
    assert {"<tool_call>", "</function>", "<|open|>", "<|plugin|>", '<|"|>', "[ARGS]"} <= MARKERS


def test_names_of_formats_that_are_not_read_name_the_nearest() -> None:
    for known, unread in ((CALL_NAMES, UNREAD_CALLS), (THINK_NAMES, UNREAD_THINKS)):
        assert not known.keys() & unread.keys()
        assert set(unread.values()) <= {*known, "hf"}
    with pytest.raises(
        ValueError, match="'minimax_m3' is not read here; the one that is nearest is 'minimax_m2'"
    ):
        check_call_name("minimax_m3")


def test_markers_that_may_be_special_tokens() -> None:
    assert {"<tool_call>", "</tool_call>", "<think>", "</think>"} <= choose(QWEN).markers
    assert {"[TOOL_CALLS]", "[ARGS]"} <= choose("", "mistral").markers
    assert {"<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>"} <= choose("", "deepseek_v3").markers
    assert "<|channel|>" in choose("", "none", "openai_gptoss").markers
