"""The whole executor with weights in 4 and 8 bits by Triton's kernels, interpreted on a CPU.

Activations of weights in groups are not rounded: results are those of a model with the dequantized weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from baton.executor.torch_executor import TorchExecutor
from baton.executor.weights.forms import ExecutorError, groups_of, weights_form
from baton.launch.planning.instance_config import instance_config
from baton.model.attention import AttentionStep
from baton.model.checkpoint.config import ModelConfig
from baton.model.cuda.products.layout import INT4, INT8
from baton.model.cuda.products.linear import TritonGroups, TritonInt8
from baton.model.layers.layers import Matrix, VocabParallelEmbedding
from baton.model.ops.fused import PLAIN, Activations
from baton.model.weights.quantized import Quantized
from tests.executor.driver import Driver
from tests.model import quantized_checkpoints as files
from tests.model.checkpoints import VOCAB, make_checkpoint
from tests.model.cuda.where import DEVICE, serve

PROMPT = np.random.default_rng(1).integers(3, VOCAB, 9).astype(np.int32)


class Reference:
    """By `F.linear` with what a kernel's product multiplies by."""

    def __init__(self, product: TritonGroups | TritonInt8) -> None:
        self.form, self.bias = product.form, product.bias
        if isinstance(product, TritonGroups):
            self.weight = product.rows(torch.arange(product.out_features, device=DEVICE))
            self._order = product.order
        else:
            self.weight = product._values.float() * product._scales.unsqueeze(1)
            self._order = None

    def multiply(self, x: Activations) -> Tensor:
        if isinstance(x, Quantized):
            x = (x.values.float() - 128) * x.scales.unsqueeze(1)
        assert isinstance(x, Tensor)
        return F.linear(x if self._order is None else x[:, self._order], self.weight, self.bias)


def executor_of(directory: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> TorchExecutor:
    serve(monkeypatch)
    sizes = dict(max_model_len=32, dtype="float32", block_size=8, num_blocks=8, max_num_seqs=2, num_threads=1)
    return TorchExecutor.from_config(
        instance_config(model=str(directory), device=DEVICE.type, **sizes, **changes), 0, ""
    )


def products(executor: TorchExecutor) -> list[TritonGroups | TritonInt8]:
    layers = executor._model.layers_within()
    found = [layer.product for layer in layers if isinstance(layer, (Matrix, VocabParallelEmbedding))]
    assert all(isinstance(product, (TritonGroups, TritonInt8)) for product in found)
    return found  # type: ignore[return-value]


def logits_of(executor: TorchExecutor) -> Tensor:
    count, zero = np.array([len(PROMPT)], np.int32), np.zeros(1, np.int32)
    with torch.inference_mode():
        step = AttentionStep(zero, count, np.array([[1, 2]], np.int32), 0)
        logits = executor._model(PROMPT, step)[1]
    assert logits is not None
    return logits.clone()


def tokens_of(executor: TorchExecutor) -> list[int]:
    driver = Driver(executor)
    request = driver.add(PROMPT[:5].tolist(), 2)
    driver.run()
    return request.tokens


def check(executor: TorchExecutor) -> None:
    """Logits and tokens are the reference's."""
    found, tokens = logits_of(executor), tokens_of(executor)
    for layer in executor._model.layers_within():
        if isinstance(layer, (Matrix, VocabParallelEmbedding)):
            reference: Any = Reference(layer.product)  # type: ignore[arg-type]
            layer.product = reference
            if isinstance(layer, Matrix):
                layer.multiply = reference.multiply
    torch.testing.assert_close(found, logits_of(executor), atol=2e-4, rtol=2e-4)
    assert tokens_of(executor) == tokens


def test_quantized_while_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """v in 6 bits; head and embedding, which are one table, in 8."""
    make_checkpoint(tmp_path, "qwen3", num_hidden_layers=1)
    executor = executor_of(
        tmp_path, monkeypatch, quantization="int4", quantization_group_size=32, quantize_head=8
    )
    made = products(executor)
    assert all(isinstance(product, TritonGroups) and product.form is PLAIN for product in made)
    kinds = [[part.kind for part in product.parts] for product in made if isinstance(product, TritonGroups)]
    assert kinds == [[INT8], [INT4, INT8], [INT4], [INT4], [INT4]]
    assert "int4 in groups of 32, v in 6 bits, head in 8 bits" in executor.info.detail
    check(executor)
    executor.close()


def test_bytes_with_a_scale_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make_checkpoint(tmp_path, "llama2", num_hidden_layers=1)
    executor = executor_of(tmp_path, monkeypatch, quantization="int8")
    found = [layer.product for layer in executor._model.layers_within() if isinstance(layer, Matrix)]
    assert len(found) == 4
    assert all(isinstance(product, TritonInt8) for product in found)
    assert isinstance(executor._model.head.product, TritonInt8)
    tokens = logits_of(executor)
    for layer in executor._model.layers_within():
        if isinstance(layer, (Matrix, VocabParallelEmbedding)) and layer.product is not None:
            reference: Any = Reference(layer.product)  # type: ignore[arg-type]
            layer.product = reference
            if isinstance(layer, Matrix):
                layer.multiply = reference.multiply
    torch.testing.assert_close(tokens, logits_of(executor), atol=0.02, rtol=0.02)  # (a byte may differ)
    executor.close()


def in_act_order(module: str, weight: Tensor) -> Any:
    if module == "lm_head":
        return None
    made = files.in_order(weight, 4, 32, torch.float16)
    return made, files.gptq(made, 2)


def test_a_checkpoint_in_act_order_beside_a_head_that_is_not_quantized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    make_checkpoint(tmp_path, "llama2", num_hidden_layers=1)
    kind = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True}
    files.rewrite(tmp_path, {**kind, "checkpoint_format": "gptq_v2"}, in_act_order)
    executor = executor_of(tmp_path, monkeypatch)
    matrices = [layer for layer in executor._model.layers_within() if isinstance(layer, Matrix)]
    for layer in matrices:
        assert isinstance(layer.product, TritonGroups)
        assert layer.product.order is not None
    found, tokens = logits_of(executor), tokens_of(executor)
    for layer in matrices:
        reference: Any = Reference(layer.product)  # type: ignore[arg-type]
        layer.product, layer.multiply = reference, reference.multiply
    torch.testing.assert_close(found, logits_of(executor), atol=2e-4, rtol=2e-4)
    assert tokens_of(executor) == tokens
    executor.close()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"quantization": "int8"}, "quantization int8: only Triton's kernels"),
        ({"quantization": "int4", "quantization_group_size": 64}, "quantization int4: only Triton's kernels"),
        ({"quantize_head": 8, "quantization_group_size": 64}, "quantize_head 8: only Triton's kernels"),
    ],
)
def test_a_device_without_kernels_quantizes_nothing(tmp_path: Path, changes: dict[str, Any], reason: str):
    """(Which it would have to hold expanded.)"""
    make_checkpoint(tmp_path, "llama2", num_hidden_layers=1)
    model, device = ModelConfig.from_directory(tmp_path), torch.device("meta")  # neither a CPU nor served
    config = instance_config(model=str(tmp_path), device="cuda", max_model_len=32, **changes)
    refuses = groups_of if config.quantization_group_size else weights_form
    told: Any = model if refuses is groups_of else torch.bfloat16
    with pytest.raises(ExecutorError, match=reason):
        refuses(config, told, device)
    plain = instance_config(model=str(tmp_path), device="cuda", max_model_len=32)
    assert weights_form(plain, torch.bfloat16, device) == "plain"
    assert groups_of(plain, model, device) == {}
