"""New weights that are made beside the present ones, while these are in use."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.executor import torch_executor
from baton.executor.base import ControlRefused
from baton.executor.torch_executor import TorchExecutor
from baton.executor.weights import new_weights
from baton.executor.weights.new_weights import NextWeights
from tests.executor.test_controls import perturbed
from tests.executor.weights.test_images import answers, image_inodes, make, readings, server
from tests.model import quantized_checkpoints as files
from tests.model.checkpoints import make_checkpoint

__all__ = ["readings", "server"]  # (fixtures)

SETTINGS = {"quantize_head": 8}


class Pair:
    """Two instances of a host, and checkpoints."""

    def __init__(self, directory: Path, server: str, readings: list[Path]) -> None:
        self.readings = readings
        self.others = image_inodes()
        """Images that earlier tests left."""
        self.old, self.new = directory / "old", directory / "new"
        make_checkpoint(self.old, "llama3")
        perturbed(self.old, self.new)
        self.settings = SETTINGS | {"weight_images": server}
        self.executors = [make(self.old, **self.settings) for _ in range(2)]
        self.before = self.answers()

    def use(self, head: int) -> None:
        """The same with a head of so many bits."""
        for executor in self.executors:
            executor.close()
        self.readings.clear()
        self.settings = self.settings | {"quantize_head": head}
        self.executors = [make(self.old, **self.settings) for _ in range(2)]
        if not self.executors[0]._memory.shared:
            pytest.skip("oneDNN packs these weights: they are private")
        self.before = self.answers()

    def answers(self) -> list[list[object]]:
        return [answers(executor) for executor in self.executors]

    def fresh(self, directory: Path) -> list[object]:
        """What private weights that were loaded from the start answer."""
        executor = make(directory, **self.settings | {"weight_images": ""})
        try:
            return answers(executor)
        finally:
            executor.close()
            self.readings.pop()


@pytest.fixture
def pair(tmp_path: Path, server: str, readings: list[Path]) -> Iterator[Pair]:
    earlier = image_inodes()
    pair = Pair(tmp_path, server, readings)
    yield pair
    for executor in pair.executors:
        executor.close()
    pair.executors.clear()
    assert len(image_inodes() - earlier) <= 3, "the last one of each place stays for restarts"


def test_a_check_makes_the_image_once_and_the_update_only_swaps(pair: Pair, monkeypatch) -> None:
    earlier = image_inodes()
    for executor in pair.executors:
        executor.check_weights(str(pair.new))
    assert pair.readings == [pair.old, pair.new]
    assert len(image_inodes() - earlier) == 1
    assert pair.answers() == pair.before

    def never(*_: object) -> None:
        raise AssertionError("it is there")

    for where, what in ((new_weights, "load_model"), (torch_executor, "check_numbers")):
        monkeypatch.setattr(where, what, never)
    for executor in pair.executors:
        executor.check_weights(str(pair.new))  # (once more: the lock may be over)
        executor.update_weights(str(pair.new))
    monkeypatch.undo()
    assert pair.answers() == [pair.fresh(pair.new)] * 2 != pair.before
    assert not image_inodes() & (earlier - pair.others), "nobody reads the old image"


def test_models_that_are_not_needed_go_at_once(pair: Pair) -> None:
    """Not when the garbage collector comes: it walks rarely in a worker, and never what was loaded first."""

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:baton-weights")

    gc.collect()
    others = mapped() - len(pair.executors)
    first, second = pair.executors
    gc.disable()
    try:
        for executor in pair.executors:
            executor.check_weights(str(pair.new))
        assert mapped() == others + 4
        first.release_weights()
        assert mapped() == others + 3
        second.update_weights(str(pair.new))
        assert mapped() == others + 2
    finally:
        gc.enable()


def test_what_is_released_goes_and_can_be_made_again(pair: Pair) -> None:
    earlier = image_inodes()
    for executor in pair.executors:
        executor.check_weights(str(pair.new))
        executor.release_weights()
    assert image_inodes() == earlier
    pair.executors[0].release_weights()
    pair.executors[0].update_weights(str(pair.new))
    assert answers(pair.executors[0]) == pair.fresh(pair.new)


def test_files_that_change_after_the_check_are_read_again(pair: Pair) -> None:
    (executor, _) = pair.executors
    executor.check_weights(str(pair.new))
    shutil.rmtree(pair.new)
    perturbed(pair.old, pair.new, lambda tensors: tensors["model.norm.weight"].mul_(0.5))
    executor.update_weights(str(pair.new))
    assert answers(executor) == pair.fresh(pair.new)


def test_one_that_has_no_memory_for_it_refuses_and_holds_nothing(pair: Pair, monkeypatch) -> None:
    first, second = pair.executors
    earlier = image_inodes()
    monkeypatch.setattr(new_weights, "available_memory", lambda: 1000)
    with pytest.raises(ControlRefused, match="beside the present ones, and only 0 MB are free"):
        first.check_weights(str(pair.new))
    assert image_inodes() == earlier
    monkeypatch.undo()
    second.check_weights(str(pair.new))
    monkeypatch.setattr(new_weights, "available_memory", lambda: 1000)
    first.check_weights(str(pair.new))  # what another worker has made needs none
    assert pair.answers() == pair.before


def test_a_check_that_was_given_up_leaves_nothing(pair: Pair, monkeypatch) -> None:
    (executor, _) = pair.executors
    earlier = image_inodes()
    make_second = NextWeights.make

    def slow(self: NextWeights, *arguments):
        try:
            return make_second(self, *arguments)
        finally:
            executor.release_weights()  # meanwhile

    monkeypatch.setattr(NextWeights, "make", slow)
    with pytest.raises(ControlRefused, match="was given up"):
        executor.check_weights(str(pair.new))
    assert image_inodes() == earlier


@pytest.mark.parametrize(("head", "checked"), [(8, True), (8, False), (16, True)])
def test_a_checkpoint_that_is_quantized_otherwise(
    pair: Pair, tmp_path: Path, head: int, checked: bool
) -> None:
    """It is held as an instance that starts with it holds it, so that one maps the same image."""
    if head != SETTINGS["quantize_head"]:
        pair.use(head)
    other = tmp_path / "other"
    shutil.copytree(pair.new, other)

    def write(module, weight):
        if module == "lm_head":
            return None
        made = files.rounded(weight, 4, 32, True, weight.dtype)
        return made, files.packed(made, True, weight.dtype)

    files.rewrite(other, files.compressed_config(), write)
    expected = pair.fresh(other)
    for executor in pair.executors:
        if checked:
            executor.check_weights(str(other))
        executor.update_weights(str(other))
    assert pair.answers() == [expected] * 2 != pair.before
    assert pair.readings == [pair.old, other]
    pair.executors.append(make(other, **pair.settings))
    assert answers(pair.executors[2]) == expected
    assert pair.readings == [pair.old, other]
    pair.executors[0].update_weights(str(pair.old))
    assert answers(pair.executors[0]) == pair.before[0]


def test_private_weights_are_loaded_in_place(tmp_path: Path, readings: list[Path]) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    make_checkpoint(old, "llama3")
    perturbed(old, new)
    executor: TorchExecutor = make(old)
    model = executor._model
    executor.check_weights(str(new))
    assert readings == [old]
    executor.update_weights(str(new))
    assert executor._model is model
    executor.close()
