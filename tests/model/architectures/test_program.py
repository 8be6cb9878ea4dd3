"""A step as one native call gives what the modules' own kernels give, one after the other, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.executor.torch_executor import TorchExecutor
from baton.model.attention import AttentionStep
from baton.model.cpu import kernels
from baton.model.cpu.library import native
from baton.model.cpu.linear import serves
from baton.model.decoder.program import OPERATIONS, Program
from tests.executor.test_torch_parity import config_for
from tests.model.checkpoints import MIXTURES, VARIANTS, VOCAB, make_checkpoint

BLOCK = 16
FORMS = (("float32", None), ("bfloat16", None), ("bfloat16", "int8"), ("float32", "int8"))
KV_INT8 = "kv int8"
NEEDS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}

pytestmark = pytest.mark.skipif(not serves(native(), torch.float32), reason="no native products here")


@dataclass
class Rows:
    """Rows of a step, each (tokens in its blocks already, tokens of the step)."""

    rows: list[tuple[int, int]]
    samples: list[int] | None = None
    """Rows whose last token wants logits; None: all tokens do."""
    num_decodes: int = 0


STEPS = (
    Rows([(0, 1), (0, 37), (0, 16)], [0, 2], 1),
    Rows([(1, 1), (37, 1), (16, 1)], None, 3),
    Rows([(2, 1), (38, 1), (17, 45)], [0, 1], 2),
    Rows([(39, 90)], []),
    Rows([(39, 1)], None, 1),
    Rows([(129, 13), (40, 7)]),
    Rows([(142, 1), (47, 1)], None, 2),
    Rows([(143, 1), (0, 33), (48, 5)], [0, 2], 1),
    Rows([(144, 1), (33, 9)], [0], 1),
)


def make(directory: Path, dtype: str, quantization: str | None) -> TorchExecutor:
    kv_int8 = quantization == KV_INT8
    quantization = None if kv_int8 else quantization
    if not serves(native(), NEEDS[quantization or dtype]):
        pytest.skip(f"no native products of {quantization or dtype} here")
    config = config_for(
        directory,
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype="int8" if kv_int8 else None,
        block_size=BLOCK,
        num_blocks=40,
        num_threads=2,
    )
    return TorchExecutor.from_config(config, 0, "")


def outcome(
    executor: TorchExecutor, with_program: bool, on_layers: bool = False, whole: bool = True
) -> list[torch.Tensor]:
    """Logits and, if `whole`, hidden states of all steps, and the pool at the end."""
    model, pool = executor._model, executor._pool.tensor
    with torch.inference_mode():
        pool.zero_()
        rng = np.random.default_rng(1)
        found: list[torch.Tensor] = []
        model._program = None if with_program else False
        for rows in STEPS:
            starts, counts = (np.array(column, np.int32) for column in zip(*rows.rows, strict=True))
            tokens = rng.integers(0, VOCAB, int(counts.sum())).astype(np.int32)
            tables = np.arange(len(starts) * 12, dtype=np.int32).reshape(-1, 12)
            step = AttentionStep(starts, counts, tables[:, :11], rows.num_decodes)
            wanted = None if rows.samples is None else np.cumsum(counts)[np.array(rows.samples, np.int64)] - 1
            done: list[int] = []
            hidden, logits = model(tokens, step, wanted, done.append if on_layers else None, whole)
            layers = range(1, model.config.num_layers + 1)
            assert done == (list(layers) if on_layers else [])
            assert isinstance(model._program, Program) == with_program
            found += [hidden.clone()] if whole else []
            found += [logits.clone()] if logits is not None and len(logits) else []
        return [*found, pool.clone()]


def check_same(executor: TorchExecutor) -> None:
    for whole in (True, False):
        expected = outcome(executor, False, whole=whole)
        assert all(torch.isfinite(tensor).all() for tensor in expected)
        for on_layers in (False, True):
            found = outcome(executor, True, on_layers, whole)
            assert [tensor.shape for tensor in found] == [tensor.shape for tensor in expected]
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant not in MIXTURES])
def test_one_call_gives_what_the_modules_give(variant: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, variant)
    for dtype, quantization in (*FORMS, ("bfloat16", KV_INT8), ("float32", KV_INT8)):
        if serves(native(), NEEDS[dtype if quantization in (None, KV_INT8) else quantization]):
            executor = make(tmp_path, dtype, quantization)
            check_same(executor)
            executor.close()


@pytest.mark.parametrize(("dtype", "quantization"), FORMS)
def test_other_weights_odd_sizes_and_pieces(
    dtype: str, quantization: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 72, "intermediate_size": 107, "head_dim": 18, "num_key_value_heads": 2}
    model = make_checkpoint(tmp_path / "first", "llama2", **sizes)
    monkeypatch.setattr(kernels, "PIECE_TOKENS", 2 * BLOCK)  # so that contexts of some blocks are cut
    executor = make(tmp_path / "first", dtype, quantization)
    check_same(executor)
    before = outcome(executor, True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    model.save_pretrained(tmp_path / "second")
    executor.update_weights(str(tmp_path / "second"))
    assert executor._model._program is None
    check_same(executor)
    assert not torch.equal(outcome(executor, True)[0], before[0])
    executor.update_weights(str(tmp_path / "first"))
    assert all(torch.equal(a, b) for a, b in zip(outcome(executor, True), before, strict=True))
    executor.close()


def test_measured_nanoseconds_are_of_the_operations(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3")
    executor = make(tmp_path, "float32", None)
    program = executor._model._program
    assert isinstance(program, Program)
    outcome(executor, True)
    program = executor._model._program
    assert isinstance(program, Program)
    assert not any(program.take_nanoseconds().values())
    program.measure()
    one = np.ones(1, np.int32)
    with torch.inference_mode():
        executor._model(one, AttentionStep(0 * one, one, np.zeros((1, 1), np.int32), 1))
    found = program.take_nanoseconds()
    assert [name for name in OPERATIONS if not found[name]] == ["quantize"]
    assert not any(program.take_nanoseconds().values())
    executor.close()
