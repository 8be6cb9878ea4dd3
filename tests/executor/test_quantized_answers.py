"""Greedy answers of quantized models are those of float32 models with the dequantized weights, within what
8-bit activations explain; for each reader's format, and for int4 of our own."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.bench.answers import compare_answers
from baton.executor.scoring import TextScorer
from baton.executor.torch_executor import TorchExecutor
from baton.launch.limits import OptionError
from baton.launch.options import EngineOptions
from baton.launch.planning.plan import make_plan
from baton.model.checkpoint.hub import resolve_model
from baton.model.layers.grouped import GroupedProduct
from tests.executor.driver import Driver
from tests.executor.test_torch_parity import config_for, prompt_of
from tests.model.checkpoints import make_checkpoint
from tests.model.quantized_checkpoints import rewrite_gpt_oss
from tests.model.reading.test_quantized_models import make as make_quantized

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
FORMS = (
    "int4/32",
    "int4/64",
    "int4/128",
    "int8/32",
    "int8/128",
    "awq",
    "gptq-act-order",
    "w8a8",
    "mxfp4",
    "gguf-Q4_0",
    "gguf-Q4_1",
    "gguf-Q8_0",
)


def make(directory: Path, form: str) -> tuple[Path, dict[str, Any]]:
    """A model, and the flags that it is served with."""
    kind, _, detail = form.replace("/", "-", 1).partition("-")
    if kind in ("int4", "int8"):
        make_checkpoint(directory, "qwen3", **SIZES)
        return directory, {"quantization": kind, "quantization_group_size": int(detail), "quantize_head": 8}
    if kind == "gguf":
        from tests.model.gguf_files import write_gguf

        make_checkpoint(directory / "source", "llama3", **SIZES)
        write_gguf(directory / "source", directory / "model.gguf", detail)
        return directory / "model.gguf", {}
    if kind == "mxfp4":
        make_checkpoint(directory, "gpt-oss", **SIZES)
        rewrite_gpt_oss(directory)
        return directory, {}
    make_quantized(directory, form)
    return directory, {}


@pytest.mark.parametrize("form", FORMS)
def test_answers_are_the_float32_models(tmp_path: Path, form: str) -> None:
    path, flags = make(tmp_path, form)
    config = config_for(path, max_num_seqs=4, num_blocks=40, **flags)
    with ExitStack() as stack:
        model, of_bytes, exact = (
            stack.enter_context(closing(TextScorer.from_config(config, 0, ""))) for _ in range(3)
        )
        assert of_bytes.expand(rounded=True) == exact.expand() >= 8
        driver = Driver(model)
        requests = [driver.add(prompt_of(length, seed=length), 32) for length in (24, 9, 40)]
        driver.run()
        answers = [(request.prompt, request.tokens) for request in requests]
        found = compare_answers(answers, model, exact)
        explained = compare_answers(answers, of_bytes, exact)
    assert found.positions == 96
    assert 0.001 < found.relative < 0.06
    assert 0.75 * explained.error < found.error < 1.33 * explained.error
    # A token is another one only where the reference was as good as undecided.
    assert found.different <= 15
    assert found.margin < 6 * found.error


def test_a_reference_is_the_model_with_floating_activations(tmp_path: Path) -> None:
    """Against transformers, with the weights that the file says."""
    from tests.model.gguf_files import write_gguf

    reference = make_checkpoint(tmp_path / "source", "llama3", **SIZES)
    reference.load_state_dict(write_gguf(tmp_path / "source", tmp_path / "model.gguf", "Q4_0"), strict=False)
    tokens = np.array(prompt_of(50), np.int32)
    with closing(TextScorer.from_config(config_for(tmp_path / "model.gguf"), 0, "")) as scorer:
        scorer.expand()
        found = torch.cat(list(scorer.text_logits(tokens)))
    with torch.no_grad():
        expected = reference(torch.from_numpy(tokens).long()[None]).logits[0]
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=0)


def test_gpt_oss_in_mxfp4_is_the_model_with_those_numbers(tmp_path: Path) -> None:
    """Against transformers, with the weights that the file says."""
    reference = make_checkpoint(tmp_path, "gpt-oss", **SIZES)
    reference.load_state_dict(rewrite_gpt_oss(tmp_path), strict=False)
    tokens = np.array(prompt_of(60), np.int32)
    with closing(TextScorer.from_config(config_for(tmp_path), 0, "")) as scorer:
        assert scorer.expand() == 2 * 2 * 8
        found = torch.cat(list(scorer.text_logits(tokens)))
    with torch.no_grad():
        expected = reference(torch.from_numpy(tokens).long()[None]).logits[0]
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


def test_what_gpt_oss_has_in_floating_point_is_quantized_if_asked(tmp_path: Path) -> None:
    """Its experts stay in MXFP4; a checkpoint whose other weights are quantized is refused."""
    make_checkpoint(tmp_path / "gpt", "gpt-oss", **SIZES)
    rewrite_gpt_oss(tmp_path / "gpt")
    config = config_for(tmp_path / "gpt", quantization="int4", quantization_group_size=32, quantize_head=8)
    with closing(TorchExecutor.from_config(config, 0, "")) as executor:
        assert "(mxfp4, the rest int4 in groups of 32, v in 6 bits, head in 8 bits; " in executor.info.detail
        block = executor._model.layers[0]
        found = [matrix.product for matrix in (block.attention.qkv, block.attention.output)]
        assert all(isinstance(product, GroupedProduct) for product in found)
    tokenizer = str(resolve_model(None))
    path = str(tmp_path / "gpt")
    plan = make_plan(EngineOptions(model=path, tokenizer=tokenizer, quantization="int4", max_model_len=64))
    assert plan.instance.quantization == "int4"
    make_quantized(tmp_path / "awq", "awq")
    with pytest.raises(OptionError, match=r"this checkpoint is quantized already \(awq\)"):
        make_plan(EngineOptions(model=str(tmp_path / "awq"), tokenizer=tokenizer, quantization="int4"))


class Fixed:
    def __init__(self, logits: list[list[float]]) -> None:
        self.logits = logits

    def text_logits(self, tokens: Any) -> Any:
        assert len(tokens) == len(self.logits)
        yield torch.tensor(self.logits)


def test_what_is_counted() -> None:
    model = Fixed([[0, 0, 0], [5, 1, 0], [0, 3, 2.5], [0, 1, 2]])
    reference = Fixed([[9, 0, 0], [5, 1, 0], [0, 2.5, 3], [0, 1, 2]])
    found = compare_answers([([7, 7], [0, 1, 2])], model, reference)
    assert (found.answers, found.equal) == (1, 0)
    assert compare_answers([([7, 7], [0, 2, 2])], model, reference).equal == 1
    assert (found.positions, found.different, found.first, found.margin) == (3, 1, 1, 0.5)
    assert found.error == pytest.approx((0.5 / 9) ** 0.5)
