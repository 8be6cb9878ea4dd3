"""Vectors of checkpoints that lack what only texts need: a head, its names, a template, the end's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from baton import LLM
from baton.executor.torch_executor import TorchExecutor
from baton.launch.limits import OptionError
from baton.launch.options.engine import EngineOptions
from baton.launch.planning.plan import make_plan
from baton.model.checkpoint.files import LoadError
from baton.model.checkpoint.hub import resolve_model
from tests.executor.test_torch_parity import config_for

TEXTS = ["Hello there!", "The cat sleeps on the warm stone."]


def made(directory: Path, *, prefix: bool, **config: Any) -> Path:
    """The embedded model without a head, as a class that has one, and does not tie it, says it is."""
    source = resolve_model(None)
    raw = json.loads((source / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": False} | config))
    (directory / "tokenizer.json").symlink_to(source / "tokenizer.json")
    tensors = load_file(source / "model.safetensors")
    assert "lm_head.weight" not in tensors
    if not prefix:
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def vectors(model: str | None, **flags: Any) -> list[list[float]]:
    with LLM(model, dtype="float32", num_threads=1, max_model_len=64, **flags) as llm:
        return [one.outputs.embedding for one in llm.embed(TEXTS, use_tqdm=False)]


@pytest.fixture(scope="module")
def expected() -> list[list[float]]:
    return vectors(None, runner="pooling")


BODY = json.loads((resolve_model(None) / "config.json").read_text())["architectures"][0].replace(
    "ForCausalLM", "Model"
)


@pytest.mark.parametrize(
    ("prefix", "config", "flags"),
    [
        (True, {}, {"runner": "pooling"}),
        (False, {}, {"runner": "pooling"}),
        (False, {"architectures": [BODY]}, {}),  # as `AutoModel` saves it; nothing needs to be said then
        (True, {"architectures": [BODY]}, {"runner": "pooling"}),
    ],
)
def test_vectors_need_no_head(
    prefix: bool, config: dict[str, Any], flags: dict[str, Any], tmp_path: Path, expected: list[list[float]]
) -> None:
    assert vectors(str(made(tmp_path, prefix=prefix, **config)), **flags) == expected


@pytest.mark.parametrize("prefix", [True, False])
def test_texts_need_one(prefix: bool, tmp_path: Path) -> None:
    made(tmp_path, prefix=prefix)
    with pytest.raises(LoadError, match=r"no tensor 'lm_head\.weight'.*give --runner pooling"):
        TorchExecutor.from_config(config_for(tmp_path), 0, "")


def test_a_class_without_a_head_makes_no_texts(tmp_path: Path) -> None:
    made(tmp_path, prefix=False, architectures=[BODY])
    with pytest.raises(OptionError, match="--runner generate: this model's class has no head"):
        make_plan(EngineOptions(model=str(tmp_path), runner="generate"))
    assert make_plan(EngineOptions(model=str(tmp_path))).served.tasks == {"embed", "score"}
