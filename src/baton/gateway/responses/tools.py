"""Tools of the Responses API as chats have them, and what is said of them in the answer.

A `namespace` becomes functions whose names begin with its own; calls of them are given back under both names
(`Names`).  What this server cannot serve is left out, where it is only offered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from baton.gateway.api.tools import KINDS, check_count, check_name
from baton.gateway.errors import BadRequest

_HOSTED = {
    "web_search": "the server has no search engine",
    "file_search": "the server has no files",
    "code_interpreter": "the server runs no code",
    "image_generation": "the server makes no images",
    "computer": "the server has no computer to use",
    "mcp": "the server calls no other servers",
    "local_shell": "this tool is of OpenAI's models",
    "shell": "this tool is of OpenAI's models",
    "apply_patch": "this tool is of OpenAI's models",
    "tool_search": "the server keeps no tools",
    "programmatic_tool_calling": "the server runs no code",
}
"""Kinds of tools, by how their type begins, and why they are not served."""
_INSTEAD = "give a tool of type 'function' or 'custom' and answer its calls"
_MAX_NAME = 128

Names = dict[str, tuple[str, str]]
"""The model's name of a tool → (its namespace, its name in it)."""


class ChatTools(NamedTuple):
    tools: list[dict[str, Any]] | None
    """As of a chat.  All that may be called."""
    choice: str | dict[str, Any] | None
    said: list[dict[str, Any]]
    """What the answer repeats."""
    choice_said: Any
    names: Names
    """Of tools in namespaces."""
    skipped: list[str]
    """Kinds of tools that were left out."""


class _Reading:
    """Of one list of tools."""

    def __init__(self, *, refuse: bool) -> None:
        self._refuse = refuse
        self.tools: list[dict[str, Any]] = []
        self.said: list[dict[str, Any]] = []
        self.names: Names = {}
        self.skipped: list[str] = []
        self._known: set[str] = set()
        """The model's names of those that were taken."""
        self._count = 0
        """Of all tools, also of those that were left out."""

    def add(self, tool: Mapping[str, Any], where: str, *, again: bool = False) -> None:
        """`again`: it may be there already.  Raises `BadRequest`."""
        kind = tool.get("type")
        self._count += 1
        check_count(self._count)
        if kind in KINDS:
            made = _tool(tool, where)
            if again and made[kind]["name"] in self._known:
                return
            self._take(made)
            self.said.append(_said(tool))
        elif kind == "namespace":
            self._expand(tool, where, again=again)
            self.said.append(dict(tool))
        elif not isinstance(kind, str) or self._refuse:
            raise _not_served(kind, where)
        elif kind not in self.skipped:
            self.skipped.append(kind)

    def _take(self, made: dict[str, Any]) -> None:
        self.tools.append(made)
        self._known.add(made[made["type"]]["name"])

    def _expand(self, space: Mapping[str, Any], where: str, *, again: bool) -> None:
        namespace, tools = space.get("name"), space.get("tools")
        if not isinstance(namespace, str) or not namespace:
            raise BadRequest(f"{where}.name: it is missing; give the namespace a name", param="tools")
        if not isinstance(tools, list):
            raise BadRequest(f"{where}.tools: must be a list of tools", param="tools")
        self._count += len(tools)
        check_count(self._count)
        for i, tool in enumerate(tools):
            place = f"{where}.tools[{i}]"
            if not isinstance(tool, Mapping) or tool.get("type") not in KINDS:
                kind = tool.get("type") if isinstance(tool, Mapping) else None
                if not isinstance(kind, str) or self._refuse:
                    raise _not_served(kind, place)
                self.skipped += [] if kind in self.skipped else [kind]
                continue
            made = _tool(tool, place)
            inner = made[made["type"]]
            flat = flat_name(namespace, inner["name"])
            check_name(flat, f"{place}.name")
            if again and flat in self._known:
                continue
            self.names[flat] = (namespace, inner["name"])
            inner["name"] = flat
            self._take(made)


def chat_tools(
    tools: list[dict[str, Any]] | None,
    choice: str | dict[str, Any] | None,
    *,
    refuse: bool = False,
    more: Sequence[Any] = (),
) -> ChatTools:
    """`refuse`: nothing is left out.  `more`: tools that the conversation brings; those that are there
    already are not taken again.  Raises `BadRequest` with the place of what is wrong."""
    reading = _Reading(refuse=refuse)
    for i, tool in enumerate(tools or ()):
        reading.add(tool, f"tools[{i}]")
    for i, tool in enumerate(more):
        if not isinstance(tool, Mapping):
            raise BadRequest(f"tools: the conversation's tool {i} must be an object", param="tools")
        reading.add(tool, f"tools: the conversation's tool {i}", again=True)
    read = ChatTools(reading.tools or None, None, reading.said, choice, reading.names, reading.skipped)
    match choice:
        case None:
            return read._replace(choice_said="auto")
        case "required" if reading.skipped and not reading.tools:
            raise _not_served(reading.skipped[0], "tool_choice")
        case str():
            if choice in ("none", "auto", "required"):
                return read._replace(choice=choice)
        case {"type": "function" | "custom" as kind, "name": str()}:
            name = _named(choice, reading, "tool_choice")
            return read._replace(choice={"type": kind, kind: {"name": name}})
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(allowed)}:
            if not allowed:
                raise BadRequest(
                    "tool_choice.tools: give at least one tool, or tool_choice 'none'", param="tool_choice"
                )
            return read._replace(tools=_allowed(allowed, reading, mode, refuse), choice=mode)
        case {"type": str(kind)} if kind not in (*KINDS, "allowed_tools"):
            raise _not_served(kind, "tool_choice")
    raise BadRequest(
        "tool_choice: must be 'none', 'auto', 'required', {'type': 'function', 'name': …} or "
        "{'type': 'allowed_tools', 'mode': 'auto' or 'required', 'tools': […]}",
        param="tool_choice",
    )


def flat_name(namespace: str, name: str) -> str:
    """The model's name of a tool in a namespace."""
    flat = f"{namespace}__{name}"
    if len(flat) <= _MAX_NAME:
        return flat
    return f"{flat[: _MAX_NAME - 9]}_{hashlib.blake2s(flat.encode(), digest_size=4).hexdigest()}"


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Of a chat.  (What else may be wrong in it, `api/tools.py` says of the same fields.)"""
    kind = str(tool["type"])
    if isinstance(tool.get(kind), Mapping):
        raise BadRequest(
            f"{where}.{kind}: is for /v1/chat/completions; put name, parameters and the rest beside type",
            param="tools",
        )
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise BadRequest(f"{where}.name: it is missing; give the tool a name", param="tools")
    check_name(name, f"{where}.name")
    inner: dict[str, Any] = {"name": name}
    for field in ("description", "parameters") if kind == "function" else ("description", "format"):
        if tool.get(field) is not None:
            inner[field] = tool[field]
    if "strict" in tool and kind == "function":
        inner["strict"] = tool["strict"]
    return {"type": kind, kind: inner}


def _said(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool["type"] == "custom":
        return {key: tool[key] for key in ("type", "name", "description", "format") if key in tool}
    return {
        "type": "function",
        "name": tool["name"],
        "description": tool.get("description"),
        "parameters": tool.get("parameters"),
        "strict": tool.get("strict"),
    }


def _allowed(
    allowed: Sequence[object], reading: _Reading, mode: str, refuse: bool
) -> list[dict[str, Any]] | None:
    names: set[str] = set()
    skipped = None
    for i, one in enumerate(allowed):
        where = f"tool_choice.tools[{i}]"
        if not isinstance(one, Mapping):
            raise BadRequest(f"{where}: must be an object with type and name", param="tool_choice")
        kind = one.get("type")
        if kind == "namespace":
            names.update(_names_in(one.get("name"), reading, where))
        elif kind in KINDS:
            if not isinstance(one.get("name"), str):
                raise BadRequest(f"{where}.name: it is missing; give a tool's name", param="tool_choice")
            names.add(_named(one, reading, where))
        elif not isinstance(kind, str) or refuse:
            raise _not_served(kind, where)
        else:
            skipped = kind
    left = [tool for tool in reading.tools if tool[tool["type"]]["name"] in names]
    if not left and mode == "required":
        raise _not_served(skipped, "tool_choice.tools")
    return left or None


def _names_in(namespace: object, reading: _Reading, where: str) -> list[str]:
    """The model's names of a namespace's tools.  Raises `BadRequest`."""
    if all((one.get("type"), one.get("name")) != ("namespace", namespace) for one in reading.said):
        raise BadRequest(
            f"{where}: there is no namespace {str(namespace)[:140]!r} in tools; choose one that is there",
            param="tool_choice",
        )
    return [flat for flat, (space, _) in reading.names.items() if space == namespace]


def _named(choice: Mapping[str, Any], reading: _Reading, where: str) -> str:
    """The model's name of it.  Raises `BadRequest`."""
    name, space = choice["name"], choice.get("namespace")
    if isinstance(space, str):
        name = flat_name(space, name)
    if name not in (tool[tool["type"]]["name"] for tool in reading.tools):
        raise BadRequest(
            f"{where}: there is no tool {name[:140]!r} in tools; choose one that is there",
            param="tool_choice",
        )
    return str(name)


def _not_served(kind: object, where: str) -> BadRequest:
    param = "tools" if where.startswith("tools") else "tool_choice"
    if not isinstance(kind, str):
        return BadRequest(f"{where}.type: it is missing; give 'function'", param=param)
    why = next((why for name, why in _HOSTED.items() if kind.startswith(name)), "it is not known here")
    return BadRequest(
        f"{where}.type: {kind[:50]!r} is not supported: {why}; {_INSTEAD}",
        param=param,
        code="unsupported_parameter",
    )
