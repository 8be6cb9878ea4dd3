"""Reduces what `make agents` recorded to bodies for tests/agents/test_bodies.py:
`python -m tests.agents.reducing build/agents`.

Structure stays: fields, types, nesting, names, numbers.  Prose does not: prompts and descriptions become a
few words of ours.  What the task itself says and gives stays as it is.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from tests.agents.programs import ANSWER, NOTE, PROGRAMS, Program

BODIES = Path(__file__).parent / "bodies"
GRAMMAR = """start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?
hunk: "*** Add File: " name LF added+ | "*** Update File: " name LF changed+
name: /(.+)/
added: "+" /(.*)/ LF -> line
changed: ("+" | "-" | " ") /(.*)/ LF
%import common.LF
"""
"""In place of a program's own: the same parts of the language."""

_KEPT_HEADERS = ("anthropic-version", "anthropic-beta", "user-agent", "originator", "accept")
_UUID = re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b")
_WORD = re.compile(r"[\w.:/<>@*|$^-]{1,80}")
_HASH = re.compile(r"\b[0-9a-f]{64}\b")
_OURS = (NOTE.strip(), ANSWER.strip())
_KEPT = ("arguments", "command", "encrypted_content", "input", "pattern", "signature")
"""Fields of calls and schemas that are the task's, or no prose."""
_KEPT_HEADS = ("x-anthropic-billing-header:", "Here it is.")


def reduced(program: Program, exchange: dict[str, Any]) -> dict[str, Any]:
    """A recorded request without prose."""
    text = json.dumps(exchange["body"])
    work = re.search(r"(/[\w./-]+)/" + re.escape(program.name) + r"/(?:work|home)", text)
    body = json.loads(text.replace(work[1], "/home/a") if work else text)
    headers = {k: v for k, v in exchange["headers"].items() if k.lower() in _KEPT_HEADERS}
    return {"path": exchange["path"], "headers": headers, "body": _value(body, "", program.task)}


def _value(value: Any, key: str, task: str) -> Any:
    match value:
        case dict():
            return {name: _value(one, name, task) for name, one in value.items()}
        case list():
            return [_value(one, key, task) for one in value]
        case str():
            return _text(value, key, task)
    return value


def _text(value: str, key: str, task: str) -> str:
    value = _HASH.sub("0" * 64, _UUID.sub("00000000-0000-4000-8000-000000000001", value))
    if key == "definition":
        return GRAMMAR
    if task in value:
        at = value.rfind("\n", 0, value.find(task)) + 1
        return value[at : value.find(task) + len(task)] + ('"' if value.startswith('"') else "")
    if key in _KEPT or value.startswith(_KEPT_HEADS) or _WORD.fullmatch(value):
        return value
    if value.startswith(("{", "[")):
        try:
            return json.dumps(_value(json.loads(value), key, task))  # (JSON within a text)
        except ValueError:
            pass
    if key == "description":
        return "Says what this is for."
    lines = [line for line in value.splitlines() if line.strip()]
    kept = [line for line in lines if any(one in line for one in _OURS)]
    return "\n".join(kept if len(kept) == len(lines) else ["Some words of the program.", *kept])


def main(recorded: Path) -> None:
    BODIES.mkdir(exist_ok=True)
    for program in PROGRAMS.values():
        exchanges = json.loads((recorded / f"{program.name}.json").read_text())
        bodies = [one for one in exchanges if one["path"].partition("?")[0] == program.api]
        turns = [one for one in bodies if program.task in json.dumps(one["body"])]
        kept = [turns[0], turns[-1], *[one for one in bodies if one not in turns][:1]]
        lines = [json.dumps(reduced(program, one), ensure_ascii=False) for one in kept]
        (BODIES / f"{program.name}.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
