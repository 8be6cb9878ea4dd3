"""Tools of the Messages API as functions of a chat.

Of Anthropic's own tools some are answered by who asks (a shell, an editor, notes): only their schemas are
Anthropic's, and those are here, so that any model may call them.  What the server would have to do itself
(search, fetch, run code) is left out where it is only offered, and so is what needs images of a screen.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from baton.gateway.api.tools import check_name
from baton.gateway.errors import BadRequest

_DATED = re.compile(r"(.+?)_(2[0-9]{7})")
_TEXT = {"type": "string"}
_LINE = {"type": "integer"}
_RANGE = {
    "type": "array",
    "items": {"type": "integer"},
    "description": "First and last line to be shown, from 1 on; -1 as the last one: to the end.",
}


def _commands(names: list[str], properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    command = {"type": "string", "enum": names}
    return {
        "type": "object",
        "properties": {"command": command, **properties},
        "required": ["command", *required],
    }


def _editor(*, undo: bool, inserts: str) -> dict[str, Any]:
    """`inserts`: the name of the text that is inserted."""
    commands = ["view", "create", "str_replace", "insert", *(["undo_edit"] if undo else [])]
    properties = {
        "path": {"type": "string", "description": "Of a file or a directory."},
        "file_text": {"type": "string", "description": "With create: what the file is to have."},
        "view_range": _RANGE,
        "old_str": {"type": "string", "description": "With str_replace: what is replaced, there once."},
        "new_str": {"type": "string", "description": "With str_replace: what takes its place."},
        "insert_line": {"type": "integer", "description": "With insert: the line behind which; 0: the top."},
    }
    properties[inserts] = {
        "type": "string",
        "description": f"{_said(properties, inserts)}With insert: the text.",
    }
    return _commands(commands, properties, ["path"])


def _said(properties: Mapping[str, Any], name: str) -> str:
    return f"{properties[name]['description']} " if name in properties else ""


_BASH = {
    "type": "object",
    "properties": {
        "command": {"type": "string", "description": "The command to run."},
        "restart": {"type": "boolean", "description": "Starts the shell anew; then without a command."},
    },
}
_MEMORY = _commands(
    ["view", "create", "str_replace", "insert", "delete", "rename"],
    {
        "path": {"type": "string", "description": "Below /memories."},
        "view_range": _RANGE,
        "file_text": _TEXT,
        "old_str": _TEXT,
        "new_str": _TEXT,
        "insert_line": _LINE,
        "insert_text": _TEXT,
        "old_path": _TEXT,
        "new_path": _TEXT,
    },
    [],
)
_OLD_EDITORS = ("20241022", "20250124")
"""Versions of the editor that can undo."""
_DESCRIPTIONS = {
    "bash": "Runs commands in a shell that stays open.",
    "text_editor": "Shows, creates and edits files.",
    "memory": "Keeps notes as files from one conversation to the next.",
}


def tool_of(tool: Mapping[str, Any], where: str, *, refuse: bool) -> dict[str, Any] | None:
    """A chat's; None: it is only Anthropic's.  `refuse`: such a one is an error.  Raises `BadRequest`."""
    kind = tool.get("type")
    if kind not in (None, "custom"):
        schema = _schema(kind)
        if schema is not None:
            check_name(tool.get("name"), f"{where}.name")
            return _function(tool["name"], schema[0], schema[1])
        if kind == "function":
            raise BadRequest(
                f"{where}.type: 'function' is of /v1/chat/completions; leave it out, and give name, "
                "description and input_schema",
                param="tools",
            )
        if isinstance(kind, str) and not refuse:
            return None
        raise BadRequest(
            f"{where}.type: {str(kind)[:50]!r} is a tool of Anthropic's, which this server does not have; "
            "give one of your own, with name and input_schema",
            param="tools",
            code="unsupported_parameter",
        )
    check_name(tool.get("name"), f"{where}.name")
    schema, description = tool.get("input_schema"), tool.get("description")
    if not isinstance(schema, Mapping):
        raise _wrong(f"{where}.input_schema", "must be a JSON schema, an object")
    if not isinstance(description, str | None):
        raise _wrong(f"{where}.description", "must be a text")
    if not isinstance(tool.get("strict"), bool | None):
        raise _wrong(f"{where}.strict", "must be true or false")
    made = _function(tool["name"], schema, description)
    if tool.get("strict"):
        made["function"]["strict"] = True
    return made


def _schema(kind: object) -> tuple[dict[str, Any], str] | None:
    """(the schema of a tool of Anthropic's that who asks answers, what it is for)."""
    dated = _DATED.fullmatch(kind) if isinstance(kind, str) else None
    if dated is None or dated[1] not in _DESCRIPTIONS:
        return None
    match dated[1]:
        case "bash":
            schema: dict[str, Any] = _BASH
        case "memory":
            schema = _MEMORY
        case _:
            old = dated[2] in _OLD_EDITORS
            schema = _editor(undo=old, inserts="new_str" if dated[2] < "20250728" else "insert_text")
    return schema, _DESCRIPTIONS[dated[1]]


def _function(name: str, schema: Mapping[str, Any], description: str | None) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name, "parameters": schema}
    if description is not None:
        function["description"] = description
    return {"type": "function", "function": function}


def _wrong(where: str, what: str) -> BadRequest:
    return BadRequest(f"{where}: {what}", param=where)
