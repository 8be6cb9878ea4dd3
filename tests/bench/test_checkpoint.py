"""`tools/make_checkpoint.py`: reproducible, and a model for whoever reads the format."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from baton.executor.torch_executor import TorchExecutor
from baton.model.checkpoint.config import ModelConfig
from baton.model.decoder.mixture import Mixture
from baton.model.loader import open_source
from baton.protocol.config import Speculation
from tests.executor.driver import Driver
from tests.executor.test_torch_parity import config_for

SCRIPT = Path(__file__).parents[2] / "tools" / "make_checkpoint.py"
_spec = importlib.util.spec_from_file_location("make_checkpoint", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
make_checkpoint = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make_checkpoint)


def make(directory: Path, seed: int = 0) -> Path:
    make_checkpoint.make_checkpoint("tiny-llama", directory, seed)
    return directory


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("checkpoint") / "new" / "tiny")


def test_the_same_seed_gives_the_same_bytes(checkpoint: Path, tmp_path: Path) -> None:
    again, other = make(tmp_path / "again"), make(tmp_path / "other", seed=1)
    assert {path.name for path in again.iterdir()} == {path.name for path in checkpoint.iterdir()}
    for path in checkpoint.iterdir():
        assert digest(path) == digest(again / path.name)
    weights = "model.safetensors"
    assert digest(checkpoint / weights) != digest(other / weights)
    # Not only here and today: the stream of the generator and the table of quantiles are fixed.
    assert digest(checkpoint / weights).startswith("29522d77991dad19")


def test_outliers_are_the_same_channels_of_all_norms_and_rows_of_up_proj(
    checkpoint: Path, tmp_path: Path
) -> None:
    make_checkpoint.make_checkpoint("tiny-llama", tmp_path, outliers=3)
    plain, found = (load_file(path / "model.safetensors") for path in (checkpoint, tmp_path))
    channels = set()
    for name, tensor in found.items():
        factors = (tensor / plain[name]).reshape(len(tensor), -1)
        rows = (factors != 1).any(dim=1).nonzero().flatten().tolist()
        if "norm" in name:
            channels.add(tuple(rows))
        assert len(rows) == (3 if "norm" in name or "up_proj" in name else 0), name
        assert all(9.9 < factor < 30.1 for factor in factors[rows].flatten().tolist()), name
    assert len(channels) == 1


def test_every_id_is_a_token_and_every_text_has_ids(checkpoint: Path) -> None:
    config = ModelConfig.from_directory(checkpoint)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == config.vocab_size == 2048
    assert all(tokenizer.id_to_token(index) for index in range(config.vocab_size))
    text = "Hello, wörld: 12345 漢字\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert json.loads((checkpoint / "tokenizer_config.json").read_text())["model_max_length"] == 4096


def test_it_loads_in_transformers_and_is_random(checkpoint: Path) -> None:
    import transformers

    model, info = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    weight = model.model.layers[0].mlp.up_proj.weight.float()
    assert weight.std().item() == pytest.approx(0.02, rel=0.01)
    assert abs(weight.mean().item()) < 1e-3
    assert model.config.num_key_value_heads == 2


@pytest.mark.parametrize("group", [None, 64])
def test_a_mixture_of_experts_is_what_baton_reads(group: int | None, tmp_path: Path) -> None:
    size = make_checkpoint.make_checkpoint("tiny-moe", tmp_path, group=group)
    assert size == sum(tensor.nbytes for tensor in load_file(tmp_path / "model.safetensors").values())
    executor = TorchExecutor.from_config(config_for(tmp_path, dtype="float32"), 0, "")
    driver = Driver(executor)
    request = driver.add([1, 2, 3], 2)
    driver.run()
    assert len(request.tokens) == 2
    mixture = executor._model.layers[-1].mlp
    assert isinstance(mixture, Mixture)
    with open_source(tmp_path, executor._model.config) as source:
        piece = mixture.down[5].pieces[0]
        weight = source.read(piece.source, piece.shape, 0, 0, piece.shape[0])
    executor.close()
    assert isinstance(weight, Tensor) == (group is None)
    exact = weight if isinstance(weight, Tensor) else weight.dequantized()
    assert exact.float().square().mean().sqrt().item() == pytest.approx(0.02, rel=0.02)


@pytest.mark.parametrize("group", [None, 64])
def test_an_mtp_layer_is_what_baton_reads(group: int | None, tmp_path: Path) -> None:
    make_checkpoint.make_checkpoint("tiny-ernie-moe", tmp_path, group=group, mtp=True)
    wanted = Speculation(method="mtp", num_speculative_tokens=3)
    executor = TorchExecutor.from_config(config_for(tmp_path, dtype="bfloat16", speculation=wanted), 0, "")
    driver = Driver(executor)
    request = driver.add([1, 2, 3], 8)
    driver.run()
    assert len(request.tokens) == 8
    projection = load_file(tmp_path / "model.safetensors")["model.mtp_linear_proj.0.weight"]
    assert projection.shape == (256, 512)
    assert projection.float().std().item() == pytest.approx(0.02, rel=0.02)
    executor.close()


def test_other_shapes_have_no_mtp_layer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="models of the shape tiny-moe have no such layer"):
        make_checkpoint.make_checkpoint("tiny-moe", tmp_path, mtp=True)


@pytest.mark.parametrize(("shape", "least"), [("ernie-21b-a3b", 21.8e9), ("qwen3-30b-a3b", 30.5e9)])
def test_shapes_have_the_parameters_of_their_names(shape: str, least: float) -> None:
    shapes = make_checkpoint.tensor_shapes(make_checkpoint.SHAPES[shape])
    assert least <= sum(math.prod(tensor) for _, tensor in shapes) < least + 0.1e9
