"""Agents as programs against a server (`make agents`): each does a task by its own tools.

What passed is in build/agents, and a line for each program in build/agents/table.md.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.agents.programs import ANSWER, KNOWN, MODEL, NOTE, PROGRAMS, Place, Program
from tests.agents.recorder import Recorder
from tests.agents.running import prepare, run
from tests.agents.scripted import make_checkpoint
from tests.e2e.server import Server

INSTALLED = os.environ.get("BATON_AGENTS", "")
OUT = Path("build/agents")

pytestmark = [
    pytest.mark.skipif(not INSTALLED, reason="needs the programs: make agents"),
    pytest.mark.timeout(1200),
]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Place]:
    root = tmp_path_factory.mktemp("agents")
    installed = Path(INSTALLED).resolve()
    return {name: Place(installed, root / name / "home", root / name / "work") for name in PROGRAMS}


@pytest.fixture(scope="module")
def server(places: dict[str, Place], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "table.md").write_text("")
    root = tmp_path_factory.mktemp("served")
    make_checkpoint(root / "model")
    script = root / "script.json"
    script.write_bytes(msgspec.json.encode([one.script(places[one.name]) for one in PROGRAMS.values()]))
    flags = ("--served-model-name", MODEL, "--served-model-name", KNOWN, "--kv-cache-memory-bytes", "512MiB")
    os.environ["AGENTS_SCRIPT"] = str(script)
    with Server(*flags, model=str(root / "model"), module="tests.agents.scripted") as running:
        yield running


@pytest.mark.parametrize("name", PROGRAMS)
def test_does_the_task(name: str, server: Server, places: dict[str, Place]) -> None:
    program = PROGRAMS[name]
    with Recorder(server.url) as recorder:
        place = places[name].at(recorder.url)
        prepare(place)
        code, output = run(program, place)
    exchanges = recorder.exchanges
    (OUT / f"{name}.json").write_text(json.dumps(exchanges, indent=1))
    assert code == 0, output
    answer = place.work / "answer.txt"
    assert answer.exists(), output
    assert answer.read_text() == ANSWER
    asked = [one for one in exchanges if one["path"].partition("?")[0] == program.api]
    assert {one["status"] for one in asked} == {200}
    assert not any(one["left"] for one in asked)
    turns = [one for one in asked if _is_turn(program, one["body"])]
    assert len(turns) >= program.least_turns, output
    assert NOTE.strip() in json.dumps(turns[1]["body"])  # the tool's result came back
    with (OUT / "table.md").open("a") as table:
        table.write(_line(program, turns, exchanges))


def _is_turn(program: Program, body: dict[str, Any]) -> bool:
    """A turn of the task; not what a program asks beside it: a title, a message for a commit."""
    tools = bool(body.get("tools")) or not program.calls
    return tools and bool(body.get("stream")) and program.task in json.dumps(body)


def _line(program: Program, turns: list[dict[str, Any]], exchanges: list[dict[str, Any]]) -> str:
    kinds: dict[str, int] = {}
    for tool in turns[0]["body"].get("tools") or ():
        kind = tool.get("type") or "without a type"
        kinds[kind] = kinds.get(kind, 0) + 1
    skipped = turns[0]["answer_headers"].get("x-baton-skipped-tools", "")
    offered = ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "none"
    others = len(exchanges) - len(turns)
    asked = f"{len(turns)} (and {others} others)"
    return f"| {program.name} | {program.api} | {asked} | {offered} | {skipped or 'none'} |\n"
