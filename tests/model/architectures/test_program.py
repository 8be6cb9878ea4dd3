"""A step as one native call gives what the modules' own kernels give, one after the other, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.executor.torch_executor import TorchExecutor
from baton.model.attention import AttentionStep
from baton.model.cpu import kernels
from baton.model.cpu.library import native
from baton.model.cpu.linear import serves
from baton.model.decoder.coverage import in_pytorch, why_apart
from baton.model.decoder.decoder import Decoder
from baton.model.decoder.mixture import Mixture
from baton.model.decoder.program import Program, program_of
from baton.model.layers.packed import PlainProduct
from baton.model.ops.routing import Routed
from tests.executor.test_torch_parity import config_for
from tests.model.checkpoints import VARIANTS, VOCAB, make_checkpoint

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


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_one_call_gives_what_the_modules_give(variant: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, variant)
    for dtype, quantization in (*FORMS, ("bfloat16", KV_INT8), ("float32", KV_INT8)):
        if serves(native(), NEEDS[dtype if quantization in (None, KV_INT8) else quantization]):
            executor = make(tmp_path, dtype, quantization)
            check_same(executor)
            executor.close()


def test_mixtures_in_groups(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "ernie4_5-moe")
    settings = {"block_size": BLOCK, "num_blocks": 40, "num_threads": 2}
    dtype = "bfloat16" if serves(native(), torch.bfloat16) else "float32"  # (of the head)
    for group, kv in ((32, None), (64, "int8")):
        config = config_for(
            tmp_path,
            dtype=dtype,
            quantization="int4",
            quantization_group_size=group,
            kv_cache_dtype=kv,
            **settings,
        )
        executor = TorchExecutor.from_config(config, 0, "")
        check_same(executor)
        executor.close()


@pytest.mark.parametrize("variant", ["ernie4_5-moe-odd", "glm4-moe", "granite-moe"])
def test_experts_of_tokens_are_counted_and_told(variant: str, tmp_path: Path) -> None:
    """As the modules' own path in PyTorch, which gives the same but for roundings."""
    make_checkpoint(tmp_path, variant)
    executor = make(tmp_path, "float32", None)
    model = executor._model
    mixtures = [layer.mlp for layer in model.layers if isinstance(layer.mlp, Mixture)]
    chosen: list[list[torch.Tensor]] = []
    for mixture in mixtures:
        ids: list[torch.Tensor] = []
        chosen.append(ids)
        mixture._native = False

        def noted(x: torch.Tensor, route: Any = mixture.router, ids: list[torch.Tensor] = ids) -> Routed:
            found: Routed = route(x)
            ids.append(found.ids)
            return found

        mixture.router = noted  # type: ignore[assignment]
    before = [mixture.tokens.clone() for mixture in mixtures]
    expected = outcome(executor, False)
    counts = [mixture.tokens - first for mixture, first in zip(mixtures, before, strict=True)]
    executor.close()

    executor = make(tmp_path, "float32", None)
    model = executor._model
    found = outcome(executor, True)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(found[:-1], expected[:-1], strict=True))
    program = model._program
    assert isinstance(program, Program)
    program.record_chosen = True
    mixtures = [layer.mlp for layer in model.layers if isinstance(layer.mlp, Mixture)]
    before = [mixture.tokens.clone() for mixture in mixtures]
    counted = 0
    with torch.inference_mode():
        rng = np.random.default_rng(1)
        executor._pool.tensor.zero_()
        for number, rows in enumerate(STEPS):
            starts, lengths = (np.array(column, np.int32) for column in zip(*rows.rows, strict=True))
            tokens = rng.integers(0, VOCAB, int(lengths.sum())).astype(np.int32)
            tables = np.arange(len(starts) * 12, dtype=np.int32).reshape(-1, 12)
            # Of the last layer, too, although no logits are wanted.
            step = AttentionStep(starts, lengths, tables, rows.num_decodes)
            model(tokens, step, np.zeros(0, np.int64), None, False)
            assert program.chosen is not None
            for layer, ids in zip(program.chosen, chosen, strict=True):
                assert torch.equal(layer, ids[number])
            counted += len(tokens)
    for mixture, first, expected_counts in zip(mixtures, before, counts, strict=True):
        assert torch.equal(mixture.tokens - first, expected_counts)
        assert int(expected_counts.sum()) == counted * mixture.config.chosen
    with torch.inference_mode():  # (the last step once more: rows that are asked for are where they were)
        some = np.array([len(tokens) - 3, len(tokens) - 1])
        told = model.rows(tokens, step, some)[0].clone()
        program.record_chosen = False
        assert torch.equal(model.rows(tokens, step, some)[0], told)
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
    assert [name for name in found if not found[name]] == ["quantize"]
    assert not any(program.take_nanoseconds().values())
    executor.close()


def test_what_has_no_kernel_is_told(tmp_path: Path) -> None:
    """In words for the banner.  A step is no program then: PyTorch computes these between native ones."""
    make_checkpoint(tmp_path, "qwen3-moe")
    model = make(tmp_path, "float32", None)._model
    assert isinstance(model, Decoder)
    assert (in_pytorch(model), why_apart(model)) == ([], "")
    first, second, *_ = model.mixtures
    second._native = False
    assert in_pytorch(model) == ["experts of layer 1"]
    first._native = False
    model.layers[2].attention.qkv.product = PlainProduct(torch.zeros(3, 64), None)
    assert in_pytorch(model) == ["experts of layers 0-1", "products of layer 2"]
    assert program_of(model) is None
    model.weights_change()
    model.rotaries *= 3
    assert why_apart(model) == "more than 2 rotary embeddings"
