"""Vectors of texts from a real server, through the real `openai` client, and from Python."""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator

import httpx
import numpy as np
import openai
import pytest
import torch

from baton.model.checkpoint.hub import resolve_model
from tests.e2e.server import Server

MODEL = "baton-tiny"
TEXTS = ["Hello there!", "The cat sleeps on the warm stone.", "The river runs past the old mill. " * 20]


@pytest.fixture(scope="module")
def both() -> Iterator[Server]:
    """Texts and vectors."""
    flags = ("--runner", "generate", "--convert", "embed", "--dtype", "float32", "--max-restarts", "40")
    with Server(*flags) as server:
        yield server


def reference(ids: list[int]) -> torch.Tensor:
    import transformers

    model = transformers.AutoModel.from_pretrained(resolve_model(None), dtype=torch.float32)
    with torch.no_grad():
        return torch.nn.functional.normalize(model(torch.tensor([ids])).last_hidden_state[0, -1], dim=0)


def test_vectors_are_those_of_transformers_in_both_formats(both: Server) -> None:
    client = both.client()
    floats = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
    packed = client.embeddings.create(model=MODEL, input=TEXTS)  # the client asks for base64, and unpacks it
    assert [item.index for item in floats.data] == [0, 1, 2]
    tokens = 0
    for text, one, other in zip(TEXTS, floats.data, packed.data, strict=True):
        ids = both.http.post("/tokenize", json={"prompt": text}).json()["tokens"]
        tokens += len(ids)
        torch.testing.assert_close(torch.tensor(one.embedding), reference(ids), atol=1e-4, rtol=0)
        assert np.array_equal(np.float32(one.embedding), np.float32(other.embedding))
        (again,) = client.embeddings.create(model=MODEL, input=ids).data
        assert again.embedding == other.embedding
        (again,) = client.embeddings.create(model=MODEL, input=[ids], user="somebody").data
        assert again.embedding == other.embedding
    assert floats.usage.prompt_tokens == floats.usage.total_tokens == tokens


def test_fields(both: Server) -> None:
    def ask(**body: object) -> dict:
        answer = both.http.post("/v1/embeddings", json={"input": TEXTS[2], **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    whole = ask()["data"][0]["embedding"]
    raw = np.array(ask(normalize=False)["data"][0]["embedding"])
    assert np.allclose(raw / np.linalg.norm(raw), whole, atol=1e-6)
    few = ask(dimensions=7)["data"][0]["embedding"]
    assert np.allclose(raw[:7] / np.linalg.norm(raw[:7]), few, atol=1e-6)
    data = base64.b64decode(ask(encoding_format="base64")["data"][0]["embedding"])
    assert np.array_equal(np.frombuffer(data, "<f4"), np.float32(whole))
    ids = both.http.post("/tokenize", json={"prompt": TEXTS[2]}).json()["tokens"]
    cut = ask(truncate_prompt_tokens=9)
    assert cut["usage"]["prompt_tokens"] == 9
    assert cut["data"] == ask(input=ids[:9])["data"]
    assert (
        ask(truncate_prompt_tokens=9, truncation_side="left", input=ids)["data"]
        == ask(input=ids[-9:])["data"]
    )


def test_what_cannot_be_served_is_refused_by_name(both: Server) -> None:
    limit = both.http.get("/v1/models").json()["data"][0]["max_model_len"]

    def refused(**body: object) -> dict:
        answer = both.http.post("/v1/embeddings", json=body)
        assert answer.status_code == 400, answer.text
        return answer.json()["error"]

    for body, field in (
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [5] * (limit + 1)}, "input"),
        ({"input": "word " * 2 * limit}, "input"),
        ({"input": [1 << 20]}, "input"),
        ({"input": ["a"] * 5000}, "input"),
        ({"input": "a", "dimensions": 1 << 20}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "truncate_prompt_tokens": limit + 1}, "truncate_prompt_tokens"),
    ):
        error = refused(**body)
        assert error["param"] == field, error
        assert error["message"]
    assert both.http.post("/v1/embeddings", json={"input": [5] * limit}).status_code == 200
    too_long = {"input": "word " * 2 * limit, "truncate_prompt_tokens": -1}
    assert both.http.post("/v1/embeddings", json=too_long).json()["usage"]["prompt_tokens"] == limit


def test_texts_are_generated_beside(both: Server) -> None:
    client = both.client()
    alone = client.completions.create(model=MODEL, prompt="The", max_tokens=40, temperature=0).choices[0].text
    vectors = client.embeddings.create(model=MODEL, input=TEXTS).data
    found: list[object] = []
    threads = [
        threading.Thread(target=lambda: found.append(client.embeddings.create(model=MODEL, input=TEXTS).data))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for _ in range(3):
        again = client.completions.create(model=MODEL, prompt="The", max_tokens=40, temperature=0)
        assert again.choices[0].text == alone
    for thread in threads:
        thread.join()
    assert found == [vectors] * 4


def test_a_hundred_inputs_survive_their_instance(both: Server) -> None:
    """Its workers are killed again and again until an answer was under way: it has the same bytes."""
    inputs = [f"{number} " + TEXTS[2] for number in range(100)]
    client = both.client()
    expected = [item.embedding for item in client.embeddings.create(model=MODEL, input=inputs).data]
    both.http.post("/reset_prefix_cache")
    for _ in range(20):
        found: list[list[list[float]]] = []

        def ask(found: list[list[list[float]]] = found) -> None:
            # (503: the worker was killed before the request came.)
            with contextlib.suppress(openai.InternalServerError):
                answer = client.embeddings.create(model=MODEL, input=inputs)
                found.append([item.embedding for item in answer.data])

        both.wait_ready()
        before = both.metric("baton:requests_continued_total")
        thread = threading.Thread(target=ask)
        thread.start()
        while thread.is_alive() and not both.http.get("/stats").json()["running"]:
            pass
        os.kill(both.children()["worker"][-1], signal.SIGKILL)
        thread.join()
        assert found in ([], [expected])
        if found and both.metric("baton:requests_continued_total") > before:
            return
    raise AssertionError("no request was under way in 20 tries")


def test_a_client_that_leaves_frees_what_it_had(both: Server) -> None:
    inputs = [f"{number} " + TEXTS[2] for number in range(400)]
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(both.url + "/v1/embeddings", json={"input": inputs}, timeout=httpx.Timeout(60, read=0.05))
    deadline = time.monotonic() + 60
    while both.http.get("/stats").json()["running"] or both.http.get("/stats").json()["waiting"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_model_for_texts_says_so(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="--runner pooling"):
        server.client().embeddings.create(model=MODEL, input="a")


def test_python_and_pooling_alone() -> None:
    import baton

    with baton.LLM(runner="pooling", pooler_config='{"pooling_type": "MEAN", "dimensions": 24}') as llm:
        found = llm.embed(TEXTS, use_tqdm=False)
        (again,) = llm.embed({"prompt_token_ids": found[1].prompt_token_ids}, use_tqdm=False)
        assert again.outputs == found[1].outputs
        assert [len(one.outputs.embedding) for one in found] == [24] * 3
        assert np.linalg.norm(found[0].outputs.embedding) == pytest.approx(1, abs=1e-5)
        with pytest.raises(ValueError, match="generates no text"):
            llm.generate("a", use_tqdm=False)
    with baton.LLM() as llm:
        for vectors in (llm.embed, lambda texts: llm.score("a", texts)):
            with pytest.raises(ValueError, match='texts alone; give runner="pooling", or convert="embed"'):
                vectors(TEXTS)


def test_a_cluster_computes_vectors_where_it_prefills() -> None:
    flags = ("--prefill", "1", "--decode", "1", "--runner", "generate", "--convert", "embed")
    with Server(*flags, "--dtype", "float32") as cluster:
        cluster.wait_ready()
        client = cluster.client()
        vectors = [item.embedding for item in client.embeddings.create(model=MODEL, input=TEXTS * 10).data]
        assert vectors[:3] * 10 == vectors
        text = client.completions.create(model=MODEL, prompt="The", max_tokens=8, temperature=0)
        assert text.choices[0].finish_reason == "length"
        pooled = {}
        for instance in cluster.http.get("/cluster/instances").json()["instances"]:
            stats = cluster.http.get("/stats", params={"instance": instance["name"]}).json()
            pooled[instance["label"]] = stats["finished"].get("pooled", 0)
        assert pooled == {"prefill": 30, "decode": 0}
