"""What ends an answer: each of a checkpoint's files may say it, and all that say something are heard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton import LLM, SamplingParams
from baton.gateway.text.tokenizer import Tokenizer
from baton.launch.options.engine import EngineOptions
from baton.launch.planning.plan import make_plan
from baton.model.checkpoint.config import UnsupportedModel
from baton.model.checkpoint.hub import resolve_model

FILES = {
    "config.json": 101,
    "generation_config.json": 102,
    "tokenizer_config.json": 103,
    "special_tokens_map.json": 104,
}
"""Where an end is named, and an id that only this file names."""


def copied(directory: Path, **changes: dict[str, Any] | None) -> Path:
    """The embedded model with fields changed, by the files' names without their ends."""
    for file in resolve_model(None).iterdir():
        (directory / file.name).symlink_to(file)
    for name, change in changes.items():
        path = directory / f"{name}.json"
        raw = json.loads(path.read_text()) if path.exists() else {}
        path.unlink(missing_ok=True)
        if change is not None:
            path.write_text(json.dumps(raw | change))
    return directory


@pytest.fixture(scope="module")
def contradicting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each file names another end: a fine-tune that changed some of them and not the others."""
    tokenizer = Tokenizer.from_directory(resolve_model(None))
    ends: dict[str, Any] = {
        name: tokenizer.token(end) if "token" in name else end for name, end in FILES.items()
    }
    return copied(
        tmp_path_factory.mktemp("contradicting"),
        **{
            name.removesuffix(".json"): {"eos_token" if "token" in name else "eos_token_id": end}
            for name, end in ends.items()
        },
    )


@pytest.fixture(scope="module")
def llm(contradicting: Path) -> Any:
    with LLM(str(contradicting), dtype="float32", max_model_len=64, num_threads=1) as running:
        yield running


@pytest.mark.parametrize("file", FILES)
def test_each_file_ends_an_answer(llm: LLM, file: str) -> None:
    forced = SamplingParams(temperature=0.0, max_tokens=3, logit_bias={FILES[file]: 100.0})
    (answer,) = llm.generate(["a"], forced, use_tqdm=False)
    assert answer.outputs[0].finish_reason == "stop"
    assert len(answer.outputs[0].token_ids) == 1


def test_what_no_file_names_ends_nothing(llm: LLM) -> None:
    forced = SamplingParams(temperature=0.0, max_tokens=3, logit_bias={105: 100.0})
    (answer,) = llm.generate(["a"], forced, use_tqdm=False)
    assert (answer.outputs[0].finish_reason, len(answer.outputs[0].token_ids)) == ("length", 3)


def test_lists_of_several_files_are_joined(tmp_path: Path) -> None:
    copied(tmp_path, config={"eos_token_id": [7, 8]}, generation_config={"eos_token_id": [8, 9, -1]})
    assert make_plan(EngineOptions(model=str(tmp_path))).served.eos_token_ids == (8, 9, 7)


@pytest.mark.parametrize("file", ["config", "generation_config"])
@pytest.mark.parametrize("wrong", [True, "</s>", [1, "2"], 2.5, {"id": 1}])
def test_what_is_no_id_is_refused_by_file_and_field(tmp_path: Path, file: str, wrong: Any) -> None:
    copied(tmp_path, **{file: {"eos_token_id": wrong}})
    with pytest.raises(UnsupportedModel, match=rf"{file}\.json.*eos_token_id.*must be a token id") as caught:
        make_plan(EngineOptions(model=str(tmp_path)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file", ["config", "generation_config"])
def test_a_file_that_says_null_leaves_it_to_the_others(tmp_path: Path, file: str) -> None:
    copied(
        tmp_path,
        **{
            "config": {"eos_token_id": 5},
            "generation_config": {"eos_token_id": 5},
            file: {"eos_token_id": None},
        },
    )
    assert make_plan(EngineOptions(model=str(tmp_path))).served.eos_token_ids == (5,)


def test_null_in_the_tokenizers_files_says_nothing(tmp_path: Path) -> None:
    copied(tmp_path, tokenizer_config={"eos_token": None}, special_tokens_map={"eos_token": {"content": "!"}})
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert [tokenizer.token(end) for end in tokenizer.end_ids] == ["!"]


@pytest.mark.parametrize("said", [{"top_p": 0.0}, {"eos_token_id": "</s>"}])
def test_who_gives_vectors_needs_no_ends(tmp_path: Path, said: dict[str, Any]) -> None:
    """What a file says of generating is read where something is generated."""
    directory = copied(tmp_path, generation_config=said)
    with pytest.raises(UnsupportedModel, match=r"generation_config.json"):
        make_plan(EngineOptions(model=str(directory)))
    served = make_plan(EngineOptions(model=str(directory), runner="pooling")).served
    assert served.tasks == {"embed", "score"}
