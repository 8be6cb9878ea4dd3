"""A model of no family here, served over HTTP: its class in transformers, on Baton's pool."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.model.checkpoint.hub import resolve_model
from tests.e2e.server import Server

PROMPTS = [f"The cat sleeps on the warm stone. Number {number} is " * (1 + number) for number in range(6)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A random StableLM with the tokenizer of the embedded model."""
    import transformers

    directory = tmp_path_factory.mktemp("stablelm")
    embedded = resolve_model(None)
    config = transformers.AutoConfig.from_pretrained(embedded)
    torch.manual_seed(0)
    model = transformers.StableLmForCausalLM(
        transformers.StableLmConfig(
            vocab_size=config.vocab_size,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            initializer_range=0.3,
            bos_token_id=None,
            eos_token_id=None,
        )
    ).eval()
    model.save_pretrained(directory)
    for path in embedded.glob("tokenizer*"):
        shutil.copy(path, directory)
    return directory, model


@pytest.fixture(scope="module")
def pair(reference: tuple[Path, Any]) -> Iterator[Server]:
    """One computes prompts, the other goes on: with the weights in one image."""
    flags = ("--dtype", "float32", "--prefill", "1", "--decode", "1", "--disaggregation-threshold", "0")
    with Server(*flags, "--convert", "embed", model=str(reference[0])) as server:
        yield server


def greedy(model: Any, tokens: list[int], count: int) -> list[int]:
    with torch.no_grad():
        found = model.generate(torch.tensor([tokens]), do_sample=False, max_new_tokens=count, pad_token_id=0)
    return found[0, len(tokens) :].tolist()


def test_texts_are_those_of_transformers_and_handed_over(pair: Server, reference: tuple[Path, Any]) -> None:
    def ask(prompt: str) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "return_token_ids": True}
        answer = pair.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]

    with ThreadPoolExecutor(len(PROMPTS)) as at_once:
        found = list(at_once.map(ask, PROMPTS))
    for prompt, choice in zip(PROMPTS, found, strict=True):
        tokens = pair.http.post("/tokenize", json={"prompt": prompt}).json()["tokens"]
        assert choice["token_ids"] == greedy(reference[1], tokens, 12)
    engines = pair.http.get("/stats").json()["instances"]
    assert sum(engine["handovers"]["arrived"] for engine in engines.values()) > 0


def test_vectors_are_those_of_transformers(pair: Server, reference: tuple[Path, Any]) -> None:
    answer = pair.http.post("/v1/embeddings", json={"input": PROMPTS[:2]})
    assert answer.status_code == 200, answer.text
    for prompt, item in zip(PROMPTS, answer.json()["data"], strict=False):
        tokens = pair.http.post("/tokenize", json={"prompt": prompt}).json()["tokens"]
        with torch.no_grad():
            hidden = reference[1].model(torch.tensor([tokens])).last_hidden_state[0, -1]
        expected = torch.nn.functional.normalize(hidden, dim=0)
        torch.testing.assert_close(torch.tensor(item["embedding"]), expected, atol=1e-4, rtol=0)


def test_it_says_who_computes(pair: Server) -> None:
    assert "(StableLmForCausalLM by transformers " in pair.banner
    assert ", slower)" in pair.banner
