"""Weights of models that transformers computes: in images as others, and new ones while they run."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.executor.base import ControlRefused
from baton.executor.torch_executor import TorchExecutor
from baton.launch.instances.image_server import image_server
from baton.model import loader
from baton.model.checkpoint.files import LoadError
from baton.protocol.params.sampling import Sampling
from tests.executor.driver import Driver
from tests.executor.test_controls import perturbed
from tests.executor.test_torch_parity import config_for, prompt_of
from tests.model.checkpoints import VOCAB, make_checkpoint

FORMS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": "float32"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4", "quantize_head": 4},
}


@pytest.fixture(scope="module")
def images() -> Iterator[str]:
    with image_server() as path:
        assert path
        yield path


def answers(executor: TorchExecutor) -> list[object]:
    """Tokens and log-probabilities, to the bit."""
    driver = Driver(executor, chunk=11)
    sampling = Sampling(0, 0.0, logprobs=VOCAB)
    requests = [driver.add(prompt_of(20 + seed, seed), 6, sampling) for seed in range(2)]
    driver.run()
    for request in requests:
        driver.remove(request)
    return [(request.tokens, [list(report.best()) for report in request.logprobs]) for request in requests]


def make(directory: Path, **settings: Any) -> TorchExecutor:
    return TorchExecutor.from_config(config_for(directory, **settings), 0, "")


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("stablelm", "fp32"),
        ("stablelm", "int4"),
        ("gpt-neox", "int8"),
        ("gemma2", "int4"),
        ("gemma2", "fp32"),
    ],
)
def test_what_is_mapped_computes_what_private_weights_compute(
    form: str, family: str, images: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, family)
    settings = FORMS[form] | {"model_impl": "transformers"}
    private = make(tmp_path, **settings)
    filler = make(tmp_path, weight_images=images, **settings)
    monkeypatch.setattr(loader, "load_weights", None)  # nobody reads from now on
    mapped = make(tmp_path, weight_images=images, **settings)
    made = (private, filler, mapped)
    assert [executor._memory.origin for executor in made] == ["private", "filled", "mapped"]
    found = [(answers(executor), executor._model.weight_bytes()) for executor in made]
    assert found[0] == found[1] == found[2]
    for executor in made:
        executor.close()


def test_the_native_family_does_not_map_the_image_of_transformers(images: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama3")
    made = [make(tmp_path, weight_images=images, model_impl=how) for how in ("transformers", "baton")]
    assert [executor._memory.origin for executor in made] == ["filled", "filled"]
    for executor in made:
        executor.close()


@pytest.mark.parametrize("in_image", [False, True])
def test_new_weights_are_as_if_they_had_been_loaded_at_first(
    in_image: bool, images: str, tmp_path: Path
) -> None:
    old = tmp_path / "old"
    make_checkpoint(old, "stablelm")
    new = perturbed(old, tmp_path / "new")
    settings = {"weight_images": images} if in_image else {}
    executor, fresh = make(old, **settings), make(new)
    before = answers(executor)
    executor.check_weights(str(new))
    assert answers(executor) == before
    earlier = _mapped()
    gc.collect()
    gc.disable()
    try:
        executor.update_weights(str(new))
        if in_image:
            assert _mapped() < earlier, "the old image is given back at once"
    finally:
        gc.enable()
    assert answers(executor) == answers(fresh) != before
    executor.close()
    fresh.close()


def _mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:baton-weights")


def test_what_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    old = tmp_path / "old"
    make_checkpoint(old, "gpt-neox")
    executor = make(old)
    before = answers(executor)
    for number, (settings, change, message) in enumerate(
        (
            (
                {"layer_norm_eps": 0.5},
                None,
                "another model: layer_norm_eps is 1e-05, not 0.5|is 0.5, not 1e-05",
            ),
            (
                {"use_parallel_residual": False},
                None,
                "another model: use_parallel_residual is False, not True",
            ),
            (
                {},
                lambda t: t.pop("lm_head.weight", None) is None and t.pop("embed_out.weight"),
                "no tensor 'lm_",
            ),
            ({}, lambda t: t.update({"zzz.weight": torch.ones(2)}), "no place for tensor 'zzz.weight'"),
        )
    ):
        wrong = perturbed(old, tmp_path / f"wrong{number}", change)
        path = wrong / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))
        with pytest.raises(ControlRefused, match=message):
            executor.check_weights(str(wrong))
    assert answers(executor) == before
    executor.close()


def test_tensors_may_have_the_names_of_another_time(tmp_path: Path) -> None:
    """As the files of the hub have them: of the layers alone, and of earlier versions of the library."""

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            new = name.removeprefix("gpt_neox.").replace("lm_head.", "embed_out.")
            tensors[new] = tensors.pop(name)
        tensors["layers.0.attention.bias"] = torch.ones(1, 1, 4, 4)  # a mask, which nobody reads

    make_checkpoint(tmp_path / "m", "gpt-neox")
    same = perturbed(tmp_path / "m", tmp_path / "same")
    renamed = perturbed(tmp_path / "m", tmp_path / "renamed", rename)
    made = [make(same), make(renamed)]
    assert answers(made[0]) == answers(made[1])
    for executor in made:
        executor.close()
    damaged = perturbed(tmp_path / "m", tmp_path / "damaged", lambda t: t.popitem()[1].fill_(float("nan")))
    with pytest.raises(LoadError, match="no tensor"):
        make(damaged)
