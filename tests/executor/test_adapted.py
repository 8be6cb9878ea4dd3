"""Models that classes of transformers compute, on Baton's KV pool: against transformers, and native ones."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.executor.torch_executor import TorchExecutor
from baton.model import attention
from baton.model.adapted import interface, probe
from baton.model.adapted.decoder import AdaptedDecoder
from baton.model.cpu import steps
from baton.model.description.fields import UnsupportedModel
from baton.model.layers import packed, placement
from tests.executor import test_torch_parity as parity
from tests.executor.driver import Driver
from tests.executor.test_torch_parity import config_for, prompt_of
from tests.model.checkpoints import ADAPTED, make_checkpoint

NATIVE = ("llama3", "qwen3", "gemma2-odd", "phi3-long")
"""Families that Baton has too, with what is hard there: factors of embeddings, caps, windows, rotaries."""
FORMS: list[tuple[str, dict[str, Any]]] = [
    ("stablelm-odd", {"dtype": "bfloat16"}),
    ("stablelm-odd", {"dtype": "float32", "num_threads": 2}),
    ("gpt2", {"dtype": "bfloat16", "quantization": "int8"}),
    ("stablelm", {"dtype": "bfloat16", "quantization": "int4", "quantize_head": 8}),
    ("gpt-neox", {"dtype": "bfloat16", "kv_cache_dtype": "int8"}),
]


@pytest.fixture(scope="module", params=[*ADAPTED, *NATIVE])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(executor, reference) of one family."""
    directory = tmp_path_factory.mktemp(request.param)
    model = make_checkpoint(directory, request.param)
    executor = TorchExecutor.from_config(config_for(directory, model_impl="transformers"), 0, "")
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


@pytest.mark.parametrize(("family", "settings"), FORMS)
def test_answers_do_not_depend_on_company(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family)
    executor = TorchExecutor.from_config(config_for(tmp_path, **settings), 0, "")
    parity.same_in_a_crowd(executor)
    executor.close()


def test_by_pytorch_alone_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products with numbers of rows that agree, attention in pieces."""
    for where in (placement, packed, steps):
        monkeypatch.setattr(where, "native", lambda: None)
    monkeypatch.setattr(attention, "_kernels", lambda shape: None)
    make_checkpoint(tmp_path, "stablelm-odd")
    executor = TorchExecutor.from_config(config_for(tmp_path), 0, "")
    parity.same_in_a_crowd(executor)
    executor.close()


@pytest.mark.parametrize(
    ("forward", "says"),
    [
        (lambda y: torch.roll(y, 1, 1), "StableLmMLP computes 'roll' outside of attention and products"),
        (lambda y: y - y.mean(1, keepdim=True), "StableLmMLP computes 'mean' outside of attention and prod"),
        (lambda y: torch.matmul(y, y.transpose(1, 2)) @ y, "StableLmMLP computes 'bmm' outside of attention"),
        (
            lambda y: torch.cat((y[:, :1], y[:, :-1]), 1),
            "results of a token depend on the tokens that its step computes beside it",
        ),
        (
            lambda y: y / y.shape[1],
            "results of a token depend on the tokens that its step computes beside it",
        ),
    ],
)
def test_what_mixes_tokens_outside_of_attention_is_refused(
    forward: Any, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.stablelm import modeling_stablelm

    make_checkpoint(tmp_path, "stablelm")
    kind = modeling_stablelm.StableLmMLP
    usual = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: forward(usual(self, x)))
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        TorchExecutor.from_config(config_for(tmp_path), 0, "")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"s_aux": torch.ones(3)}, "the sinks of StableLmAttention are not one of each head"),
        ({"alibi": torch.ones(4)}, "gives attention 'alibi', which Baton does not compute there"),
        ({"is_causal": False}, "StableLmAttention sees what comes after a token too"),
        ({"value": torch.ones(1, 2, 7, 8, device="meta")}, "differ in size: queries 16, keys 16, values 8"),
        ({"attention_mask": None}, "StableLmAttention has no causal mask, or one of its own"),
        ({"scaling": lambda layer: 1.0 + layer}, "differ in scale (1.0 and 2.0); Baton needs one of all"),
    ],
)
def test_what_attention_is_asked_for_is_computed_or_refused(
    change: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any weight is read."""
    make_checkpoint(tmp_path, "stablelm")
    (tmp_path / "model.safetensors").unlink()
    names = ("module", "query", "key", "value", "attention_mask")

    def asked(*args: Any, **more: Any) -> Any:
        given = dict(zip(names, args, strict=True)) | more
        layer = given["module"].layer_idx
        return probe.attention_told(**given | {k: v(layer) if callable(v) else v for k, v in change.items()})

    monkeypatch.setattr(interface, "attention_told", asked)
    with pytest.raises(UnsupportedModel, match=re.escape(says)) as caught:
        TorchExecutor.from_config(config_for(tmp_path), 0, "")
    assert str(tmp_path) in str(caught.value)
