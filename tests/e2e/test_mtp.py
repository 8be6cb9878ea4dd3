"""Servers that draft with the model's own MTP layer: the same answers, and drafts that are accepted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from baton import LLM, SamplingParams
from baton.launch.limits import OptionError
from baton.model.checkpoint.hub import resolve_model
from tests.e2e.server import Server
from tests.e2e.test_disaggregation import CLUSTER, clean_ledgers
from tests.e2e.test_speculation import stats_of
from tests.model.checkpoints import make_checkpoint
from tests.model.mtp_checkpoints import make_agreeing

MTP = {"method": "mtp", "num_speculative_tokens": 3}
WISHES = [
    SamplingParams(max_tokens=40, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=0.8, seed=7, logprobs=2),
    SamplingParams(max_tokens=30, temperature=0, frequency_penalty=0.3, stop=["e"]),
]
PROMPTS = ["The capital of France is", "one two three " * 20, "x"]


@pytest.fixture(scope="module")
def agreeing(tmp_path_factory: pytest.TempPathFactory) -> str:
    """With the embedded model's tokenizer."""
    directory, embedded = tmp_path_factory.mktemp("agreeing"), resolve_model(None)
    vocab = json.loads((embedded / "config.json").read_text())["vocab_size"]
    make_agreeing(directory, vocab_size=vocab)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(embedded / name, directory)
    return str(directory)


def answers(model: str, **options) -> tuple[list[tuple], dict]:
    small = {"max_model_len": 256, "num_threads": 1, "max_num_seqs": 6, "kv_cache_memory_bytes": "8MiB"}
    with LLM(model, **small, **options) as llm:
        found = llm.generate([prompt for prompt in PROMPTS for _ in WISHES], WISHES * 3, use_tqdm=False)
        parts = [output.outputs[0] for output in found]
        return [(part.token_ids, part.finish_reason, repr(part.logprobs)) for part in parts], stats_of(llm)


def test_answers_are_the_same_and_drafts_are_accepted(agreeing: str) -> None:
    plain, counted = answers(agreeing, speculation="off")
    assert counted["draft_tokens"] == 0
    for options in ({"speculative_config": MTP}, {"speculation": "mtp"}):
        drafted, drafts = answers(agreeing, **options)
        assert drafted == plain
        if options == {"speculative_config": MTP}:  # (else it may not pay)
            assert drafts["draft_tokens"] >= drafts["accepted_tokens"] > 100
            assert drafts["steps"] < counted["steps"]


def test_drafts_go_on_after_a_hand_over(agreeing: str) -> None:
    """The decode instance gets the KV of prompts from elsewhere, and none of the MTP layer's."""
    body = {"prompt": "one two three " * 10, "max_tokens": 80, "temperature": 0, "ignore_eos": True}
    flags = (*CLUSTER, "--speculative-config", json.dumps(MTP), "--max-model-len", "256")
    texts = []
    for split in ((), ("--prefill", "1", "--decode", "1")):
        with Server(*flags, *split, model=agreeing) as server:
            answer = server.http.post("/v1/completions", json=body).raise_for_status().json()
            texts.append(answer["choices"][0]["text"])
            assert server.metric("baton:spec_decode_num_accepted_tokens_total") > 20
            if split:
                assert server.metric("baton:requests_handed_over_total") > 0
                clean_ledgers(server)
    assert texts[0] == texts[1]


def test_a_model_without_such_a_layer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"has no layer that predicts more than one token"):
        LLM(speculation="mtp")
    make_checkpoint(tmp_path, "qwen3-moe")
    shutil.copy(resolve_model(None) / "tokenizer.json", tmp_path)
    with pytest.raises(OptionError, match=r"Qwen3MoeForCausalLM.*; leave method mtp away"):
        LLM(str(tmp_path), speculative_config={"method": "ernie_mtp"})
    with pytest.raises(OptionError, match="the simulated executor computes no MTP layer"):
        LLM(executor="simulated", speculation="mtp")
