"""Mixtures of experts over HTTP: one instance computes the prompts, another goes on."""

from __future__ import annotations

import base64
import io
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton import LLM, SamplingParams
from baton.model.checkpoint.hub import resolve_model
from tests.e2e.server import Server
from tests.e2e.test_any_model import PROMPTS, greedy
from tests.model.checkpoints import make_checkpoint, reference_routes

OUTPUT = 16
ASKED_FOR = "--enable-return-routed-experts"


@pytest.fixture(scope="module", params=["ernie4_5-moe", "gpt-oss"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Any]]:
    directory, model = random_mixture(request.param, tmp_path_factory)
    flags = ("--prefill", "1", "--decode", "1", "--disaggregation-threshold", "0")
    with Server("--dtype", "float32", *flags, ASKED_FOR, model=str(directory)) as server:
        yield server, model


def random_mixture(variant: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A random model with the tokenizer of the embedded one, and what transformers makes of it."""
    import transformers

    directory: Path = tmp_path_factory.mktemp(variant)
    embedded = resolve_model(None)
    vocab_size = transformers.AutoConfig.from_pretrained(embedded).vocab_size
    model = make_checkpoint(
        directory,
        variant,
        vocab_size=vocab_size,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    for path in embedded.glob("tokenizer*"):
        shutil.copy(path, directory)
    return directory, model


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


def experts_of(choice: dict[str, Any]) -> list[list[list[int]]]:
    file = io.BytesIO(base64.b64decode(choice["routed_experts"]))
    found = np.load(file, allow_pickle=False)
    assert found.dtype == np.uint8
    as_lists: list[list[list[int]]] = found.tolist()
    return as_lists


def test_experts_of_answers_that_were_handed_over(served: tuple[Server, Any]) -> None:
    """Of prompt and answer, of all choices; from a position on; with a stop string; only if asked for."""
    server, model = served
    prompt = [3 + 7 * token % 200 for token in range(70)]
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 1, "seed": 1, "return_token_ids": True}
    before = arrived(server)

    def ask(**more: Any) -> list[dict[str, Any]]:
        answer = server.http.post("/v1/completions", json=body | more)
        assert answer.status_code == 200, answer.text
        choices: list[dict[str, Any]] = answer.json()["choices"]
        return choices

    plain = ask()
    assert "routed_experts" not in plain[0]
    for more, start in (({"n": 3}, 0), ({"n": 2, "routed_experts_prompt_start": 40}, 40)):
        for choice in ask(return_routed_experts=True, **more):
            tokens = [*prompt, *choice["token_ids"]]
            assert experts_of(choice) == reference_routes(model, tokens[:-1])[start:].tolist()
    (stopped,) = ask(return_routed_experts=True, stop=[plain[0]["text"][3:6]])
    assert stopped["finish_reason"] == "stop"
    assert len(stopped["token_ids"]) < 12
    tokens = [*prompt, *stopped["token_ids"]]
    assert experts_of(stopped) == reference_routes(model, tokens[:-1]).tolist()
    assert arrived(server) > before


def arrived(server: Server) -> int:
    engines = server.http.get("/stats").json()["instances"]
    return sum(engine["handovers"]["arrived"] for engine in engines.values())


def test_what_cannot_be_asked_for(served: tuple[Server, Any]) -> None:
    server, _ = served
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "return_routed_experts": True}
    answer = server.http.post("/v1/chat/completions", json=chat).json()
    assert len(experts_of(answer["choices"][0])) == answer["usage"]["total_tokens"] - 1
    for route, body, wrong in (
        ("chat/completions", chat | {"stream": True}, "return_routed_experts: not with stream"),
        ("completions", {"prompt": [5], "stream": True, "return_routed_experts": True}, "not with stream"),
        (
            "completions",
            {"prompt": [5, 6], "return_routed_experts": True, "routed_experts_prompt_start": 2},
            "routed_experts_prompt_start: 2 must be less than the 2 tokens",
        ),
    ):
        refused = server.http.post(f"/v1/{route}", json=body)
        assert refused.status_code == 400
        assert wrong in refused.json()["error"]["message"]


def test_experts_over_preemptions(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A pool of little more than one of six requests: what is computed again is not told again."""
    directory, model = random_mixture("qwen3-moe", tmp_path_factory)
    prompts = [[3 + (7 * number + 5 * token) % 200 for token in range(40)] for number in range(6)]
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True, n=2)
    with LLM(
        str(directory),
        dtype="float32",
        enable_return_routed_experts=True,
        max_model_len=112,
        num_gpu_blocks_override=11,
        block_size=16,
        admission_headroom=0,
        num_threads=1,
    ) as llm:
        found = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        stats = llm._background.call(llm._background._client.query("stats"))
    assert stats["preemptions"] > 0
    for prompt, output in zip(prompts, found, strict=True):
        for choice in output.outputs:
            assert choice.routed_experts is not None
            tokens = [*prompt, *choice.token_ids]
            assert choice.routed_experts.tolist() == reference_routes(model, tokens[:-1]).tolist()
