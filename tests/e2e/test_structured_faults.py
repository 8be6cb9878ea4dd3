"""Structured outputs under `kill -9`, hand-overs and preemptions: every answer is the one without them,
and valid.

`BATON_STRUCTURED=2000` asks so many requests over 100 schemas of a model of random weights (`make
soak-structured`); else a few of the embedded model.  `BATON_SEED` repeats a run as far as the machine does.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.model.checkpoint.hub import resolve_model
from tests.e2e.killing import Killing
from tests.e2e.mixed_requests import Ask
from tests.e2e.server import Server
from tests.e2e.test_disaggregation import CLUSTER, ask_all, clean_ledgers, learn_from

REQUESTS = int(os.environ.get("BATON_STRUCTURED", "0"))
SCHEMAS = 100 if REQUESTS else 8
SMALL_POOL = ("--num-gpu-blocks-override", "24", "--max-model-len", "512")
_WORDS = ("red", "green", "né", "a b", "😀", 'q"', "x_1", "")


def random_schema(rng: random.Random, depth: int = 0) -> Any:
    """Of all that can be enforced; answers stay short."""
    kinds = ["string", "word", "integer", "number", "null", "boolean", "enum", "format", "pattern", "const"]
    kind = rng.choice([*kinds, "object", "object", "array", "anyOf"] if depth < 3 else kinds)
    match kind:
        case "string":
            return {"type": "string", "maxLength": rng.randint(0, 9)}
        case "word":
            return {"type": "string", "minLength": 1, "maxLength": rng.randint(1, 4)}
        case "integer":
            low = rng.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 1000)}
        case "number":
            return {
                "type": "number",
                "minimum": rng.randint(-3, 3) / 4,
                "exclusiveMaximum": rng.randint(4, 90),
            }
        case "null" | "boolean":
            return {"type": kind}
        case "enum":
            return {"enum": [rng.choice(_WORDS), rng.randint(0, 9), None, rng.random() < 0.5]}
        case "format":
            return {"type": "string", "format": rng.choice(["date", "time", "ipv4", "uuid", "date-time"])}
        case "pattern":
            return {
                "type": "string",
                "pattern": rng.choice([r"^[a-c]{1,4}$", r"^(x|yy)-\d{2}$", r"^\S\s?\w$"]),
            }
        case "const":
            return {"const": {"k": [rng.randint(0, 9), rng.choice(_WORDS)]}}
        case "array":
            most = rng.randint(0, 4)
            least = rng.randint(0, most)
            return {
                "type": "array",
                "items": random_schema(rng, depth + 1),
                "minItems": least,
                "maxItems": most,
            }
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(2, 3))]}
    names = rng.sample(["a", "name", "ünï", "x y", "n1", 'q"'], rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": rng.random() < 0.1 and {"type": "integer", "minimum": 0, "maximum": 99},
    }


def make_asks(count: int, seed: int) -> tuple[list[Ask], list[Any]]:
    """Greedy and sampled, streamed and not, some with several answers and with penalties; and their
    schemas."""
    rng = random.Random(seed)
    schemas = [random_schema(rng) for _ in range(SCHEMAS)]
    for number in range(0, SCHEMAS, 2):  # long answers, whose growth the small pool has no room for
        item = random_schema(rng, 3)
        schemas[number] = {"type": "array", "items": item, "minItems": 10, "maxItems": 16}
    asks, kept = [], []
    for number in range(count):
        schema = schemas[number % len(schemas)]
        body: dict[str, Any] = {
            "prompt": " ".join(rng.choices(_WORDS[:4], k=rng.randint(1, 12))),
            "max_tokens": 150,
        }
        body |= (
            {"temperature": 0.0}
            if number % 2
            else {"temperature": rng.choice([0.7, 1.0, 1.5]), "seed": number}
        )
        if rng.random() < 0.2:
            body |= {"presence_penalty": 0.6, "frequency_penalty": 0.4}
        if rng.random() < 0.15:
            body["n"] = 2
        body["extra_body"] = {"return_token_ids": True, "structured_outputs": {"json": schema}}
        asks.append(Ask(number, False, rng.random() < 0.5, body))
        kept.append(schema)
    return asks, kept


def check_answers(asks: list[Ask], schemas: list[Any]) -> tuple[int, int]:
    """What ended by itself is valid.  Returns (answers that did, all)."""
    ended = total = 0
    for ask, schema in zip(asks, schemas, strict=True):
        valid = jsonschema_rs.validator_for(schema, validate_formats=True)
        for choice in ask.expected:
            total += 1
            assert choice.finish in ("stop", "length")
            if choice.finish == "stop":
                ended += 1
                assert valid.is_valid(json.loads(choice.text)), (schema, choice.text)
    return ended, total


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str | None:
    """None: the embedded model; else one of its shape that has learnt nothing."""
    if not REQUESTS:
        return None
    directory = tmp_path_factory.mktemp("random") / "model"
    shutil.copytree(resolve_model(None), directory)
    path = Path(directory) / "model.safetensors"
    torch.manual_seed(7)
    weights = {
        name: torch.randn(tensor.shape).mul_(0.05).to(tensor.dtype) if tensor.dim() > 1 else tensor
        for name, tensor in load_file(path).items()
    }
    save_file(weights, path, metadata={"format": "pt"})
    return str(directory)


@pytest.fixture
def single(request: pytest.FixtureRequest, model: str | None) -> Iterator[Server]:
    """One instance that nobody disturbs."""
    if model is None:
        yield request.getfixturevalue("server")
    else:
        with Server("--dtype", "float32", model=model) as running:
            yield running


@pytest.mark.slow
@pytest.mark.timeout(300 + REQUESTS * 3)
def test_every_answer_is_valid_and_the_same(single: Server, model: str | None) -> None:
    seed = int(os.environ.get("BATON_SEED", "11"))
    asks, schemas = make_asks(REQUESTS or 32, seed)
    learn_from(single, asks, at_once=8)
    ended, total = check_answers(asks, schemas)
    again = asks[: len(asks) // 2] if REQUESTS else asks[:16]
    with Server("--dtype", "float32", "--admission-headroom", "0", *SMALL_POOL, model=model) as small:
        wrong = ask_all(small, again, at_once=16)
        assert not wrong, "\n".join(wrong[:3])
        preempted = int(small.metric("baton:num_preemptions_total"))
    flags = ("--prefill", "1", "--decode", "2", "--max-restarts", "1000", *CLUSTER, *SMALL_POOL)
    with Server(*flags, model=model) as cluster:
        wrong = ask_all(cluster, again, at_once=16)
        assert not wrong, "\n".join(wrong[:3])
        killing = Killing(cluster, asks, random.Random(seed), 10 if REQUESTS else 1, at_once=16)
        killing.run()
        # (How soon what the dead held is free is test_handover_kill's.)
        wrong = [what for what in killing.wrong if what.startswith("request")]
        assert not wrong, "\n".join(wrong[:3])
        clean_ledgers(cluster)
        continued = int(cluster.metric("baton:requests_continued_total"))
        assert "Traceback" not in cluster.log(), cluster.log()
    print(
        f"{total} answers to {len(asks)} requests over {SCHEMAS} schemas, {ended} ended by themselves and "
        f"are valid; again beside {preempted} preemptions, {len(killing.done)} kills, {continued} "
        f"continuations: {killing.answers} right answers"
    )
    assert ended >= total // 3
