"""Mixtures of experts: the router's choices, and models that are quantized, batched, kept in an image."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.counters import Counters
from baton.executor.base import StepResult
from baton.executor.results.expert_load import ENOUGH, ExpertLoad
from baton.executor.torch_executor import TorchExecutor
from baton.model.decoder.mixture import Mixture
from baton.model.description.model import MlpConfig, MoeConfig
from baton.model.layers.grouped import GroupedProduct
from baton.model.ops.routing import route
from baton.observe.instances import EngineStats, InstanceSample
from tests.executor.driver import Driver
from tests.executor.test_torch_parity import config_for, prompt_of, same_in_a_crowd
from tests.model.checkpoints import make_checkpoint
from tests.model.reading.test_quantized_models import make as make_quantized

EXPERT = MlpConfig(8)


def moe(experts: int, chosen: int, **changes: Any) -> MoeConfig:
    return MoeConfig(experts, chosen, EXPERT, **changes)


def test_of_equal_scores_the_lowest_ids_are_chosen() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    routed = route(logits, None, moe(5, 2))
    assert routed.ids.tolist() == [[1, 2], [0, 1]]
    assert routed.ids.dtype == torch.int32
    assert routed.weights.tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_a_bias_chooses_and_does_not_weigh_but_one_of_logits_does() -> None:
    logits, bias = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0.0, 0.0, 9.0])
    chosen = route(logits.clone(), bias, moe(3, 2, bias="choice", normalized=False))
    scores = torch.softmax(logits, dim=1)[0]
    assert chosen.ids.tolist() == [[0, 2]]
    torch.testing.assert_close(chosen.weights[0], scores[[0, 2]])
    of_logits = route(logits.clone(), bias, moe(3, 2, bias="logits", scores="chosen_softmax"))
    assert of_logits.ids.tolist() == [[0, 2]]
    torch.testing.assert_close(of_logits.weights, torch.softmax(torch.tensor([[2.0, 9.0]]), dim=1))


def test_only_experts_of_the_best_groups_are_chosen() -> None:
    """The best group by the sum of its two best: not the one with the best expert."""
    logits = torch.tensor([[4.0, -4.0, -4.0, 2.0, 2.0, -4.0, 1.9, 1.9, 1.9]])
    routed = route(logits, None, moe(9, 3, groups=3, chosen_groups=1, scores="sigmoid"))
    assert routed.ids.tolist() == [[3, 4, 5]]


def test_a_small_sum_is_not_divided_by() -> None:
    logits = torch.tensor([[-20.0, -21.0, 10.0]])
    bias = torch.tensor([9.0, 9.0, 0.0])
    tiny = route(logits, bias, moe(3, 2, bias="choice", least_sum=1.0, factor=2.0))
    assert tiny.ids.tolist() == [[0, 1]]
    assert float(tiny.weights.sum()) < 1e-6


def test_a_token_goes_where_it_goes_alone() -> None:
    torch.manual_seed(0)
    logits, bias = torch.randn(65, 64), torch.randn(64)
    for config in (moe(64, 6, bias="choice"), moe(64, 8, scores="sigmoid", groups=8, chosen_groups=4)):
        whole = route(logits.clone(), bias, config)
        for first in range(0, 65, 5):
            part = route(logits[first : first + 5].clone(), bias, config)
            assert torch.equal(part.ids, whole.ids[first : first + 5])
            assert torch.equal(part.weights, whole.weights[first : first + 5])


FORMS: tuple[dict[str, Any], ...] = (
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "quantization": "int8"},
    {"quantization": "int4", "quantization_group_size": 32, "quantize_head": 8},
)


@pytest.fixture(scope="module")
def ernie(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ernie")
    make_checkpoint(directory, "ernie4_5-moe")
    return directory


@pytest.mark.parametrize("flags", FORMS)
def test_company_changes_nothing(ernie: Path, flags: dict[str, Any]) -> None:
    executor = TorchExecutor.from_config(config_for(ernie, **flags), 0, "")
    same_in_a_crowd(executor)
    executor.close()


def answer(executor: TorchExecutor) -> list[int]:
    driver = Driver(executor)
    request = driver.add(prompt_of(40), 16)
    driver.run()
    driver.remove(request)
    return request.tokens


def tokens_of(directory: Path, **flags: Any) -> list[int]:
    executor = TorchExecutor.from_config(config_for(directory, **flags), 0, "")
    found = answer(executor)
    executor.close()
    return found


@pytest.mark.parametrize("flags", FORMS)
def test_experts_come_from_an_image_as_they_were_packed(
    ernie: Path, flags: dict[str, Any], tmp_path: Path
) -> None:
    flags = {**flags, "weight_cache": str(tmp_path)}
    first = TorchExecutor.from_config(config_for(ernie, **flags), 0, "")
    expected = answer(first)
    second = TorchExecutor.from_config(config_for(ernie, **flags), 0, "")
    assert (first._memory.origin, second._memory.origin) == ("filled", "file")
    assert answer(second) == expected
    first.close()
    second.close()


def test_the_head_of_a_quantized_checkpoint_is_quantized_if_asked(tmp_path: Path) -> None:
    make_quantized(tmp_path, "compressed-tensors", "qwen3-moe")
    products = []
    for flags in ({}, {"quantize_head": 8}):
        executor = TorchExecutor.from_config(config_for(tmp_path, **flags), 0, "")
        products.append(isinstance(executor._model.head.product, GroupedProduct))
        assert isinstance(executor._model.layers[0].mlp.experts[0].down.product, GroupedProduct)
        assert len(answer(executor)) == 16
        executor.close()
    assert products == [False, True]


def test_both_names_of_ernies_bias_and_tensors_of_more_tokens(
    ernie: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Checkpoints call the bias mlp.moe_statics…, or as transformers has it in memory."""
    tensors = load_file(ernie / "model.safetensors")
    renamed = {name.replace("mlp.moe_statics", "mlp.gate.moe_statics"): t for name, t in tensors.items()}
    assert set(renamed) != set(tensors)
    renamed["model.mtp_block.0.mlp.up_proj.weight"] = torch.ones(2, 2)
    renamed["model.mtp_emb_norm.0.weight"] = torch.ones(2)
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((ernie / "config.json").read_bytes())
    with caplog.at_level(logging.INFO, "baton.model.loader"):
        assert tokens_of(tmp_path) == tokens_of(ernie)
    assert "not read" in caplog.text
    assert "model.mtp_block.0.mlp.up_proj.weight" in caplog.text


def test_each_expert_counts_its_tokens(ernie: Path) -> None:
    executor = TorchExecutor.from_config(config_for(ernie), 0, "")
    mixtures = [block.mlp for block in executor._model.layers if isinstance(block.mlp, Mixture)]
    before = [mixture.tokens.clone() for mixture in mixtures]
    answer(executor)
    counts = [mixture.tokens - counted for mixture, counted in zip(mixtures, before, strict=True)]
    first, last = (int(count.sum()) for count in counts)
    assert first == (40 + 15) * 6
    assert last in (first, 16 * 6), "of the last layer a native step computes only what is looked at"
    assert all(int((count > 0).sum()) > 6 for count in counts)
    executor.close()


def test_tokens_are_told_by_the_load_of_their_experts(ernie: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = TorchExecutor.from_config(config_for(ernie), 0, "")
    mixtures = [block.mlp for block in executor._model.layers if isinstance(block.mlp, Mixture)]
    load, model = ExpertLoad(), executor._model
    assert load.after_step(model, 1) == [], "too few to tell"
    mixtures[0].tokens.numpy()[:] += [0, 1, 2, 4, 8, 17] + [16] * 10  # on average 12
    assert load.after_step(model, ENOUGH * 16) == [0 + 1 + 2, 4, 8, 17 + 160, 0, 0]
    mixtures[1].tokens.numpy()[3] += 80  # of 16 times its share
    assert load.after_step(model, ENOUGH * 16) == [0, 0, 0, 0, 0, 80]
    told: list[list[int]] = []
    execute = executor.execute

    def noted(*arguments: Any) -> StepResult:
        result = execute(*arguments)
        told.append(result.expert_tokens)
        return result

    monkeypatch.setattr(executor, "execute", noted)
    driver = Driver(executor)
    driver.add(prompt_of(300), 8)
    driver.run()
    assert sum(map(sum, told)) >= 300 * 6
    assert [] in told, "not of every step"
    executor.close()


def test_a_model_without_experts_has_no_loads(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama2")
    executor = TorchExecutor.from_config(config_for(tmp_path), 0, "")
    assert ExpertLoad().after_step(executor._model, 1 << 20) == []
    executor.close()


def test_loads_are_a_metric_of_six_series() -> None:
    counters = Counters()
    counters.count_experts([])
    assert counters.snapshot()["expert_tokens"] == {}
    counters.count_experts([1, 2, 3, 4, 5, 6])
    counters.count_experts([1, 0, 0, 0, 0, 1])
    counters.count_experts([7])  # (of a worker that says it otherwise)
    stats = EngineStats("m")
    sample = InstanceSample(counters.snapshot(), "D0", ready=True, draining=False, in_flight=0, restarts=0)
    stats.instances = {"D0": sample}
    (family,) = (one for one in stats.collect() if one.name == "baton:expert_tokens")
    assert {one.labels["load"]: one.value for one in family.samples} == {
        "0.25": 2, "0.5": 2, "1.0": 3, "2.0": 4, "4.0": 5, "more": 7
    }  # fmt: skip
    assert {one.name for one in family.samples} == {"baton:expert_tokens_total"}
