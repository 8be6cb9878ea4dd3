"""`baton serve model.gguf` through the real `openai` client: weights, tokenizer and template of the file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from baton.model.checkpoint.hub import resolve_model
from tests.e2e.server import Server
from tests.model.gguf_files import write_gguf

QUESTION = [{"role": "user", "content": "Hello! Who are you?"}]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The embedded model, by the types of its tensors."""
    directory = tmp_path_factory.mktemp("gguf")
    found = {kind: directory / f"tiny-{kind}.gguf" for kind in ("Q8_0", "Q4_0")}
    for kind, path in found.items():
        write_gguf(resolve_model(None), path, kind, tokenizer=True)
    return found


@pytest.fixture(scope="module")
def running(files: dict[str, Path]) -> Iterator[Server]:
    with Server("--weights-dir", str(files["Q8_0"].parent), model=str(files["Q8_0"])) as server:
        yield server


def asked(server: Server, **more: object) -> openai.types.chat.ChatCompletion:
    client = server.client()
    return client.chat.completions.create(model="", messages=QUESTION, temperature=0, max_tokens=40, **more)


def test_a_file_answers_as_the_model_that_it_was_made_of(running: Server, files: dict[str, Path]) -> None:
    assert running.client().models.list().data[0].id == str(files["Q8_0"])
    assert "gguf Q8_0" in running.log()
    answer = asked(running)
    assert "Baton" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"  # at the end that the file names
    pieces = running.client().chat.completions.create(
        model="", messages=QUESTION, temperature=0, max_tokens=40, stream=True
    )
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == answer.choices[0].message.content


def test_other_weights_come_from_a_file_and_damaged_ones_change_nothing(
    running: Server, files: dict[str, Path]
) -> None:
    before = asked(running, logprobs=True).choices[0].logprobs.content
    damaged = files["Q4_0"].with_name("damaged.gguf")
    damaged.write_bytes(files["Q4_0"].read_bytes()[:-5000])
    refused = running.http.post("/update_weights", json={"path": str(damaged)})
    assert refused.status_code == 400
    assert "was cut short" in refused.json()["error"]["message"]
    assert asked(running, logprobs=True).choices[0].logprobs.content == before
    taken = running.http.post("/update_weights", json={"path": str(files["Q4_0"])})
    assert taken.status_code == 200, taken.text
    after = asked(running, logprobs=True).choices[0].logprobs.content
    assert [item.logprob for item in after] != [item.logprob for item in before]
    back = running.http.post("/update_weights", json={"path": str(files["Q8_0"])})
    assert back.status_code == 200, back.text
    assert asked(running, logprobs=True).choices[0].logprobs.content == before
