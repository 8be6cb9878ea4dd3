"""int8: exact integer sums, errors as small as the rounding allows, whole models close to bf16."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import baton
from baton.executor.loading import create_executor
from baton.executor.torch_executor import ExecutorError
from baton.model.cpu.library import instruction_sets, load
from baton.model.cpu.linear import NativeInt8Product, serves
from baton.model.layers.int8 import Int8Product, why_not_int8, why_not_onednn_int8
from baton.model.ops.fused import FusedOps
from baton.model.weights.quantized import Quantized, quantize_activations, quantize_rows
from baton.protocol.params.sampling import Sampling
from tests.executor.driver import Driver
from tests.executor.test_torch_parity import config_for, prompt_of, same_in_a_crowd
from tests.model.checkpoints import make_checkpoint

DTYPES = [torch.float32, torch.bfloat16]
KINDS = [*([build for build in instruction_sets() if serves(load(build), torch.int8)] or [""]), "onednn"]
pytestmark = pytest.mark.skipif(bool(why_not_int8()), reason=why_not_int8() or "-")


def product_of(kind: str, weight: torch.Tensor, bias: torch.Tensor | None):
    if kind == "onednn":
        if why_not_onednn_int8():
            pytest.skip(why_not_onednn_int8())
        return Int8Product(weight, bias, FusedOps(True))
    if not kind:
        pytest.skip("the native kernel does not serve here")
    return NativeInt8Product(load(kind), weight, bias)


@pytest.mark.parametrize("dtype", DTYPES)
def test_quantizing_changes_nothing_by_more_than_half_a_step(dtype: torch.dtype) -> None:
    x = torch.randn(20, 100).to(dtype)
    x[3] = 0
    before = x.clone()
    found = quantize_activations(x)
    assert torch.equal(x, before)
    back = (found.values.float() - 128) * found.scales.unsqueeze(1)
    assert ((back - x.float()).abs() <= found.scales.unsqueeze(1) * 0.501).all()
    values, scales = quantize_rows(x)
    assert torch.equal(x, before)
    assert ((values.float() * scales.unsqueeze(1) - x.float()).abs() <= scales.unsqueeze(1) * 0.501).all()
    assert int(values.abs().max()) == 127


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(96, 64), (197, 64), (50, 66), (320, 1032)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_product_is_the_sum_of_the_integers(
    kind: str, dtype: torch.dtype, shape: tuple[int, int], with_bias: bool
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape).to(dtype)
    bias = torch.randn(shape[0]).to(dtype) if with_bias else None
    product = product_of(kind, weight, bias)
    values, scales = quantize_rows(weight)
    for tokens in (1, 2, 13, 40):
        x = quantize_activations(torch.randn(tokens, shape[1]).to(dtype))
        sums = (x.values.double() - 128) @ values.double().t()
        exact = sums * scales.double() * x.scales.double().unsqueeze(1)
        exact += 0 if bias is None else bias.double()
        found = FusedOps(True).dequantize(product.multiply(x))
        assert found.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance * 4)


@pytest.mark.parametrize("inputs", [64, 6001])  # of the latter, 400 rows are several chunks
def test_every_number_of_rows_gives_every_output(inputs: int) -> None:
    torch.manual_seed(3)
    product = product_of(KINDS[0], torch.randn(70, inputs).bfloat16(), None)
    x = quantize_activations(torch.randn(400, inputs))
    single = torch.cat(
        [product.multiply(Quantized(x.values[t : t + 1], x.scales[t : t + 1])) for t in range(400)]
    )
    for tokens in (0, *range(2, 40), 63, 64, 65, 131, 257, 400):
        assert torch.equal(product.multiply(Quantized(x.values[:tokens], x.scales[:tokens])), single[:tokens])


def logprobs_of(directory: Path, prompt: list[int], **changes) -> np.ndarray:
    executor = create_executor(config_for(directory, **changes), 0, "")
    try:
        driver = Driver(executor, chunk=37)
        request = driver.add(prompt, 4, Sampling(0, 0.0, prompt_logprobs=0))
        driver.run()
        return np.array([report.logprob for report in request.prompt_logprobs])
    finally:
        executor.close()


@pytest.mark.parametrize("variant", ["llama2", "qwen3", "llama-biased-linear"])
def test_random_models_stay_close(variant: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, variant)
    prompt = prompt_of(60)
    exact = logprobs_of(tmp_path, prompt)
    found = logprobs_of(tmp_path, prompt, quantization="int8")
    half = logprobs_of(tmp_path, prompt, quantization="int8", dtype="bfloat16")
    assert 1e-5 < np.abs(found - exact).mean() < 0.1
    assert np.abs(half - exact).mean() < 0.15


def test_the_embedded_model_knows_its_text_as_well_in_int8() -> None:
    """Perplexity over a text that it produced itself; `tools/int8_accuracy.py` says more."""
    directory = Path(baton.__file__).parent / "assets" / "baton-tiny"
    executor = create_executor(config_for(directory), 0, "")
    driver = Driver(executor)
    request = driver.add([0, 50, 60, 70], 120)
    driver.run()
    executor.close()
    text = request.all_tokens
    exact = logprobs_of(directory, text, dtype="bfloat16")
    found = logprobs_of(directory, text, dtype="bfloat16", quantization="int8")
    assert abs(found.mean() - exact.mean()) < 0.05


def test_rows_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3")
    executor = create_executor(config_for(tmp_path, quantization="int8", dtype="bfloat16"), 0, "")
    assert "int8" in executor.info.detail
    same_in_a_crowd(executor)
    executor.close()


def test_what_int8_is_not_for(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama2")
    with pytest.raises(ExecutorError):
        create_executor(config_for(tmp_path, quantization="int8", device="cuda"), 0, "")
