"""What requests may ask for beside tokens, on a GPU as on a CPU: grammars, penalties, log-probabilities,
stops, drafts by a model, embeddings.  The embedded model in float32: the same tokens everywhere.

The KV cache has what `--gpu-memory-utilization` measures, beside a server of the other tests.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from baton import LLM, SamplingParams
from baton.gateway.generation.outputs import RequestOutput
from baton.model.checkpoint.hub import EMBEDDED_MODEL
from baton.protocol.params.structured_outputs import StructuredOutputs
from tests.model.cuda.where import DEVICE, ON_CPU, ON_DEVICE

TEXT = "one two three four five six seven eight nine ten. "
PROMPTS = [TEXT * 4, "Repeat: " + TEXT * 3 + "Repeat: ", "The capital of France is", "x" * 40]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ada", "Grace"]},
        "born": {"type": "integer", "minimum": 1000, "maximum": 2999},
    },
    "required": ["name", "born"],
    "additionalProperties": False,
}
WISHES = [
    SamplingParams(max_tokens=30, temperature=0),
    SamplingParams(max_tokens=30, temperature=0.8, seed=7, top_p=0.9, logprobs=0),
    SamplingParams(max_tokens=30, temperature=0, repetition_penalty=1.2, frequency_penalty=0.3, logprobs=2),
    SamplingParams(max_tokens=30, temperature=0.6, seed=3, stop=["e "], min_tokens=5, min_p=0.02, n=2),
    SamplingParams(
        max_tokens=60, temperature=0, structured_outputs=StructuredOutputs(json=SCHEMA), logprobs=0
    ),
    SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, logit_bias={30: 2.0}, prompt_logprobs=0),
]
ON_GPU = {"device": "cuda", "gpu_memory_utilization": 0.1}
DRAFTING = {"method": "draft_model", "model": EMBEDDED_MODEL, "num_speculative_tokens": 4}


def llm(device: str, **options: Any) -> LLM:
    where = (
        ON_GPU if device == "cuda" else {"device": "cpu", "num_threads": 1, "kv_cache_memory_bytes": "8MiB"}
    )
    return LLM(dtype="float32", max_model_len=512, max_num_seqs=8, **where, **options)


def answers(device: str, **options: Any) -> list[RequestOutput]:
    """Of every wish for every prompt, all of them together."""
    with llm(device, **options) as model:
        prompts = [prompt for prompt in PROMPTS for _ in WISHES]
        return model.generate(prompts, WISHES * len(PROMPTS), use_tqdm=False)


def told(found: list[RequestOutput]) -> list[list[Any]]:
    """All that is no floating-point number."""
    return [
        [(part.token_ids, part.text, part.finish_reason, part.stop_reason) for part in output.outputs]
        for output in found
    ]


def log_probabilities(found: list[RequestOutput]) -> list[float]:
    """Of the tokens that were taken, and of prompts; -inf marks the border of two."""
    values: list[float] = []
    for output in found:
        for several in (output.prompt_logprobs, *(part.logprobs for part in output.outputs)):
            values += [entry.logprob for entry in several or [] if entry is not None]
            values.append(-math.inf)
    return values


@pytest.fixture(scope="module")
def expected() -> list[RequestOutput]:
    """A CPU's."""
    return answers("cpu", speculation="off")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"attention_backend": "torch"}, id="operators of PyTorch"),
        pytest.param({}, id="kernels", marks=ON_DEVICE),
        pytest.param({"enforce_eager": True}, id="eager", marks=ON_DEVICE),
        pytest.param({"speculation": "off"}, id="no drafts", marks=ON_DEVICE),
        pytest.param({"speculative_config": json.dumps(DRAFTING)}, id="a draft model", marks=ON_DEVICE),
        pytest.param({"deterministic": True, "speculation": "off"}, id="deterministic", marks=ON_DEVICE),
    ],
)
def test_all_that_requests_ask_for(options: dict[str, Any], expected: list[RequestOutput]) -> None:
    found = answers(DEVICE.type, **options)
    assert told(found) == told(expected)
    ours, theirs = log_probabilities(found), log_probabilities(expected)
    assert len(ours) > 400
    assert ours == pytest.approx(theirs, abs=1e-3)
    for number in range(4, len(found), len(WISHES)):
        assert json.loads(found[number].outputs[0].text)["name"] in ("Ada", "Grace")


def test_embeddings() -> None:
    if ON_CPU:
        pytest.skip("only on a GPU: `make gpu` (BATON_TEST_DEVICE=cuda)")
    told = []
    for device in ("cpu", "cuda"):
        with llm(device, runner="pooling") as model:
            told.append([output.outputs.embedding for output in model.embed(PROMPTS, use_tqdm=False)])
    for ours, theirs in zip(*told, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
