"""Steps of the executor on a CUDA device that is not there: each kernel is given tensors on the device, and
nothing that a step launches ahead reads from it (`fake_device`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.executor.base import StepBatch
from baton.executor.streams.staging import Staging
from baton.executor.torch_late import LateTorchExecutor
from baton.model.attention import AttentionStep
from baton.model.ops import triton
from baton.protocol.params.sampling import Sampling, Stopping
from tests.gpu.fake_device import DEVICE, executor_of_two, executor_there, fake_device, ints
from tests.model.checkpoints import make_checkpoint
from tests.model.cuda.where import ON_CPU, THERE

pytestmark = [
    pytest.mark.skipif(not THERE, reason="Triton is not installed: pip install 'baton-llm[cuda]'"),
    pytest.mark.skipif(not ON_CPU, reason="there is a real device"),
]
TABLES = np.arange(8, dtype=np.int32).reshape(2, 4)


def batch(starts: tuple[int, int], counts: tuple[int, int], carried: bool = False) -> StepBatch:
    decodes = sum(count == 1 for count in counts)
    tokens = np.full(sum(counts), -1 if carried else 5, np.int32)
    return StepBatch(
        step=1,
        slots=ints(0, 1),
        starts=ints(*starts),
        counts=ints(*counts),
        tokens=tokens,
        samples=np.ones(2, np.bool_),
        block_tables=TABLES,
        num_decodes=decodes,
        carried=np.ones(2, np.bool_) if carried else None,
    )


def steps(executor: LateTorchExecutor, launched: list[str]) -> list[list[str]]:
    """Prompts, a chunk beside a decode row, decode steps of which two are in flight: what each launches."""
    for slot in range(2):
        wish = Sampling(seed=slot, temperature=0.9 * slot, top_k=20, top_p=0.9)
        executor.admit(slot, ints(5, 6, 7), 3, wish, Stopping(max_tokens=20))
    found = []
    for one in (
        batch((0, 0), (9, 4)),
        batch((9, 4), (1, 3)),
        batch((10, 7), (1, 1)),
        batch((11, 8), (1, 1), True),
    ):
        before = len(launched)
        executor.launch(one)
        found.append(launched[before:])
        if one.carried is None:
            executor.collect()
    executor.collect()
    return found


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("llama3", {}),
    "qwen3, head norms, KV in 8 bits": ("qwen3", {"kv_cache_dtype": "int8"}),
    "windows and a soft-cap": ("gemma2-odd", {}),
    "biases": ("qwen2", {}),
    "eager": ("llama3", {"enforce_eager": True}),
    "deterministic": ("llama3", {"deterministic": True}),
    "int4": ("llama2", {"quantization": "int4", "quantization_group_size": 32}),
    "int8 in groups": ("llama2", {"quantization": "int8", "quantization_group_size": 32}),
    "int8": ("llama2", {"quantization": "int8"}),
}


@pytest.mark.parametrize(("variant", "changes"), CASES.values(), ids=CASES.keys())
def test_everything_is_where_it_belongs(
    variant: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    make_checkpoint(tmp_path, variant)
    with fake_device(monkeypatch) as launched:
        executor = executor_there(tmp_path, **changes)
        assert executor.one_step_late, executor.why_waits
        found = steps(executor, launched)
    for names in found:
        assert {"turn_and_store_kernel", "attend_kernel", "add_norm_kernel", "choose_kernel"} <= set(names)
        assert any(name in ("product_kernel", "int8_kernel") for name in names) == (
            {"quantization", "deterministic"} & set(changes) != set()
        )


@pytest.mark.parametrize("variant", ["llama3", "gemma2-odd", "qwen2"])
def test_pytorchs_operators_have_everything_there(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Where Triton does not serve.  (Such a device samples with numbers, which this one has not.)"""
    make_checkpoint(tmp_path, variant)
    with fake_device(monkeypatch) as launched:
        monkeypatch.setattr(triton, "serve", lambda device: False)
        executor = executor_there(tmp_path)
        assert executor.why_waits == "PyTorch samples"
        for starts, counts in (((0, 0), (9, 4)), ((9, 4), (1, 3)), ((10, 7), (1, 1)), ((11, 40), (1, 1))):
            decodes, tokens = sum(count == 1 for count in counts), np.full(sum(counts), 5, np.int32)
            step = AttentionStep(ints(*starts), ints(*counts), TABLES, decodes)
            with torch.inference_mode():
                _, logits = executor._model(tokens, step, np.cumsum(counts) - 1)
            assert logits is not None
            assert logits.device == DEVICE
    assert launched == []


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_two_ranks_send_the_same_in_the_same_order(
    enforce_eager: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """From the device's memory, and rank 0 alone samples; a graph ends with the tokens on both."""
    make_checkpoint(tmp_path, "llama3", num_hidden_layers=2)
    sent, chosen = [], []
    for rank in range(2):
        with monkeypatch.context() as patch, fake_device(patch) as launched:
            executor, group = executor_of_two(patch, tmp_path, rank, enforce_eager=enforce_eager)
            assert executor.one_step_late, executor.why_waits
            found = steps(executor, launched)
            assert bool(executor._graphs is not None and executor._graphs._graphs) == (not enforce_eager)
            executor.close()
        sent.append(group.sent)
        chosen.append([sum(name == "choose_kernel" for name in names) for names in found])
    assert sent[0] == sent[1]
    step = ["all-reduce"] * 5 + ["gather", "broadcast"]  # (the embedding, two layers)
    # (The first replayed step is run for practice before.)
    assert [what for what, _, _ in sent[0]] == step * (4 if enforce_eager else 5)
    assert all(chosen[0])
    assert not any(chosen[1])


def test_what_stays_on_the_host_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Positions that are not brought to the device."""
    make_checkpoint(tmp_path, "llama3")

    def put(staging: Staging, array: np.ndarray) -> torch.Tensor:
        found = true(staging, array)
        return torch.from_numpy(array.copy()) if array.dtype == np.int32 and array.ndim == 1 else found

    true = Staging.put
    monkeypatch.setattr(Staging, "put", put)
    with fake_device(monkeypatch) as launched:
        executor = executor_there(tmp_path)
        with pytest.raises((AssertionError, RuntimeError), match=r"is on cpu|same device|an index on cpu"):
            steps(executor, launched)
