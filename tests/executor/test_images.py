"""Weights of several workers in one image: the same bits, one copy, one reading of the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from baton.executor.torch_executor import TorchExecutor
from baton.launch.instances.image_server import image_server
from baton.model import loader
from baton.model.cpu.library import native
from baton.model.cpu.linear import serves
from baton.model.layers import grouped as grouped_layers
from tests.executor.driver import Driver
from tests.executor.test_torch_parity import config_for, prompt_of
from tests.model.checkpoints import make_checkpoint

FORMS = {
    "fp32, tied": ("llama3", {"dtype": "float32"}),
    "bf16, untied": ("ernie4_5", {"dtype": "bfloat16"}),
    "biases": ("llama-biased-linear", {"dtype": "float32"}),
    "norms of heads": ("qwen3", {"dtype": "bfloat16"}),
    "int8": ("llama2", {"dtype": "bfloat16", "quantization": "int8"}),
    "int8, tied": ("qwen3", {"dtype": "float32", "quantization": "int8"}),
    "int4": ("llama2", {"dtype": "bfloat16", "quantization": "int4", "quantize_head": 8}),
    "int4, tied": ("qwen3", {"dtype": "bfloat16", "quantization": "int4", "quantize_head": 4}),
    "int4 but the head": ("qwen3", {"dtype": "float32", "quantization": "int4", "quantize_head": 16}),
    "the head alone": ("llama2", {"dtype": "bfloat16", "quantize_head": 8}),
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

    def counted(model, directory, config):
        found.append(directory)
        read(model, directory, config)

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
