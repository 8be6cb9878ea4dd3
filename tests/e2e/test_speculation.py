"""Whole instances with and without drafts: the same answers, fewer steps."""

from __future__ import annotations

import json

import pytest

from baton import LLM, SamplingParams
from baton.protocol.structured_outputs import StructuredOutputs

TEXT = "one two three four five six seven eight nine ten. "
PROMPTS = [
    TEXT * 4,
    "Repeat: " + TEXT * 3 + "Repeat: ",
    "a b c d a b c d a b c d a b",
    "The capital of France is",
    "x" * 40,
]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Grace"]}, "born": {"type": "integer"}},
    "required": ["name", "born"],
    "additionalProperties": False,
}
WISHES = [
    SamplingParams(max_tokens=40, temperature=0),
    SamplingParams(max_tokens=40, temperature=0.8, seed=7, top_p=0.9),
    SamplingParams(max_tokens=30, temperature=0, repetition_penalty=1.2, frequency_penalty=0.3, logprobs=2),
    SamplingParams(max_tokens=40, temperature=0.6, seed=3, stop=["e "], min_tokens=5),
    SamplingParams(
        max_tokens=60, temperature=0, structured_outputs=StructuredOutputs(json=SCHEMA), logprobs=0
    ),
    SamplingParams(max_tokens=25, temperature=0, ignore_eos=True, logit_bias={30: 2.0}, prompt_logprobs=0),
]


def answers(**options) -> tuple[list[tuple], dict]:
    """Of every wish for every prompt, all of them together; and what the engine counted."""
    small = {"max_model_len": 512, "num_threads": 1, "max_num_seqs": 8, "kv_cache_memory_bytes": "8MiB"}
    with LLM(**small, **options) as llm:
        prompts = [prompt for prompt in PROMPTS for _ in WISHES]
        found = llm.generate(prompts, WISHES * len(PROMPTS), use_tqdm=False)
        parts = [output.outputs[0] for output in found]
        told = [
            (part.token_ids, part.text, part.finish_reason, repr(part.logprobs), repr(output.prompt_logprobs))
            for part, output in zip(parts, found, strict=True)
        ]
        return told, stats_of(llm)


def stats_of(llm: LLM) -> dict:
    return llm._background.call(llm._background._client.query("stats"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_answers_are_the_same_with_drafts(dtype: str) -> None:
    plain, counted = answers(dtype=dtype)
    assert counted["draft_tokens"] == 0
    config = json.dumps({"method": "ngram", "num_speculative_tokens": 6})
    for options in ({"speculative_config": config}, {"speculation": "auto"}):
        drafted, drafts = answers(dtype=dtype, **options)
        assert drafted == plain
        if "speculative_config" in options:
            assert drafts["draft_tokens"] > drafts["accepted_tokens"] > 0
            assert drafts["steps"] < counted["steps"]
