"""Weights of several workers in one image: the same bits, one copy, one reading of the checkpoint."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from baton.executor.torch_executor import TorchExecutor
from baton.executor.weights import images
from baton.executor.weights.forms import ExecutorError, groups_of
from baton.executor.weights.images import open_weights
from baton.ipc.image_client import ImageClient
from baton.launch.instances.image_server import image_server
from baton.model import loader
from baton.model.attention import AttentionShape, attention_backend
from baton.model.checkpoint.config import ModelConfig
from baton.model.checkpoint.files import LoadError
from baton.model.cpu.library import native
from baton.model.cpu.linear import serves
from baton.model.layers import grouped as grouped_layers
from baton.model.layers.packed import best_form
from baton.model.layers.parallel import TensorParallel
from baton.model.layers.placement import Placement
from baton.model.loader import load_model
from baton.model.weights.store import PrivateStore, WeightStore
from tests.executor.driver import Driver
from tests.executor.test_controls import perturbed
from tests.executor.test_torch_parity import BLOCK, config_for, prompt_of
from tests.model.checkpoints import make_checkpoint
from tests.model.quantized_checkpoints import rewrite_gpt_oss

FORMS = {
    "fp32, tied": ("llama3", {"dtype": "float32"}),
    "bf16, untied": ("ernie4_5", {"dtype": "bfloat16"}),
    "biases": ("llama-biased-linear", {"dtype": "float32"}),
    "norms of heads": ("qwen3", {"dtype": "bfloat16"}),
    "int8": ("llama2", {"dtype": "bfloat16", "quantization": "int8"}),
    "int8, tied": ("qwen3", {"dtype": "float32", "quantization": "int8"}),
    "int4": ("llama2", {"dtype": "bfloat16", "quantization": "int4", "quantize_head": 8}),
    "int4, tied": ("qwen3", {"dtype": "bfloat16", "quantization": "int4", "quantize_head": 6}),
    "int4 but the head": ("qwen3", {"dtype": "float32", "quantization": "int4", "quantize_head": 16}),
    "the head alone": ("llama2", {"dtype": "bfloat16", "quantize_head": 8}),
    "mxfp4": ("gpt-oss", {"dtype": "bfloat16"}),
}


@pytest.fixture
def server() -> Iterator[str]:
    with image_server() as path:
        assert path
        yield path


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Grows by one whenever a checkpoint's tensors are read."""
    found: list[Path] = []
    read = loader.load_weights

    def counted(model, directory, *more):
        found.append(directory)
        read(model, directory, *more)

    monkeypatch.setattr(loader, "load_weights", counted)
    return found


def make(directory: Path, **settings) -> TorchExecutor:
    return TorchExecutor.from_config(config_for(directory, **settings), 0, "")


def answers(executor: TorchExecutor) -> list[object]:
    """Tokens and log-probabilities, to the bit."""
    driver = Driver(executor, chunk=11)
    requests = [driver.add(prompt_of(20 + 3 * seed, seed), 12) for seed in range(3)]
    driver.run()
    for request in requests:
        driver.remove(request)
    with torch.inference_mode():
        table = executor._model.embedding.look_up(torch.arange(64))
    return [[request.tokens for request in requests], table.float().tolist()]


@pytest.mark.parametrize("native_library", [True, False])
@pytest.mark.parametrize("form", list(FORMS))
def test_what_is_mapped_computes_what_private_weights_compute(
    form: str,
    native_library: bool,
    server: str,
    readings: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    variant, settings = FORMS[form]
    if not native_library:
        if "4" not in form and "head" not in form:
            pytest.skip("oneDNN packs these weights: they are private")
        monkeypatch.setattr(grouped_layers, "native", lambda: None)
    elif settings.get("quantization") == "int8" and not serves(native(), torch.int8):
        pytest.skip("no native products in 8 bits here")
    make_checkpoint(tmp_path, variant)
    if form == "mxfp4":
        rewrite_gpt_oss(tmp_path)
    found = []
    for images_at in ("", server, server):
        executor = make(tmp_path, weight_images=images_at, **settings)
        found.append((answers(executor), executor._model.weight_bytes(), executor._model.placement.rounded))
        origin = executor._memory.origin
        assert origin == ("private" if not images_at else "filled" if len(found) == 2 else "mapped")
        if origin == "filled":
            kept = executor
        else:
            executor.close()
    kept.close()
    assert found[0] == found[1] == found[2]
    assert len(readings) == 2  # (the private one's and the filler's)


class Remembering(PrivateStore):
    """Private memory whose tensors are known by name."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def make(self, name, shape, dtype, device):
        return self.tensors.setdefault(name, super().make(name, shape, dtype, device))


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_has_an_image_of_its_own_part(rank: int, server: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen2")
    model_config = ModelConfig.from_directory(tmp_path)
    config = config_for(tmp_path, tensor_parallel_size=2, weight_images=server)
    device, dtype = torch.device("cpu"), torch.float32
    form = best_form(dtype, device)
    shape = AttentionShape(
        model_config.num_layers, 2, 1, model_config.head_dim, BLOCK, 1.0, frozenset({None}), dtype, device
    )

    def load(store: WeightStore) -> None:
        placement = Placement(TensorParallel(rank, 2, object()), dtype, device, form, store=store)
        load_model(tmp_path, model_config, placement, attention_backend(shape), 64)

    private = Remembering()
    load(private)
    for origin in ("filled", "mapped"):
        memory = open_weights(config, tmp_path, rank, form, {})
        assert memory.origin == origin
        load(memory.store)
        memory.done()
    for name, tensor in private.tensors.items():
        found = memory.store.make(name, tuple(tensor.shape), tensor.dtype, device)
        assert torch.equal(found, tensor), name


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ({"quantization": "int4", "quantize_head": 8}, {"grouping": 32, "finer": 128, "head_grouping": 128}),
        ({"quantization": "int4", "quantize_head": 6}, {"grouping": 32, "finer": 128, "head_grouping": 128}),
        ({"quantization": "int4", "quantize_head": 4}, {"grouping": 32, "finer": 128, "head_grouping": 32}),
        ({"quantization": "int8", "quantize_head": 8}, {"grouping": 32, "finer": None, "head_grouping": 32}),
        ({"quantize_head": 8}, {"grouping": None, "finer": None, "head_grouping": 128}),
    ],
)
def test_only_four_bits_need_small_groups(tmp_path: Path, flags: dict, found: dict) -> None:
    make_checkpoint(tmp_path, "llama2")
    config = config_for(tmp_path, quantization_group_size=32, **flags)
    told = groups_of(config, ModelConfig.from_directory(tmp_path), torch.device("cpu"))
    assert {name: told[name] and told[name].group for name in found} == found
    assert told["finer"] is None or told["finer"].bits == 6


def test_an_image_cannot_be_written_any_more(server: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama2")
    executor = make(tmp_path, weight_images=server)
    client = ImageClient(server)
    place, key = images._identity(
        executor._config,
        tmp_path,
        0,
        executor._model.weights,
        groups_of(executor._config, executor._model.config, executor._device),
    )
    fill, fd = client.ask(key, place, 10)
    assert not fill
    for change in (
        lambda: os.pwrite(fd, b"\0", 5000),
        lambda: os.ftruncate(fd, 4096),
        lambda: os.ftruncate(fd, 1 << 30),
        lambda: mmap.mmap(fd, 0),
    ):
        with pytest.raises(PermissionError):
            change()
    os.close(fd)
    client.close()
    executor.close()


def test_who_waits_too_long_says_what_for(server: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama2")
    config = config_for(tmp_path, weight_images=server, startup_timeout_s=0.2)
    filling = open_weights(config, tmp_path, 0, "packed", {})
    with pytest.raises(ExecutorError, match=r"another worker .* raise --startup-timeout"):
        open_weights(config, tmp_path, 0, "packed", {})
    filling.release()
    again = open_weights(config, tmp_path, 0, "packed", {})
    assert again.origin == "filled"
    again.release()


def test_without_the_keeper_weights_are_private(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_checkpoint(tmp_path, "llama2")
    with image_server() as gone:
        pass
    executor = make(tmp_path, weight_images=gone)
    assert executor._memory.origin == "private"
    assert "its own copy" in caplog.text
    executor.close()


def test_new_weights_are_another_image_and_the_old_one_goes_with_its_last_reader(
    server: str, readings: list[Path], tmp_path: Path
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    make_checkpoint(old, "llama3")
    perturbed(old, new)
    settings = {"weight_images": server, "quantize_head": 8}
    earlier = image_inodes()
    first, second = make(old, **settings), make(old, **settings)
    before = answers(first)
    inode = image_inodes() - earlier
    assert len(inode) == 1
    first.update_weights(str(new))
    after = answers(first)
    assert answers(second) == before != after
    assert len(image_inodes() - earlier) == 2
    assert inode < image_inodes()
    second.update_weights(str(new))
    assert answers(second) == after
    assert len(image_inodes() - earlier) == 1
    assert not inode & image_inodes()
    assert readings == [old, new]
    first.update_weights(str(old))
    assert answers(first) == before
    third = make(new, **settings)
    assert answers(third) == after
    assert len(readings) == 3
    for executor in (first, second, third):
        executor.close()


def image_inodes() -> set[str]:
    """Of the images that this process has mapped, or has open."""
    gc.collect()
    lines = Path("/proc/self/maps").read_text().splitlines()
    found = {line.split()[4] for line in lines if "memfd:baton-weights" in line}
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if "memfd:baton-weights" in os.readlink(fd):
                found.add(str(fd.stat().st_ino))
    return found


def test_nothing_of_an_image_is_left_in_a_process_that_closed_it(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama2")
    before = image_inodes()
    with image_server() as server:
        executors = [make(tmp_path, weight_images=server) for _ in range(2)]
        assert len(image_inodes() - before) == 1
        for executor in executors:
            executor.close()
    del executors, executor
    assert image_inodes() == before


def test_files_that_change_while_they_are_read_make_no_image(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, "llama2")
    path = tmp_path / "model.safetensors"
    read = loader.load_weights

    def disturbed(*arguments):
        read(*arguments)
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))

    with monkeypatch.context() as patch:
        patch.setattr(loader, "load_weights", disturbed)
        with pytest.raises(LoadError, match="changed while they were read"):
            make(tmp_path, weight_images=server)
    gc.collect()  # (a worker ends there)
    executor = make(tmp_path, weight_images=server)
    assert executor._memory.origin == "filled"
    executor.close()
