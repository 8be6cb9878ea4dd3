"""`--deterministic`: a row has the same bits alone and beside others, products and experts included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from baton.executor.devices.kernels import kernels_of
from baton.executor.torch_executor import TorchExecutor
from baton.executor.weights.forms import ExecutorError
from baton.launch.limits import OptionError
from baton.launch.options.engine import EngineOptions
from baton.launch.planning.instance_config import instance_config
from baton.launch.planning.plan import make_plan
from baton.model.attention import AttentionStep
from baton.model.cuda.products.linear import TritonPlain
from baton.model.layers.layers import Matrix, VocabParallelEmbedding
from tests.model.checkpoints import VOCAB, make_checkpoint
from tests.model.cuda.where import DEVICE, serve


class Adding(TorchDispatchMode):
    """Operations of PyTorch that add up: on a CUDA device in an order that depends on the number of rows."""

    ADDING = ("cumsum", "sum", "mean", "mm", "addmm", "bmm", "linear", "_softmax", "_log_softmax")

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.found |= {name} & set(self.ADDING)
        return func(*args, **(kwargs or {}))


def test_a_row_has_the_same_bits_alone_and_in_company(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of a mixture, whose router, experts and head are products like all others."""
    make_checkpoint(tmp_path, "qwen3-moe", num_hidden_layers=1)
    serve(monkeypatch)
    sizes = dict(max_model_len=32, block_size=8, num_blocks=12, max_num_seqs=3, num_threads=1)
    config = instance_config(
        model=str(tmp_path), device=DEVICE.type, dtype="float16" if DEVICE.type == "cuda" else "float32",
        deterministic=True, **sizes,
    )  # fmt: skip
    executor = TorchExecutor.from_config(config, 0, "")
    model = executor._model
    layers = [layer for layer in model.layers_within() if isinstance(layer, (Matrix, VocabParallelEmbedding))]
    for product in (layer.product for layer in layers if layer.product is not None):
        assert isinstance(product, TritonPlain)
        assert product._fixed
    assert isinstance(model.mixtures[0].router.product, TritonPlain)
    numbers = np.random.default_rng(1)
    rows = [numbers.integers(3, VOCAB, count).astype(np.int32) for count in (5, 9, 3)]

    def logits_of(chosen: list[int]) -> torch.Tensor:
        counts = np.array([len(rows[row]) for row in chosen], np.int32)
        tables = np.array([[1 + 2 * row, 2 + 2 * row] for row in chosen], np.int32)
        step = AttentionStep(np.zeros_like(counts), counts, tables, 0)
        with torch.inference_mode():
            logits = model(np.concatenate([rows[row] for row in chosen]), step)[1]
        assert logits is not None
        return logits.clone()

    with Adding() as adding:
        alone = logits_of([1])
    assert adding.found == set()
    assert torch.equal(logits_of([0, 1, 2])[5:14], alone)
    executor.close()


def test_where_it_cannot_be_kept_it_is_refused():
    options = EngineOptions(deterministic=True, device="cuda", tensor_parallel_size=2)
    with pytest.raises(
        OptionError, match="--deterministic: with --tensor-parallel-size 2 NCCL adds up terms"
    ):
        make_plan(options)
    for drafts in ({"speculation": "ngram"}, {"overlap_steps": "off"}):
        with pytest.raises(OptionError, match=r"a row with drafts .* give --speculation off"):
            make_plan(EngineOptions(deterministic=True, device="cuda", **drafts))
    config = instance_config(model="", max_model_len=32, device="cuda", deterministic=True)
    with pytest.raises(ExecutorError, match="deterministic: only Triton's kernels"):
        kernels_of(config, torch.device("meta"))  # (which has none)
    on_cpu = instance_config(model="", max_model_len=32, device="cpu", deterministic=True)
    assert kernels_of(on_cpu, torch.device("cpu")) is None  # always so


def test_instances_of_both_kinds_do_not_continue_each_other():
    options = [EngineOptions(device="cuda", deterministic=kind) for kind in (False, True)]
    plain, fixed = (make_plan(each).served.dtype for each in options)
    assert fixed == f"{plain}+deterministic"
    on_cpu = EngineOptions(device="cpu", dtype="float32", deterministic=True)
    assert make_plan(on_cpu).served.dtype == "float32"
