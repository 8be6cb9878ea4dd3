"""Scores of pairs of texts from real servers: by vectors, and by what a model says."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from baton import LLM
from baton.gateway.served_model import QWEN3_RERANKER
from baton.launch.limits import OptionError
from baton.launch.options import EngineOptions
from baton.launch.planning.plan import make_plan
from baton.model.checkpoint.hub import resolve_model
from tests.e2e.server import Server

QUERY = "Where does the cat sleep?"
DOCUMENTS = [
    "The cat sleeps on the warm stone.",
    "The baker sells fresh bread.",
    "Many people walk through the park in the morning.",
    "{query} stays as it is.",
]


@pytest.fixture(scope="module")
def judge_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model as one that answers with one of two tokens (its vocabulary has no "yes")."""
    directory = tmp_path_factory.mktemp("judge") / "model"
    shutil.copytree(resolve_model(None), directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "classifier_from_token": ["a", "I"]}))
    return directory


@pytest.fixture(scope="module")
def judge(judge_model: Path) -> Iterator[Server]:
    with Server("--dtype", "float32", model=str(judge_model)) as server:
        yield server


@pytest.fixture(scope="module")
def vectors() -> Iterator[Server]:
    with Server("--runner", "pooling", "--dtype", "float32") as server:
        yield server


def classifier(directory: Path, labels: int, **config: Any) -> Path:
    """The embedded model with a head of scores."""
    shutil.copytree(resolve_model(None), directory)
    raw = json.loads((directory / "config.json").read_text())
    kind = raw["architectures"][0].replace("ForCausalLM", "ForSequenceClassification")
    names = {str(number): f"label {number}" for number in range(labels)}
    changed = raw | {"architectures": [kind], "id2label": names, "pad_token_id": 0, **config}
    (directory / "config.json").write_text(json.dumps(changed))
    tensors = load_file(directory / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    tensors["score.weight"] = torch.randn(labels, raw["hidden_size"], generator=torch.manual_seed(3)) / 8
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def scores_of(directory: Path, rows: list[list[int]]) -> torch.Tensor:
    """[texts, labels], by transformers."""
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        return torch.cat([model(torch.tensor([row])).logits for row in rows])


def ask(server: Server, path: str, **body: Any) -> dict[str, Any]:
    answer = server.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def said(server: Server, model: Path, documents: list[str], instruction: str | None = None) -> list[float]:
    """By transformers: the likelihood of the second token of the two."""
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    words = [server.http.post("/tokenize", json={"prompt": word}).json()["tokens"] for word in ("a", "I")]
    scores = []
    for document in documents:
        text = QWEN3_RERANKER.template
        for name, value in (
            ("{document}", document),  # (the last one first: what it has of the others' names is text)
            ("{instruction}", instruction or QWEN3_RERANKER.instruction),
        ):
            text = text.replace(name, value, 1)
        text = text.replace("{query}", QUERY, 1)
        ids = server.http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()[
            "tokens"
        ]
        with torch.no_grad():
            logits = reference(torch.tensor([ids])).logits[0, -1]
        no, yes = (logits[word[0]].item() for word in words)
        scores.append(1 / (1 + math.exp(no - yes)))
    return scores


def test_a_judge_gives_what_transformers_gives(judge: Server, judge_model: Path) -> None:
    expected = said(judge, judge_model, DOCUMENTS)
    scores = ask(judge, "/score", text_1=QUERY, text_2=DOCUMENTS)
    assert [item["score"] for item in scores["data"]] == pytest.approx(expected, abs=1e-4)
    assert len(set(expected)) == len(expected)
    order = sorted(range(len(expected)), key=lambda index: -expected[index])
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        found = ask(
            judge, path, query=QUERY, documents=[*DOCUMENTS[:2], *({"text": t} for t in DOCUMENTS[2:])]
        )
        assert [item["index"] for item in found["results"]] == order
        assert [item["document"]["text"] for item in found["results"]] == [DOCUMENTS[i] for i in order]
    best = ask(judge, "/rerank", query=QUERY, documents=DOCUMENTS, top_n=2, return_documents=False)
    assert [item["index"] for item in best["results"]] == order[:2]
    assert "document" not in best["results"][0]
    other = ask(judge, "/score", queries=[QUERY], documents=DOCUMENTS[:2], instruction="Count the words")
    assert [item["score"] for item in other["data"]] == pytest.approx(
        said(judge, judge_model, DOCUMENTS[:2], "Count the words"), abs=1e-4
    )
    cut = ask(judge, "/score", text_1=QUERY, text_2="word " * 5000, truncate_prompt_tokens=-1)
    assert 0 < cut["data"][0]["score"] < 1
    refused = judge.http.post("/v1/embeddings", json={"input": "a"})
    assert refused.json()["error"]["param"] == "model"


def test_vectors_give_their_cosines(vectors: Server) -> None:
    answer = ask(vectors, "/v1/embeddings", input=[QUERY, *DOCUMENTS])
    query, *documents = (np.array(item["embedding"]) for item in answer["data"])
    expected = [float(query @ document) for document in documents]
    scores = ask(vectors, "/v1/score", text_1=QUERY, text_2=DOCUMENTS)
    assert [item["score"] for item in scores["data"]] == pytest.approx(expected, abs=1e-5)
    assert scores["usage"]["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    pairs = ask(vectors, "/score", text_1=[QUERY] * 4, text_2=DOCUMENTS)
    assert [item["score"] for item in pairs["data"]] == pytest.approx(expected, abs=1e-5)
    ranked = ask(vectors, "/rerank", query=QUERY, documents=DOCUMENTS)["results"]
    assert [item["relevance_score"] for item in ranked] == pytest.approx(
        sorted(expected, reverse=True), abs=1e-5
    )
    refused = vectors.http.post("/v1/completions", json={"prompt": "a"}).json()["error"]
    assert "generates no text" in refused["message"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/rerank", {"documents": ["a"]}, "query"),
        ("/rerank", {"query": "a"}, "documents"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"] * 5000}, "documents"),
        ("/rerank", {"query": "a", "documents": ["word " * 5000]}, "documents"),
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1"),
        ("/score", {"text_1": "a", "queries": "b", "text_2": ["c"]}, "text_1"),
    ],
)
def test_what_cannot_be_ranked_is_refused_by_name(
    vectors: Server, path: str, body: dict[str, Any], field: str
) -> None:
    answer = vectors.http.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


def test_a_model_without_these_tokens_says_so_at_the_start() -> None:
    with pytest.raises(RuntimeError, match="classifier_from_token"):
        Server("--convert", "classify", "--runner", "pooling").stop()


def test_scores_in_python(judge_model: Path, judge: Server) -> None:
    import baton

    expected = [item["score"] for item in ask(judge, "/score", text_1=QUERY, text_2=DOCUMENTS)["data"]]
    with baton.LLM(str(judge_model), dtype="float32") as llm:
        found = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
        assert [one.outputs.score for one in found] == expected
        with pytest.raises(ValueError, match="data_1"):
            llm.score(["a", "b"], DOCUMENTS, use_tqdm=False)


def test_a_head_of_one_label_scores_pairs(tmp_path: Path) -> None:
    model = classifier(tmp_path / "model", 1)
    with Server("--dtype", "float32", model=str(model)) as server:
        texts = [QUERY + document for document in DOCUMENTS]
        rows = [server.http.post("/tokenize", json={"prompt": text}).json()["tokens"] for text in texts]
        raw = scores_of(model, rows)[:, 0]
        found = [item["score"] for item in ask(server, "/score", text_1=QUERY, text_2=DOCUMENTS)["data"]]
        assert found == pytest.approx(torch.sigmoid(raw).tolist(), abs=1e-4)
        assert max(found) - min(found) > 1e-3
        plain = ask(server, "/score", text_1=QUERY, text_2=DOCUMENTS, use_activation=False)["data"]
        assert [item["score"] for item in plain] == pytest.approx(raw.tolist(), abs=1e-4)
        ranked = ask(server, "/rerank", query=QUERY, documents=DOCUMENTS)["results"]
        assert [item["index"] for item in ranked] == sorted(range(4), key=lambda index: -found[index])
        classes = ask(server, "/classify", input=texts)
        assert [item["probs"] for item in classes["data"]] == [[score] for score in found]
        assert {(item["label"], item["num_classes"]) for item in classes["data"]} == {("label 0", 1)}
        assert classes["usage"]["prompt_tokens"] == sum(map(len, rows))
        again = ask(server, "/classify", input=rows, use_activation=False)
        assert [item["probs"][0] for item in again["data"]] == pytest.approx(raw.tolist(), abs=1e-4)
        refused = server.http.post("/v1/embeddings", json={"input": "a"}).json()["error"]
        assert (refused["param"], refused["code"]) == ("model", "unsupported_task")
        assert server.http.post("/v1/completions", json={"prompt": "a"}).status_code == 400


def test_labels_in_python(tmp_path: Path) -> None:
    model = classifier(tmp_path / "model", 3)
    llm = LLM(str(model), dtype="float32")
    found = llm.classify(DOCUMENTS)
    raw = scores_of(model, [one.prompt_token_ids for one in found])
    expected = torch.softmax(raw, 1)
    torch.testing.assert_close(
        torch.tensor([one.outputs.probs for one in found]), expected, atol=1e-4, rtol=0
    )
    with pytest.raises(ValueError, match="3 labels, not one"):
        llm.score(QUERY, DOCUMENTS)


def test_what_makes_no_sense_for_a_head_of_scores_is_refused(tmp_path: Path) -> None:
    model = str(classifier(tmp_path / "model", 2))
    for options, says in (
        ({"runner": "generate"}, "--runner generate: this model has a head of scores"),
        ({"pooler_config": '{"pooling_type": "MEAN"}'}, "--pooler-config: "),
    ):
        with pytest.raises(OptionError, match=says):
            make_plan(EngineOptions(model=model, **options))
    assert make_plan(EngineOptions(model=model)).served.tasks == {"classify"}
    assert make_plan(EngineOptions(model=model, convert="embed")).served.tasks == {"embed", "score"}
    assert make_plan(EngineOptions(model=model)).served.activation == "softmax"
    plain = EngineOptions(model=model, pooler_config='{"use_activation": false}')
    assert make_plan(plain).served.activation == "identity"
