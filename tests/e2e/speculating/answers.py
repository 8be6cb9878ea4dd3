"""What a client gets for a request, as one value: two servers' answers are equal to the last bit, or not.

A whole answer is its JSON.  A stream is put together to what its chunks say: texts, token ids and
log-probabilities one after the other, of all else the last value.  How it was cut into chunks is no part of
the answer: a step that confirms several tokens makes fewer of them.  Ids that the
server draws, and times of day, are left out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.e2e.speculating.requests import Request

_OF_THIS_TIME = ("id", "created")
_TEXTS = ("text", "content", "reasoning", "reasoning_content", "arguments")
"""What chunks continue; other texts they replace."""


@dataclass
class Answer:
    status: int
    body: Any
    runs: list[int] = field(default_factory=list)
    """Of a stream: tokens of each chunk that has any, which no comparison looks at."""

    @property
    def choices(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.body.get("choices", [])
        return found


async def ask(http: httpx.AsyncClient, request: Request) -> Answer:
    if not request.body.get("stream"):
        response = await http.post(request.path, json=request.body)
        return Answer(response.status_code, _lasting(response.json()))
    async with http.stream("POST", request.path, json=request.body) as response:
        if response.status_code != 200:
            return Answer(response.status_code, _lasting(json.loads(await response.aread())))
        events = [line[6:] async for line in response.aiter_lines() if line.startswith("data: ")]
    return joined(events)


def joined(events: list[str]) -> Answer:
    """Of the `data` of a stream's events."""
    if not events or events[-1] != "[DONE]":
        return Answer(200, {"cut off after": events[-1:]})
    whole: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    runs = []
    for event in events[:-1]:
        chunk = _lasting(json.loads(event))
        for choice in chunk.pop("choices", ()):
            if choice.get("token_ids"):
                runs.append(len(choice["token_ids"]))
            _add(choices.setdefault(choice["index"], {}), choice)
        _add(whole, chunk)
    return Answer(200, whole | {"choices": [choices[index] for index in sorted(choices)]}, runs)


def _add(whole: dict[str, Any], piece: dict[str, Any]) -> None:
    for name, value in piece.items():
        known = whole.get(name)
        if name == "tool_calls" and value and "index" in value[0]:  # (of a stream: more of these calls)
            calls = whole.setdefault(name, {})
            for call in value:
                _add(calls.setdefault(str(call["index"]), {}), call)
        elif known is None:
            whole[name] = value
        elif value is None:
            pass
        elif isinstance(value, dict):
            _add(known, value)
        elif isinstance(value, list):
            known.extend(value)
        elif name in _TEXTS:
            whole[name] = known + value
        elif name == "finish_reason":
            whole[name] = f"{known}, then {value}"  # (a choice ends once)
        else:
            whole[name] = value


def _lasting(body: Any) -> Any:
    if body.get("usage"):  # (what was in the cache is no part of the answer)
        body["usage"].pop("prompt_tokens_details", None)
    for choice in body.get("choices", ()):
        for call in (choice.get("message") or choice.get("delta") or {}).get("tool_calls") or ():
            call.pop("id", None)
    return {name: value for name, value in body.items() if name not in _OF_THIS_TIME}


def difference(expected: Answer, got: Answer) -> str | None:
    """The first place where they differ, None: they are equal."""
    if expected.status != got.status:
        return f"status {got.status} instead of {expected.status}: {got.body}"
    return _difference(expected.body, got.body, "")


def _difference(one: Any, other: Any, at: str) -> str | None:
    if isinstance(one, dict) and isinstance(other, dict):
        for name in one | other:
            if name not in one or name not in other:
                return f"{at}.{name} is there in one of them only"
            found = _difference(one[name], other[name], f"{at}.{name}")
            if found:
                return found
        return None
    if isinstance(one, list) and isinstance(other, list):
        for index, (left, right) in enumerate(zip(one, other, strict=False)):
            found = _difference(left, right, f"{at}[{index}]")
            if found:
                return found
        return None if len(one) == len(other) else f"{at} has {len(other)} entries instead of {len(one)}"
    return None if repr(one) == repr(other) else f"{at} is {other!r} instead of {one!r}"
