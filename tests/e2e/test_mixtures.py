"""Mixtures of experts over HTTP: one instance computes the prompts, another goes on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from baton.model.checkpoint.hub import resolve_model
from tests.e2e.server import Server
from tests.e2e.test_any_model import PROMPTS, greedy
from tests.model.checkpoints import make_checkpoint

OUTPUT = 16


@pytest.fixture(scope="module", params=["ernie4_5-moe", "gpt-oss"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Any]]:
    """A random model with the tokenizer of the embedded one, and what transformers makes of it."""
    import transformers

    directory: Path = tmp_path_factory.mktemp(request.param)
    embedded = resolve_model(None)
    vocab_size = transformers.AutoConfig.from_pretrained(embedded).vocab_size
    model = make_checkpoint(
        directory,
        request.param,
        vocab_size=vocab_size,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    for path in embedded.glob("tokenizer*"):
        shutil.copy(path, directory)
    flags = ("--dtype", "float32", "--prefill", "1", "--decode", "1", "--disaggregation-threshold", "0")
    with Server(*flags, model=str(directory)) as server:
        yield server, model


def test_answers_that_were_handed_over_are_those_of_transformers(served: tuple[Server, Any]) -> None:
    server, model = served

    def ask(prompt: str) -> list[int]:
        body = {"prompt": prompt, "max_tokens": OUTPUT, "temperature": 0, "return_token_ids": True}
        answer = server.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        found: list[int] = answer.json()["choices"][0]["token_ids"]
        return found

    with ThreadPoolExecutor(len(PROMPTS)) as at_once:
        found = list(at_once.map(ask, PROMPTS))
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        ids = server.http.post("/tokenize", json={"prompt": prompt}).json()["tokens"]
        assert tokens == greedy(model, ids, OUTPUT)
    engines = server.http.get("/stats").json()["instances"]
    assert sum(engine["handovers"]["arrived"] for engine in engines.values()) > 0
    assert "baton:expert_tokens_total{" in server.http.get("/metrics").text
