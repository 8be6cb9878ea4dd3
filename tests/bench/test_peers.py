"""`benchmarks/peers.py`: what its options mean, and what its adapters make of a checkpoint."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.executor.torch_executor import TorchExecutor
from baton.model.checkpoint.config import ModelConfig
from tests.executor.driver import Driver
from tests.executor.test_torch_parity import config_for

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def modules() -> Any:
    """Imports a file of benchmarks/ or benchmarks/_peers; they import each other by their bare names."""
    places = [str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "_peers")]
    before = set(sys.modules)
    sys.path[:0] = places
    yield importlib.import_module
    for place in places:
        sys.path.remove(place)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(places[0]):
            del sys.modules[name]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a head of its own."""
    directory = tmp_path_factory.mktemp("tiny")
    script = ROOT / "tools" / "make_checkpoint.py"
    spec = importlib.util.spec_from_file_location("make_checkpoint_for_peers", script)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    tool.make_checkpoint("tiny-llama", directory)
    return directory


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for path in directory.glob("*.safetensors")
        for name, tensor in load_file(str(path)).items()
    }


def test_a_peer_has_settings_of_its_own(modules, tmp_path):
    peers = modules("peers")
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.touch()
    given = f"openvino@g64={tmp_path},quantization=int4,quantization_group_size=64,threads=2"
    peer = peers.parse_peer(given)
    assert (peer.name, peer.python) == ("openvino@g64", python)
    assert peer.settings == {"quantization": "int4", "quantization_group_size": 64, "threads": 2}
    assert peers.parse_peer(f"vllm={tmp_path}").settings == {}


def test_nobody_drafts_unless_asked_to(modules, tmp_path, monkeypatch):
    """Greedy answers of random weights repeat themselves: guesses are no speed of the model."""
    peers = modules("peers")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    started = {}

    class Engine:
        def __init__(self, name, python, settings, log):
            started[name] = settings["speculation"]
            raise RuntimeError("no engine is needed") if name != "baton" else SystemExit

    monkeypatch.setattr(peers, "Engine", Engine)
    monkeypatch.setattr(peers, "bandwidth", lambda: 1e9)
    monkeypatch.setattr(peers, "vocabulary_of", lambda model: 100)
    for more, drafts in (([], "off"), (["--ours", "speculation=ngram"], "ngram")):
        monkeypatch.setattr("sys.argv", ["peers.py", str(tmp_path / "model"), *more])
        with pytest.raises(SystemExit):
            peers.main()
        assert started == {"baton": drafts}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("quantization_group_size=many", "quantization_group_size is a number"),
        ("bits=4", "none of dtype="),
        ("quantization=", "none of dtype="),
    ],
)
def test_settings_that_are_none(modules, text, message):
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        modules("peers").parse_settings(text)


@pytest.mark.parametrize(
    ("work", "short", "warm"),
    [
        ((64, 128, 128), False, (64, 128, 16)),
        ((64, 128, 128), True, (8, 128, 16)),
        ((1, 2048, 1), False, (1, 2048, 1)),
        ((1, 2048, 1), True, (1, 256, 1)),
        ((4, 16, 4), True, (1, 2, 2)),
    ],
)
def test_what_warms_up(modules, work, short, warm):
    assert modules("peers").warm_up(work, short) == warm


def test_bits_of_layers_and_of_the_head(modules):
    split = modules("answering").split
    tied = [("blk.0.attn_q.weight", 10), ("blk.1.ffn_up.weight", 20), ("token_embd.weight", 7)]
    assert split(tied) == {"layers": 30, "head": 7}
    assert split([*tied, ("output.weight", 9)]) == {"layers": 30, "head": 9}
    names = [("model.layers.0.mlp.up_proj.weight_packed", 30), ("model.embed_tokens.weight", 5)]
    assert split(names) == {"layers": 30, "head": 5}
    assert split([*names, ("lm_head.weight", 6)]) == {"layers": 30, "head": 6}
    hello = {"weight_bytes": {"layers": 90, "head": 20}, "weight_numbers": {"layers": 160, "head": 20}}
    weights = modules("_engines").Weights.of(hello)
    assert (weights.layer_bits, weights.head_bits, weights.nbytes) == (4.5, 8.0, 110)
    assert modules("_engines").Weights.of(hello | {"weight_bytes": None}) is None


def test_a_gguf_file_has_the_numbers_of_the_checkpoint(modules, checkpoint, tmp_path):
    gguf = pytest.importorskip("gguf")
    files = modules("gguf_files")
    (path,) = files.convert(checkpoint, tmp_path, ["bf16"])
    assert path == tmp_path / "model-bf16.gguf"
    tensors = tensors_of(checkpoint)
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert len(found) == len(tensors)
    for name, target in (
        ("model.embed_tokens", "token_embd"),
        ("model.layers.1.mlp.down_proj", "blk.1.ffn_down"),
    ):
        written = torch.from_numpy(found[f"{target}.weight"].data.copy()).view(torch.bfloat16)
        assert torch.equal(written, tensors[f"{name}.weight"])
    sizes = files.weight_bytes(path)
    assert sizes["head"] == 2 * tensors["lm_head.weight"].numel()
    with pytest.raises(modules("answering").NotOffered, match="q3_k"):
        files.convert(checkpoint, tmp_path, ["q3_k"])


@pytest.mark.parametrize("kind", ["quoting", "editing"])
def test_a_model_that_quotes(modules, checkpoint, tmp_path, kind):
    """Its answer is the text of the prompt, also where the prompt has other tokens."""
    beside = modules("_beside")
    model = beside.quoting_checkpoint(checkpoint, tmp_path / "quoting")
    assert beside.quoting_checkpoint(checkpoint, tmp_path / "quoting") == model
    prompt, text = (beside.prompt_of(name, 2048, 3) for name in (kind, "quoting"))
    assert len(prompt) == beside.PROMPT
    assert sum(one != other for one, other in zip(prompt, text, strict=True)) == (
        12 if kind == "editing" else 0
    )
    executor = TorchExecutor.from_config(config_for(model, dtype="float32"), 0, "")
    driver = Driver(executor)
    request = driver.add(prompt, 24)
    driver.run()
    executor.close()
    assert request.tokens == text[8:32]


def test_a_gguf_file_for_the_server_has_the_tokens(modules, checkpoint, tmp_path):
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    modules("gguf_files").write_plain(checkpoint, path, tokenizer=True)
    fields = gguf.GGUFReader(path).fields
    assert fields["tokenizer.ggml.model"].contents() == "gpt2"
    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert len(tokens) == len(set(tokens)) == 2048


@pytest.mark.parametrize("text", ["openvino=/x", "vllm=", "vllm=/nowhere", "vllm"])
def test_an_engine_that_does_not_draft_is_refused(modules, text):
    with pytest.raises(argparse.ArgumentTypeError, match="give NAME=VENV or NAME=VENV,METHOD"):
        modules("_beside").parse_beside(text)


def test_tokens_until_two_answers_part(modules):
    shared = modules("_beside").shared
    assert [shared([1, 2, 3], [1, 2, 4]), shared([1], [1, 2]), shared([2], [1])] == [2, 1, 0]


def test_rows_of_queries_change_places_for_llama_only(modules):
    in_order = modules("gguf_files").in_order
    rows = np.arange(8).reshape(8, 1)
    config = {"model_type": "llama", "head_dim": 4}
    name = "model.layers.0.self_attn.q_proj.weight"
    assert in_order(name, rows, config).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert in_order(name, rows, config | {"model_type": "qwen3"}) is rows
    assert in_order("model.layers.0.self_attn.v_proj.weight", rows, config) is rows


@pytest.mark.parametrize(("bits", "group"), [(4, 128), (4, 32), (8, 0)])
def test_a_checkpoint_in_compressed_tensors_format(modules, checkpoint, tmp_path, bits, group):
    """Its config is one that is served; a weight is off by half a step at most."""
    target = modules("packed_files").convert(checkpoint, tmp_path / "made", bits, group)
    quantization = ModelConfig.from_directory(str(target)).quantization
    assert quantization is not None
    assert quantization.method == "compressed-tensors"
    name = "model.layers.0.mlp.down_proj.weight"
    made, given = tensors_of(target), tensors_of(checkpoint)[name].float()
    assert torch.equal(made["lm_head.weight"], tensors_of(checkpoint)["lm_head.weight"])
    scales = made[f"{name}_scale"].float()
    if bits == 4:
        words = made[f"{name}_packed"].unsqueeze(2)
        codes = ((words >> torch.arange(0, 32, 4)) & 15).flatten(1).float() - 8
        assert made[f"{name}_shape"].tolist() == list(given.shape)
    else:
        codes = made[name].float()
    steps = scales.repeat_interleave(given.shape[1] // scales.shape[1], 1)
    assert ((codes * steps - given).abs() <= 0.51 * steps).all()


def test_sizes_of_a_checkpoint(modules, tmp_path):
    save_file(
        {"model.layers.0.a": torch.zeros(4, 8), "lm_head.weight": torch.zeros(2, 3)},
        str(tmp_path / "a.safetensors"),
    )
    assert modules("answering").weight_numbers(tmp_path) == {"layers": 32, "head": 6}
    assert modules("packed_files").weight_bytes(tmp_path) == {"layers": 128, "head": 24}
