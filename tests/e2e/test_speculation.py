"""Whole instances with and without drafts: the same answers, fewer steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton import LLM, SamplingParams
from baton.launch.limits import OptionError
from baton.model.checkpoint.hub import EMBEDDED_MODEL, resolve_model
from baton.protocol.params.structured_outputs import StructuredOutputs
from tests.e2e.mixed_requests import make_asks
from tests.e2e.server import Server
from tests.e2e.test_disaggregation import CLUSTER, ask_all, clean_ledgers, learn_from

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


SUFFIX = {"method": "suffix", "num_speculative_tokens": 8, "suffix_decoding_min_token_prob": 0.0}
"""A guess of a request's own text is then as long whatever was right before."""


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_answers_are_the_same_with_drafts(dtype: str) -> None:
    plain, counted = answers(dtype=dtype, speculation="off")
    assert counted["draft_tokens"] == 0
    config = json.dumps({"method": "ngram", "num_speculative_tokens": 6})
    for options in (
        {"speculative_config": config},
        {"speculative_config": {"method": "suffix"}},
        {"speculation": "auto"},
    ):
        drafted, drafts = answers(dtype=dtype, **options)
        assert drafted == plain
        if "speculative_config" in options:
            assert drafts["draft_tokens"] > drafts["accepted_tokens"] > 0
            assert drafts["steps"] < counted["steps"]


def test_the_same_request_again_is_drafted_from_its_first_answer() -> None:
    """The same bytes in fewer steps; and not if nothing may be kept."""
    wish = SamplingParams(max_tokens=60, temperature=0.9, seed=11, ignore_eos=True)
    prompt = "Tell me something new:"
    told = {}
    none_kept = SUFFIX | {"suffix_decoding_max_cached_requests": 0}
    for name, options in (("off", {"speculation": "off"}), ("none kept", {"speculative_config": none_kept})):
        told[name] = twice(prompt, wish, **options)
        (first, steps), (second, later) = told[name]
        assert first == second
        assert later == steps
    kept = twice(prompt, wish, speculative_config=SUFFIX)
    assert {answer for answer, _ in kept} == {told["off"][0][0]}
    assert kept[1][1] < kept[0][1] / 2
    assert kept[0][1] == told["none kept"][0][1]


def twice(prompt: str, wish: SamplingParams, **options) -> list[tuple[str, int]]:
    """Both answers, and the steps that each took."""
    found = []
    small = {"max_model_len": 256, "num_threads": 1, "max_num_seqs": 4, "kv_cache_memory_bytes": "8MiB"}
    with LLM(**small, **options) as llm:
        for _ in range(2):
            before = stats_of(llm)["steps"]
            (output,) = llm.generate(prompt, wish, use_tqdm=False)
            steps = stats_of(llm)["steps"] - before
            found.append((output.outputs[0].text, steps))
            accepted = len(output.outputs[0].token_ids) - steps  # (the prompt's step gives a token, too)
            assert output.timings.get("accepted_drafts", 0) == accepted
    return found


def test_no_draft_comes_from_another_salt() -> None:
    """A tenant that asks what another one was answered waits as long as if it had not been."""

    def ask(server: Server, salt: str) -> tuple[str, list[float]]:
        """The answer; drafts, and right ones, that it took."""
        names = ("spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total")
        before = [server.metric(f"baton:{name}") for name in names]
        body = {"prompt": "Tell me something new:", "max_tokens": 60, "temperature": 0.9, "seed": 11}
        reply = server.http.post("/v1/completions", json={**body, "ignore_eos": True, "cache_salt": salt})
        assert reply.status_code == 200, reply.text
        after = [server.metric(f"baton:{name}") for name in names]
        text: str = reply.json()["choices"][0]["text"]
        return text, [new - old for new, old in zip(after, before, strict=True)]

    with Server("--dtype", "float32", "--speculative-config", json.dumps(SUFFIX)) as server:
        answer, first = ask(server, "mine")
        same, again = ask(server, "mine")
        theirs, other = ask(server, "theirs")
    assert answer == same == theirs
    assert again[1] > 30
    assert other == first
    assert other[1] < 10


@pytest.mark.parametrize("given", [{"num_speculative_tokens": 4}, {}], ids=["four", "as many as pay"])
def test_answers_are_the_same_with_a_draft_model(given: dict) -> None:
    """The model drafts for itself.  Where the number is chosen, that may not pay."""
    plain, counted = answers(speculation="off")
    config = json.dumps({"method": "draft_model", "model": EMBEDDED_MODEL, **given})
    drafted, drafts = answers(speculative_config=config)
    assert drafted == plain
    if given:
        assert drafts["draft_tokens"] > drafts["accepted_tokens"] > drafts["draft_tokens"] / 2
        assert drafts["steps"] < counted["steps"]


@pytest.mark.slow
def test_a_draft_model_follows_a_hand_over(server: Server) -> None:
    """The decode instance gets the KV of prompts from elsewhere, and none of its draft model's."""
    asks = make_asks(16, seed=6, longest_prompt=300, longest_output=50)
    learn_from(server, asks)
    config = json.dumps({"method": "draft_model", "model": EMBEDDED_MODEL, "num_speculative_tokens": 3})
    with Server("--prefill", "1", "--decode", "1", *CLUSTER, "--speculative-config", config) as cluster:
        wrong = ask_all(cluster, asks, at_once=6)
        assert not wrong, wrong[:3]
        clean_ledgers(cluster)
        assert cluster.metric("baton:requests_handed_over_total") > 0
        drafted = cluster.metric("baton:spec_decode_num_draft_tokens_total")
        accepted = cluster.metric("baton:spec_decode_num_accepted_tokens_total")
        assert drafted > accepted > 0
        assert cluster.metric("baton:spec_decode_num_accepted_tokens_per_pos_total") == accepted


def test_a_draft_model_that_speaks_otherwise_is_refused(tmp_path: Path) -> None:
    embedded = resolve_model(None)
    for file in embedded.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.dumps({"model": str(tmp_path)})
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    one, other = sorted(vocabulary, key=vocabulary.__getitem__)[300:302]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(OptionError, match=f"has another tokenizer: token {vocabulary[other]} is"):
        LLM(speculative_config=config)
    sizes = json.loads((tmp_path / "config.json").read_text())
    sizes["vocab_size"] += 8
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    with pytest.raises(OptionError, match="their vocabularies must be the same"):
        LLM(speculative_config=config)
    with pytest.raises(OptionError, match="the simulated executor computes no draft model"):
        LLM(speculative_config=config, executor="simulated")
