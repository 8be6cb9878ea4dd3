"""Whatever stands in a body, in whichever place: it is read, or refused as what it is, and is no fault of the
server's."""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import baton
from baton.gateway.errors import ApiError
from baton.gateway.parsing.choice import choose
from baton.gateway.reading.jobs import MORE, Job, with_more
from baton.gateway.reading.reader import Reader
from baton.gateway.reading.settings import Settings
from baton.gateway.text.tokenizer import Tokenizer

TINY = Path(baton.__file__).parent / "assets" / "baton-tiny"
WHOLE: dict[str, Any] = json.loads((Path(__file__).parent / "whole_bodies.json").read_text())
"""Of each API, with all kinds of items and tools, well-formed."""
ODD: list[Any] = [
    None,
    "",
    0,
    -1,
    True,
    1.5,
    [],
    {},
    " ",
    "x" * 200,
    "é\n\u0000",
    [None],
    [[]],
    {"type": None},
    {"type": "function"},
    {"type": []},
    {"a": {"b": [1]}},
    2**70,
    "auto",
    "required",
    "none",
    ["x"],
    [1],
    {"type": "text"},
    {"type": "text", "text": None},
    {"type": "custom", "name": "c"},
    "{",
    "null",
    "[]",
    "{}",
]
"""What is put in any place."""
JOBS: list[tuple[Job, dict[str, Any]]] = [
    ("responses", WHOLE["responses"]),
    ("compact", WHOLE["responses"]),
    ("chat", WHOLE["chat"]),
    ("messages", WHOLE["messages"]),
    ("count_tokens", WHOLE["messages"]),
]


@pytest.fixture(scope="module")
def reader() -> Reader:
    tokenizer = Tokenizer.from_directory(TINY)
    return Reader(
        Settings(
            max_model_len=20_000,
            vocab_size=1024,
            template=tokenizer.template_source,
            content_format="openai",
            refuses=False,
            special_tokens=tokenizer.special_tokens,
            template_defaults={},
            formats=choose(tokenizer.template_source, "auto", "auto", response=tokenizer.response_template),
            judge=None,
            keeps=True,
            refuse_tools=False,
            encoding=tokenizer.encoding.source(),
            special_names=tokenizer.special_names,
        )
    )


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield from places(one, (*path, key))


def spoilt(body: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """With something odd in a place or some, or nothing, or the same twice."""
    body = copy.deepcopy(body)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        *path, last = rng.choice(list(places(body)))
        there: Any = body
        for key in path:
            there = there[key]
        match rng.randrange(5):
            case 0:
                del there[last]
            case 1 if isinstance(there, list):
                there.insert(last, copy.deepcopy(there[last]))
            case _:
                there[last] = copy.deepcopy(rng.choice(ODD))
    return body


def read(reader: Reader, job: Job, body: dict[str, Any]) -> bool:
    """Whether it is served."""
    data = json.dumps(body).encode()
    try:
        _, found, _ = reader.read(job, b"".join(with_more(b"", [data])) if job in MORE else data)
    except ApiError:
        return False
    return not found.is_refused


@pytest.mark.parametrize(("job", "body"), JOBS, ids=[job for job, _ in JOBS])
def test_odd_bodies_are_served_or_refused(reader: Reader, job: Job, body: dict[str, Any]) -> None:
    assert read(reader, job, body)
    rng, served = random.Random(30), Counter[bool]()
    for _ in range(1500):
        served[read(reader, job, spoilt(body, rng))] += 1
    assert min(served.values()) > 100


@pytest.mark.parametrize("value", [[], {}, [[]], {"a": 1}])
def test_ids_and_roles_that_are_no_texts_are_refused(reader: Reader, value: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "g", "arguments": "{}"}}
    user, turn = (
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    )
    result = {"role": "tool", "tool_call_id": "1", "content": "x"}
    assert read(reader, "chat", {"messages": [user, turn, result]})
    for messages in (
        [user, {**turn, "tool_calls": [{**call, "id": value}]}],
        [user, turn, {**result, "tool_call_id": value}],
        [{**user, "role": value}],
    ):
        assert not read(reader, "chat", {"messages": messages})
        assert not read(reader, "messages", {"max_tokens": 1, "messages": messages})
    assert not read(reader, "responses", {"input": [{"role": value, "content": "x"}]})
    interpreted = {"type": "code_interpreter_call", "id": "c", "code": "x", "outputs": 5}
    assert read(reader, "responses", {"input": [interpreted, user]})


def test_a_local_shells_output_names_its_call_by_either_id(reader: Reader) -> None:
    call = {
        "type": "local_shell_call",
        "id": "lsh",
        "call_id": "c",
        "action": {"type": "exec", "command": ["ls"]},
    }
    for id in ({"id": "lsh"}, {"call_id": "c"}, {"id": "c"}, {"id": "out", "call_id": "c"}):
        output = {"type": "local_shell_call_output", "output": "x", **id}
        assert read(reader, "responses", {"input": [call, output]}), id
    assert not read(reader, "responses", {"input": [call, {**output, "call_id": "other"}]})
