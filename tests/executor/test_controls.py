"""New weights and profiles of the torch executor."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.executor import profiler, torch_executor
from baton.executor.base import ControlRefused
from baton.executor.loading import create_executor
from baton.model.checkpoint.fingerprint import fingerprint
from baton.model.loader import LoadError
from tests.executor.driver import Driver
from tests.executor.test_torch_parity import config_for, prompt_of
from tests.model.checkpoints import make_checkpoint


def perturbed(source: Path, target: Path, change=None) -> Path:
    """A copy of a checkpoint with other weights; `change(tensors)` for more."""
    shutil.copytree(source, target)
    path = target / "model.safetensors"
    tensors = load_file(path)
    generator = torch.Generator().manual_seed(5)
    for name, tensor in tensors.items():
        tensors[name] = tensor + 0.1 * torch.randn(tensor.shape, generator=generator)
    if change is not None:
        change(tensors)
    save_file(tensors, path, {"format": "pt"})
    return target


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("old") / "m"
    make_checkpoint(directory, "llama3")
    return directory


@pytest.fixture(scope="module")
def new(old: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return perturbed(old, tmp_path_factory.mktemp("new") / "m")


def answers(executor) -> list[list[int]]:
    driver = Driver(executor, chunk=11)
    requests = [driver.add(prompt_of(20, seed), 20) for seed in range(3)]
    driver.run()
    for request in requests:
        driver.remove(request)
    return [request.tokens for request in requests]


def fresh(directory: Path) -> list[list[int]]:
    executor = create_executor(config_for(directory), 0, "")
    try:
        return answers(executor)
    finally:
        executor.close()


def test_after_the_update_all_is_as_if_it_had_been_loaded_at_first(old: Path, new: Path) -> None:
    executor = create_executor(config_for(old), 0, "")
    before = answers(executor)
    size = executor._model.weight_bytes()
    executor.update_weights(str(new))
    after = answers(executor)
    assert after == fresh(new) != before
    assert executor._model.weight_bytes() == size
    executor.update_weights(str(old))
    assert answers(executor) == before == fresh(old)
    executor.close()


def test_a_check_changes_nothing_and_tells_checkpoints_apart(old: Path, new: Path, tmp_path: Path) -> None:
    executor = create_executor(config_for(old), 0, "")
    before = answers(executor)
    assert executor.check_weights(str(new)) == fingerprint(new) != fingerprint(old)
    assert executor.check_weights(str(old)) == fingerprint(old)
    with pytest.raises(ControlRefused):
        executor.check_weights(str(tmp_path))
    assert answers(executor) == before
    executor.close()


def _other_config(directory: Path, **changes) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        # The last tensors in the order of names, so that a loader that does not look first has copied much.
        (lambda t: t.update({"model.norm.weight": torch.ones(65)}), {}, r"'model\.norm\.weight' has shape"),
        (lambda t: t.pop("model.norm.weight"), {}, r"no tensor 'model\.norm\.weight'"),
        (lambda t: t.update({"zzz.weight": torch.ones(2)}), {}, r"no place for tensor 'zzz\.weight'"),
        (lambda t: t.update({"model.norm.weight": torch.ones(64).int()}), {}, "int32"),
        (None, {"num_hidden_layers": 2}, "is another model: num_layers is 2, not 3"),
        (None, {"rms_norm_eps": 0.5}, "norm_eps is 0.5"),
        (None, {"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
    ],
)
def test_what_does_not_fit_changes_nothing(old: Path, tmp_path: Path, change, settings, message) -> None:
    directory = perturbed(old, tmp_path / "wrong", change)
    _other_config(directory, **settings)
    executor = create_executor(config_for(old), 0, "")
    before = answers(executor)
    with pytest.raises(ControlRefused, match=message):
        executor.update_weights(str(directory))
    assert answers(executor) == before
    executor.close()


@pytest.mark.parametrize("name", ["nowhere", "x" * 300])
def test_no_directory(old: Path, tmp_path: Path, name: str) -> None:
    executor = create_executor(config_for(old), 0, "")
    with pytest.raises(ControlRefused):
        executor.update_weights(str(tmp_path / name))
    executor.close()


def test_a_failure_in_the_middle_is_no_refusal(old: Path, new: Path, monkeypatch) -> None:
    """Old and new are mixed then: the worker must not go on."""
    executor = create_executor(config_for(old), 0, "")

    def broken(*_: object) -> None:
        raise LoadError("the disk is gone")

    monkeypatch.setattr(torch_executor, "load_weights", broken)
    with pytest.raises(LoadError, match="gone"):
        executor.update_weights(str(new))
    assert not issubclass(LoadError, ControlRefused)
    executor.close()


def test_a_profile_is_a_chrome_trace_of_the_steps(old: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(profiler, "MAX_STEPS", 5)
    executor = create_executor(config_for(old), 0, "")
    with pytest.raises(ControlRefused, match="no profile"):
        executor.stop_profile()
    (tmp_path / "file").touch()
    with pytest.raises(ControlRefused, match="cannot be used"):
        executor.start_profile(str(tmp_path / "file"))
    directory = tmp_path / "a" / "traces"
    executor.start_profile(str(directory))
    with pytest.raises(ControlRefused, match="stop it first"):
        executor.start_profile(str(directory))
    answers(executor)
    assert not executor._profiler.recording, "recording has a limit"
    executor.stop_profile()
    (trace,) = directory.iterdir()
    assert trace.name.startswith("baton-rank0-")
    names = [event.get("name") for event in json.loads(trace.read_text())["traceEvents"]]
    assert names.count("baton::step") == 5
    executor.start_profile(str(directory))
    shutil.rmtree(directory)
    with pytest.raises(ControlRefused, match="written"):
        executor.stop_profile()
    executor.start_profile(str(directory))
    executor.stop_profile()
    executor.close()
