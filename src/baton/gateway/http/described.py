"""How `openapi.py` describes one route."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from baton.gateway.api import answers
from baton.gateway.generation.pausing import PAUSE_MODES

Schema = dict[str, Any]
JSON = "application/json"


class Route(NamedTuple):
    """One method of one path."""

    method: str
    path: str
    """As it is declared; see `RIGHTS`."""
    summary: str
    answer: Any
    """Type of the body of a 200; a media type if it is not JSON, or two with a comma."""
    body: type[msgspec.Struct] | None = None
    errors: tuple[int, ...] = ()
    """Statuses besides those that the path's right, and a body, bring with them."""
    query: tuple[tuple[str, Schema, str], ...] = ()
    """(name, schema, what it means) of parameters of the query."""
    events: Any = None
    """With `stream`: type of what the `data` of each event is."""
    required: tuple[str, ...] = ()
    """Fields of the body that must be given."""
    other: Mapping[int, Any] = {}
    """Statuses whose body is no `Error`."""
    marked: bool = True
    """With `events`: after the last one comes [DONE], and errors are events in their own shape."""
    error: Any = answers.Error
    """Type of the body of its errors."""


INSTANCE = (("instance", {"type": "string"}, "One instance; default: all."),)
PAUSE: tuple[tuple[str, Schema, str], ...] = (
    (
        "mode",
        {"enum": list(PAUSE_MODES), "default": "abort"},
        "What running requests see: abort: they end at once with what they have; wait: they end first; "
        "keep: they stand still and go on with /resume.",
    ),
    (
        "clear_cache",
        {"enum": ["true", "false", "1", "0"]},
        "Forget the prefix cache. Default: true, with mode keep false.",
    ),
    (
        "wait_for_inflight_requests",
        {"enum": ["true", "false", "1", "0"]},
        "true: mode wait. vLLM's older name.",
    ),
    (
        "timeout_s",
        {"type": "number", "exclusiveMinimum": 0, "maximum": 86400, "default": 1800},
        "With mode wait: how long; nothing is paused after that.",
    ),
    (
        "resume_after_s",
        {"type": "number", "exclusiveMinimum": 0, "maximum": 86400},
        "The pause ends by itself. Default: it lasts until /resume.",
    ),
)


def event_schema(chunk: Schema, error: Schema, marked: bool) -> Schema:
    """Of each event of a stream (OpenAPI before 3.2 has no word for that)."""
    if not marked:
        data = {"type": "string", "contentMediaType": JSON, "contentSchema": chunk}
        return {
            "type": "object",
            "description": "With stream. Each event has the name that its data has as type.",
            "properties": {"event": {"type": "string"}, "data": data},
            "required": ["event", "data"],
        }
    name = chunk["$ref"].rsplit("/", 1)[1]
    return {
        "type": "object",
        "description": f"With stream. Each event's data is a {name}, or an Error, which is the last then; "
        "after the last chunk it is [DONE].",
        "properties": {
            "data": {
                "anyOf": [
                    {"const": "[DONE]"},
                    {
                        "type": "string",
                        "contentMediaType": JSON,
                        "contentSchema": {"anyOf": [chunk, error]},
                    },
                ]
            }
        },
        "required": ["data"],
    }
