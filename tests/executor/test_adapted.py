"""Models that classes of transformers compute, on Baton's KV pool: against transformers, and native ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.executor.torch_executor import TorchExecutor
from baton.model.adapted.decoder import AdaptedDecoder
from tests.executor import test_torch_parity as parity
from tests.executor.driver import Driver
from tests.executor.test_torch_parity import config_for, prompt_of
from tests.model.checkpoints import ADAPTED, make_checkpoint

NATIVE = ("llama3", "qwen3", "gemma2-odd", "olmo3", "phi3-long")
"""Families that Baton has too, with what is hard there: factors of embeddings, caps, windows, rotaries."""
FORMS: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4", "quantize_head": 8},
    "int8 KV": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
}


@pytest.fixture(scope="module", params=[*ADAPTED, *NATIVE])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(executor, reference) of one family."""
    directory = tmp_path_factory.mktemp(request.param)
    model = make_checkpoint(directory, request.param)
    how = "transformers" if request.param in NATIVE else "auto"
    executor = TorchExecutor.from_config(config_for(directory, model_impl=how), 0, "")
    assert isinstance(executor._model, AdaptedDecoder)
    yield executor, model
    executor.close()


def test_it_is_what_transformers_gives(pair: Any) -> None:
    parity.test_three_hundred_tokens(pair)


def test_in_batches_and_chunks(pair: Any) -> None:
    parity.test_seven_requests_in_chunks_at_different_times(pair)


def test_with_a_prefix_and_after_a_preemption(pair: Any) -> None:
    parity.test_prefix_hit_reads_the_other_requests_blocks(pair)
    parity.test_resume_after_a_preemption(pair)


@pytest.mark.parametrize("family", NATIVE[:3])
def test_tokens_are_those_of_the_native_family(family: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family)
    found = []
    for how in ("baton", "transformers"):
        executor = TorchExecutor.from_config(config_for(tmp_path, model_impl=how), 0, "")
        assert isinstance(executor._model, AdaptedDecoder) == (how == "transformers")
        driver = Driver(executor, chunk=50)
        requests = [driver.add(prompt_of(300 - 90 * seed, seed), 48) for seed in range(3)]
        driver.run()
        found.append([request.tokens for request in requests])
        executor.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["stablelm", "stablelm-odd", "gpt2"])
def test_answers_do_not_depend_on_company(family: str, form: str, tmp_path: Path) -> None:
    settings = dict(FORMS[form])
    if family != "stablelm" and form == "int4":
        settings["quantization"] = None  # (107 inputs make no groups); the head has some
    make_checkpoint(tmp_path, family)
    executor = TorchExecutor.from_config(config_for(tmp_path, num_threads=2, **settings), 0, "")
    parity.same_in_a_crowd(executor)
    executor.close()
