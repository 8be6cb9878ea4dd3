"""How long a context is served by default: as the least that a file of the model says, as vLLM has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.launch.limits import OptionError
from baton.launch.options.engine import EngineOptions
from baton.launch.planning.plan import make_plan
from baton.model.checkpoint.files import read_model_max_length
from baton.model.checkpoint.hub import resolve_model
from tests.launch.test_ends import copied

CONTEXT = json.loads((resolve_model(None) / "config.json").read_text())["max_position_embeddings"]


def length(directory: Path, **flags: Any) -> int:
    return make_plan(EngineOptions(model=str(directory), **flags)).served.max_model_len


@pytest.mark.parametrize(
    ("said", "served"),
    [
        (96, 96),
        (96.0, 96),
        (None, CONTEXT),
        (CONTEXT + 1, CONTEXT),
        (1e30, CONTEXT),
        ("96", CONTEXT),
        (True, CONTEXT),
    ],
)
def test_the_tokenizers_file_may_say_less(tmp_path: Path, said: Any, served: int) -> None:
    copied(tmp_path, tokenizer_config={"model_max_length": said})
    assert length(tmp_path) == served


def test_a_flag_says_more_than_that_and_not_more_than_the_positions(tmp_path: Path) -> None:
    copied(tmp_path, tokenizer_config={"model_max_length": 96})
    assert length(tmp_path, max_model_len=CONTEXT) == CONTEXT
    with pytest.raises(OptionError, match=f"the model's context is {CONTEXT} tokens"):
        length(tmp_path, max_model_len=CONTEXT + 1)


def test_what_yarn_stretches_is_not_cut(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": CONTEXT}
    copied(tmp_path, config={"rope_scaling": rope}, tokenizer_config={"model_max_length": CONTEXT})
    assert length(tmp_path) == 2 * CONTEXT


def test_sentence_transformers_file_counts_for_vectors(tmp_path: Path) -> None:
    copied(tmp_path, sentence_bert_config={"max_seq_length": 64})
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.Transformer"}]))
    assert length(tmp_path) == 64
    assert length(tmp_path, runner="generate") == CONTEXT


def test_no_file_says_nothing(tmp_path: Path) -> None:
    assert read_model_max_length(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text("[")
    assert read_model_max_length(tmp_path) is None
