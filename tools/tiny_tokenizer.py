"""The byte-level BPE tokenizer of `baton-tiny` and its chat template.

Theory. Text becomes UTF-8 bytes, each byte a printable character of the base alphabet, so every text can be
encoded and decodes to itself. BPE then merges what stands together often. Digits stay single: a number is
as many tokens as it has digits, and a code word is several tokens that no merge could have memorised.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tiny_corpus import END, START, TEXT_END

SPECIAL = [TEXT_END, START, END]
JUNK = ["<|", "|>", "|>Ċ", ".<|", "?<|", "Ġ?<|", ")<|", "!<|"]
"""Merges that only the markers in the tokenizer's own training text made: no document has these tokens."""
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = """\
{%- macro kind(schema) -%}
{%- if schema is not mapping -%}any
{%- elif schema['enum'] is defined -%}
{%- for one in schema['enum'] -%}{{- '|' if not loop.first -}}{{- one | tojson -}}{%- endfor -%}
{%- elif schema['type'] is string -%}{{- schema['type'] -}}
{%- else -%}any
{%- endif -%}
{%- endmacro -%}
{%- macro function(tool) -%}
{%- set schema = tool['parameters'] or {} -%}
{{- (tool['description'] | replace('\\n', ' ') + ' ') if tool['description'] -}}
{{- '{"name": ' + (tool['name'] | tojson) + ', "arguments": {' -}}
{%- for name, one in (schema['properties'] or {}).items() -%}
{{- ', ' if not loop.first -}}
{{- (name | tojson) + ': ' + ('' if name in (schema['required'] or []) else 'optional ') + kind(one) -}}
{%- endfor -%}
{{- '}}\\n' -}}
{%- endmacro -%}
{%- set rest = messages -%}
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if messages and messages[0]['role'] == 'system' -%}
{{- messages[0]['content'] + '\\n\\n' -}}
{%- set rest = messages[1:] -%}
{%- endif -%}
{{- '<tools>\\n' -}}
{%- for tool in tools -%}{{- function(tool['function'] or tool) -}}{%- endfor -%}
{{- '</tools><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in rest -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'tool' -%}
{{- '<tool_response> ' + (message['content'] or '') + '</tool_response>' -}}
{%- elif message['role'] == 'assistant' -%}
{%- set said = (message['content'] or '').split('</think>')[-1] -%}
{%- set said = said.lstrip('\\n') if '</think>' in (message['content'] or '') else said -%}
{{- said -}}
{%- for call in message['tool_calls'] or [] -%}
{%- set called = call['function'] or call -%}
{{- '\\n' if said or not loop.first -}}
{{- '<tool_call>\\n{"name": ' + (called['name'] | tojson) + ', "arguments": ' -}}
{{- called['arguments'] if called['arguments'] is string else called['arguments'] | tojson -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{%- else -%}
{{- message['content'] -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking | default((reasoning_effort | default('none', true)) != 'none') -%}
{{- '<think>\\n' -}}
{%- endif -%}
{%- endif -%}
"""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn the merges from `texts`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def with_markers(tokenizer: Tokenizer, markers: Sequence[str]) -> Tokenizer:
    """The tokenizer with `markers` as tokens of their own, in the places of `JUNK`: the vocabulary stays as
    large.  Like Qwen's they are no "special" tokens: texts show them."""
    state = json.loads(tokenizer.to_str())
    vocab, merges = state["model"]["vocab"], state["model"]["merges"]
    merges = [pair for pair in merges if "".join(pair) not in JUNK]
    parts = {part for pair in merges for part in pair}
    for junk, marker in zip(JUNK, markers, strict=True):
        if junk in parts:
            raise ValueError(f"a merge needs {junk!r}")
        place = vocab.pop(junk)
        vocab[marker] = place
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        state["added_tokens"].append({"id": place, "content": marker, **plain, "special": False})
    state["model"]["merges"] = merges
    state["model"]["vocab"] = dict(sorted(vocab.items(), key=lambda one: one[1]))
    state["added_tokens"].sort(key=lambda one: one["id"])
    made: Tokenizer = Tokenizer.from_str(json.dumps(state))
    return made


def tokenizer_config(max_length: int) -> dict[str, Any]:
    """The contents of `tokenizer_config.json`."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "pad_token": TEXT_END,
        "additional_special_tokens": [START, END],
        "model_max_length": max_length,
    }


def save_tokenizer(tokenizer: Tokenizer, directory: Path, max_length: int) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = json.dumps(tokenizer_config(max_length), indent=2) + "\n"
    (directory / "tokenizer_config.json").write_text(config, encoding="utf-8")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
