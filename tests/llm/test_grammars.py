"""Python programs compile in a process of their own: whatever a schema does there, the program goes on."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.gateway.errors import BadRequest, InternalError
from baton.gateway.reading.constraints.structured import Asked, asked_for
from baton.grammar import checking
from baton.llm.grammars import CheckedGrammars
from baton.protocol.params.structured_outputs import StructuredOutputs


@pytest.fixture
def grammars() -> Iterator[CheckedGrammars]:
    found = CheckedGrammars({"<end>": 3})
    yield found
    found.close()


def asked(schema: Any) -> Asked:
    found = asked_for(StructuredOutputs(json=schema))
    assert found is not None
    return found


def children() -> list[int]:
    """Of the helpers' parent."""
    parents = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
    return [
        int(one)
        for parent in parents
        for one in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    ]


def test_it_is_another_process_that_compiles(
    grammars: CheckedGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> str:
        raise AssertionError("compiled in the program's process")

    monkeypatch.setattr(checking.Checker, "check", never)
    assert "%json" in grammars.of(asked({"type": "integer"}))
    assert children()


def test_a_refusal_names_its_field_and_is_kept(grammars: CheckedGrammars) -> None:
    for _ in range(2):
        with pytest.raises(BadRequest, match=r"^structured_outputs\.json: x: .*must be an object|contains"):
            grammars.of(asked({"type": "array", "contains": {"type": "string"}}))


def test_a_process_that_dies_ends_one_request_only(
    grammars: CheckedGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for a library that crashes: the helper is killed while it has the description."""
    assert grammars.of(asked({"type": "null"}))
    process = grammars._process
    assert process is not None
    whole = type(process)._receive

    def killed(self: Any, size: int, deadline: float) -> bytes:
        for child in children():
            os.kill(child, signal.SIGKILL)
        return whole(self, size, deadline)

    monkeypatch.setattr(type(process), "_receive", killed)
    with pytest.raises(BadRequest, match="ended the process"):
        grammars.of(asked({"type": "boolean"}))
    monkeypatch.undo()
    assert grammars.of(asked({"type": "integer"}))
    with pytest.raises(BadRequest, match="ended the process"):  # (kept: it costs a process once)
        grammars.of(asked({"type": "boolean"}))


def test_one_that_takes_too_long_is_refused_within_its_time() -> None:
    """Limits of time are the helper's; the wait has one of its own."""
    grammars = CheckedGrammars({}, wall_s=0.001)
    with pytest.raises(InternalError, match="took more than"):
        grammars.of(asked({"type": "integer"}))
    grammars.close()


def test_many_threads_share_it(grammars: CheckedGrammars) -> None:
    found: list[str] = []

    def ask(number: int) -> None:
        found.append(grammars.of(asked({"const": number % 5})))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 20
    assert len(set(found)) == 5
