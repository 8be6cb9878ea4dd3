"""Logits are the head's sums in float32, whatever the model computes in: nothing rounds them, so what a
request gets has no ties, and no steps, that the model's own numbers do not have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from baton.executor.torch_executor import TorchExecutor
from baton.model.attention import AttentionStep
from baton.model.cpu.library import instruction_sets, load, native
from baton.model.cpu.linear import NativeInt8Product, NativeProduct
from baton.model.layers.grouped import grouped_product
from baton.model.layers.int8 import Int8Product, why_not_int8, why_not_onednn_int8
from baton.model.layers.packed import WideProduct
from baton.model.ops.fused import FusedOps
from baton.model.weights.group_rows import quantize_in_blocks
from baton.model.weights.quantize import quantize as in_groups
from baton.model.weights.quantized import quantize_activations, quantize_rows
from baton.protocol.params.sampling import Sampling
from tests.executor.driver import Driver
from tests.executor.test_torch_parity import config_for
from tests.model.checkpoints import make_checkpoint
from tests.model.cuts import BACKENDS, backend

VOCAB = 1003
"""In bfloat16 a third of so many logits would be equal to others."""
BF16 = torch.bfloat16
HEADS = {
    "llama2": {},
    "llama3": {},  # (tied)
    "gemma2": {"final_logit_softcapping": 3.0},
    "granite": {"logits_scaling": 8.0},
}
ADAPTED = {
    "stablelm": {},
    "phi": {},  # (a bias)
    "cohere2": {"logit_scale": 0.7},
}


def made(
    directory: Path, variant: str, changes: dict[str, Any], **settings: Any
) -> tuple[TorchExecutor, Any]:
    """An executor in bfloat16, and the class of transformers with the same weights."""
    model = make_checkpoint(directory, variant, dtype=BF16, vocab_size=VOCAB, **changes)
    config = config_for(directory, **{"dtype": "bfloat16", **settings})
    return TorchExecutor.from_config(config, 0, ""), model


def computed(executor: TorchExecutor, tokens: np.ndarray) -> tuple[Tensor, Tensor]:
    """A prompt's states that the head takes, and its logits."""
    blocks = np.arange(-(-len(tokens) // executor.info.block_size), dtype=np.int32)[None]
    step = AttentionStep(np.zeros(1, np.int32), np.array([len(tokens)], np.int32), blocks, 0)
    with torch.inference_mode():
        hidden, logits = executor._model(tokens, step, None)
        assert logits is not None
        return executor._model.final(hidden.clone()), logits.clone()


def expected(states: Tensor, model: Any) -> Tensor:
    """What the model's head makes of these states, in float64."""
    config, head = model.config, model.get_output_embeddings()
    with torch.no_grad():
        logits = states.double() @ head.weight.double().t()
        if getattr(head, "bias", None) is not None:
            logits += head.bias.double()
    logits *= getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


def assert_exact(logits: Tensor, exact: Tensor) -> None:
    """As near as sums in float32 are; as many different numbers in a row as there are."""
    assert logits.dtype == torch.float32
    error = (logits.double() - exact).abs().max() / exact.abs().max()
    assert error < 2e-6, "a bfloat16 errs by 2e-3, a float16 by 2e-4"
    assert_distinct(logits)


def assert_distinct(logits: Tensor) -> None:
    assert min(len(row.unique()) for row in logits) > VOCAB - 5


def prompt_of(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, VOCAB, length).astype(np.int32)


@pytest.mark.parametrize("variant", HEADS)
@pytest.mark.parametrize("name", BACKENDS)
def test_logits_are_the_sums_of_the_head(name: str, variant: str, tmp_path: Path) -> None:
    with backend(name):
        executor, model = made(tmp_path, variant, HEADS[variant])
        for length in (1, 7, 40):
            states, logits = computed(executor, prompt_of(length))
            assert_exact(logits, expected(states, model))
        executor.close()


@pytest.mark.parametrize("variant", ADAPTED)
def test_those_of_classes_of_transformers_too(variant: str, tmp_path: Path) -> None:
    settings = {"model_impl": "transformers"}
    executor, model = made(tmp_path, variant, ADAPTED[variant], **settings)
    states, logits = computed(executor, prompt_of(20))
    assert_exact(logits, expected(states, model))
    executor.close()


@pytest.mark.parametrize("name", BACKENDS)
def test_quantized_heads_do_not_round_either(name: str, tmp_path: Path) -> None:
    with backend(name):
        forms: list[dict[str, Any]] = [{"quantization": "int4", "quantize_head": 8}]
        forms += [] if why_not_int8() else [{"quantization": "int8"}]
        for form in forms:
            executor, _ = made(tmp_path, "llama3", {}, **form)
            _, logits = computed(executor, prompt_of(9))
            assert logits.dtype == torch.float32
            assert_distinct(logits)
            executor.close()


def test_what_requests_get_has_no_steps(tmp_path: Path) -> None:
    """Log-probabilities of answers and of prompts are those of the sums; greedy tokens are the sums' best."""
    executor, model = made(tmp_path, "llama2", {})
    driver = Driver(executor)
    request = driver.add(prompt_of(30).tolist(), 12, Sampling(0, 0.0, logprobs=VOCAB, prompt_logprobs=VOCAB))
    driver.run()
    states, _ = computed(executor, np.array(request.all_tokens, np.int32))
    exact = expected(states, model).log_softmax(-1)
    assert request.tokens == exact[29:-1].argmax(-1).tolist()
    for row, report in enumerate([*request.prompt_logprobs, *request.logprobs]):
        found = dict(report.best())
        assert len(set(found.values())) > VOCAB - 5
        ids = torch.tensor(list(found))
        torch.testing.assert_close(
            torch.tensor(list(found.values())).double(), exact[row, ids], atol=1e-4, rtol=0
        )
    executor.close()


def products() -> list[tuple[str, Any, Any]]:
    """Kind; makes a product of a bfloat16 weight, a bias and the dtype of results; makes what it takes."""

    def grouped(bits: int) -> Any:
        def make(weight: Tensor, bias: Tensor, result: torch.dtype) -> Any:
            return grouped_product(in_groups(weight, bits, 32), bias, BF16, None, result)

        return make

    def plain(rows: Tensor) -> Tensor:
        return rows

    found: list[tuple[str, Any, Any]] = [
        ("groups of 4 bits", grouped(4), quantize_in_blocks),
        ("groups of 8 bits", grouped(8), quantize_in_blocks),
    ]
    for isa in instruction_sets():
        library = load(isa)
        found += [
            (f"{isa}", lambda w, b, r, of=library: NativeProduct(of, w, b, None, r), plain),
            (
                f"{isa} int8",
                lambda w, b, r, of=library: NativeInt8Product(of, w, b, None, r),
                quantize_activations,
            ),
        ]
    if not why_not_onednn_int8():
        found.append(
            ("onednn int8", lambda w, b, r: Int8Product(w, b, FusedOps(True), r), quantize_activations)
        )
    return found


@pytest.mark.parametrize("kind", [kind for kind, *_ in products()])
def test_a_products_float32_is_what_its_bfloat16_was_rounded_from(kind: str) -> None:
    _, make, form = next(item for item in products() if item[0] == kind)
    torch.manual_seed(0)
    weight, bias = torch.randn(VOCAB, 160).to(BF16), torch.randn(VOCAB).to(BF16)
    for count in (1, 5, 40):
        rows = form(torch.randn(count, 160).to(BF16))
        wide = make(weight, bias.float(), torch.float32).multiply(rows)
        narrow = make(weight, bias, BF16).multiply(rows)
        assert (wide.dtype, narrow.dtype) == (torch.float32, BF16)
        assert_distinct(wide)
        if kind != "onednn int8":  # (which rounds before it scales and adds)
            assert torch.equal(wide.to(BF16), narrow)


def test_a_product_of_pytorch_widens_some_outputs_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weight, rows = torch.randn(VOCAB, 160).to(BF16), torch.randn(3, 160).to(BF16)
    bias = torch.randn(VOCAB)
    monkeypatch.setattr("baton.model.ops.wide._ELEMENTS", 160 * 100)
    found = WideProduct(weight, bias).multiply(rows)
    assert isinstance(found, Tensor)
    assert_exact(found, rows.double() @ weight.double().t() + bias)


def test_int8_heads_are_exact_for_the_bytes_that_they_take() -> None:
    if native() is None:
        pytest.skip("no native library")
    torch.manual_seed(0)
    weight, rows = torch.randn(VOCAB, 160).to(BF16), quantize_activations(torch.randn(3, 160).to(BF16))
    values, scales = quantize_rows(weight)
    library = native()
    assert library is not None
    found = NativeInt8Product(library, weight, None, None, torch.float32).multiply(rows)
    exact = (
        (rows.values.double() - 128) @ values.double().t() * scales.double() * rows.scales.double()[:, None]
    )
    assert_exact(found, exact)
