"""What sentence-transformers keeps beside a checkpoint, and checkpoints of the layers alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from baton.executor.torch_executor import TorchExecutor
from baton.launch.options import EngineOptions
from baton.launch.planning.plan import make_plan
from baton.model.checkpoint.config import UnsupportedModel
from baton.model.checkpoint.hub import resolve_model
from baton.model.checkpoint.sentence_files import (
    read_classifier_tokens,
    read_pooler_config,
    read_sentence_files,
)
from baton.protocol.params.pooling import Pooling
from tests.executor.results.test_pooling import KINDS, pooled
from tests.executor.test_torch_parity import config_for, prompt_of
from tests.model.checkpoints import make_checkpoint

TRANSFORMER = {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
DENSE = {"idx": 3, "path": "3_Dense", "type": "sentence_transformers.models.Dense"}


def write(directory: Path, modules: object, pooling: object = None) -> Path:
    (directory / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (directory / "1_Pooling").mkdir(exist_ok=True)
        (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return directory


@pytest.mark.parametrize(
    ("modules", "pooling", "expected"),
    [
        (
            [TRANSFORMER, POOLING, NORMALIZE],
            {
                "word_embedding_dimension": 64,
                "pooling_mode_lasttoken": True,
                "pooling_mode_mean_tokens": False,
            },
            Pooling("last"),
        ),
        ([TRANSFORMER, POOLING], {"pooling_mode_mean_tokens": True}, Pooling("mean", normalize=False)),
        ([TRANSFORMER, POOLING, NORMALIZE], {"pooling_mode": "cls"}, Pooling("first")),
        ([TRANSFORMER], None, Pooling("last", normalize=False)),
    ],
)
def test_what_they_say(tmp_path: Path, modules: Any, pooling: Any, expected: Pooling) -> None:
    found = read_sentence_files(write(tmp_path, modules, pooling))
    assert found is not None
    assert found.pooling == expected


def test_none_is_none(tmp_path: Path) -> None:
    assert read_sentence_files(tmp_path) is None


@pytest.mark.parametrize(
    ("modules", "pooling", "said"),
    [
        ([TRANSFORMER, POOLING, DENSE], {"pooling_mode": "mean"}, "module Dense is not supported"),
        ([TRANSFORMER, POOLING], {"pooling_mode_max_tokens": True}, "pooling by max"),
        (
            [TRANSFORMER, POOLING],
            {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
            "pooling by mean and cls",
        ),
        ([TRANSFORMER, POOLING], None, "1_Pooling/config.json: cannot be read"),
        ({"a": 1}, None, "must be a list"),
        ("?", None, "must be a list"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, modules: Any, pooling: Any, said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        read_sentence_files(write(tmp_path, modules, pooling))


def test_pooler_config() -> None:
    default = Pooling("mean", normalize=False)
    assert read_pooler_config("{}", default, 64) == default
    text = '{"pooling_type": "last", "normalize": true, "dimensions": 32}'
    assert read_pooler_config(text, default, 64) == Pooling("last", 32)
    for text, said in (
        ("[", "no JSON object"),
        ('{"pooling_type": "ALL"}', "pooling_type"),
        ('{"dimensions": 65}', "1 to 64"),
        ('{"normalize": 1}', "normalize"),
        ('{"what": 1}', "unknown"),
    ):
        with pytest.raises(ValueError, match=said):
            read_pooler_config(text, default, 64)


def test_classifier_tokens(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"classifier_from_token": ["no", "yes"]}')
    assert read_classifier_tokens(tmp_path) == ("no", "yes")
    (tmp_path / "config.json").write_text('{"classifier_from_token": ["no"]}')
    with pytest.raises(UnsupportedModel, match="classifier_from_token"):
        read_classifier_tokens(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert read_classifier_tokens(tmp_path) is None


def tasks(directory: Path, **given: Any) -> set[str]:
    return set(make_plan(EngineOptions(str(directory), **given)).served.tasks)


def test_what_is_served_follows_from_files_and_flags(tmp_path: Path) -> None:
    for path in resolve_model(None).iterdir():
        (tmp_path / path.name).symlink_to(path)
    assert tasks(tmp_path) == {"generate"}
    assert tasks(tmp_path, convert="embed") == {"generate", "embed", "score"}
    assert tasks(tmp_path, convert="classify") == {"generate", "score"}
    assert tasks(tmp_path, runner="pooling") == {"embed", "score"}
    write(tmp_path, [TRANSFORMER, POOLING], {"pooling_mode": "mean"})
    assert tasks(tmp_path) == {"embed", "score"}
    assert tasks(tmp_path, runner="generate") == {"generate"}
    assert make_plan(EngineOptions(str(tmp_path))).served.pooling == Pooling("mean", normalize=False)
    with pytest.raises(ValueError, match="--convert none"):
        tasks(tmp_path, convert="none")
    with pytest.raises(ValueError, match="--pooler-config: dimensions"):
        tasks(tmp_path, pooler_config='{"dimensions": 0}')


@pytest.mark.parametrize("variant", ["qwen3", "llama2"])
def test_a_checkpoint_of_the_layers_alone(tmp_path: Path, variant: str) -> None:
    """As embedding models are saved: no prefix, no head."""
    whole, bare = tmp_path / "whole", tmp_path / "bare"
    make_checkpoint(whole, variant)
    bare.mkdir()
    (bare / "config.json").write_bytes((whole / "config.json").read_bytes())
    tensors = load_file(whole / "model.safetensors")
    kept = {name.removeprefix("model."): one for name, one in tensors.items() if name != "lm_head.weight"}
    save_file(kept, bare / "model.safetensors")
    found = []
    for directory in (whole, bare):
        executor = TorchExecutor.from_config(config_for(directory, headless=directory == bare), 0, "")
        found.append(pooled(executor, [prompt_of(20)], KINDS["last"]))
        executor.close()
    assert found[0] == found[1]
