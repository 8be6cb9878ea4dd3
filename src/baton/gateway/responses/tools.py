"""Tools of the Responses API as chats have them, and what is said of them in the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

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
    "custom": "calls without a schema are not supported",
    "namespace": "namespaces are not supported",
    "tool_search": "the server keeps no tools",
    "programmatic_tool_calling": "the server runs no code",
}
"""Kinds of tools, by how their type begins, and why they are refused."""
_INSTEAD = "give a tool of type 'function' and answer its calls"


class ChatTools(NamedTuple):
    tools: list[dict[str, Any]] | None
    """As of a chat.  All that may be called."""
    choice: str | dict[str, Any] | None
    said: list[dict[str, Any]]
    """What the answer repeats."""
    choice_said: Any


def chat_tools(tools: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None) -> ChatTools:
    """Raises `BadRequest` with the place of what is wrong."""
    read = [_function(tool, f"tools[{i}]") for i, tool in enumerate(tools or ())]
    names = [function["name"] for function in read]
    said = [_said(function) for function in read]
    given: list[dict[str, Any]] | None = [
        {"type": "function", "function": function} for function in read
    ] or None
    match choice:
        case None:
            return ChatTools(given, None, said, "auto")
        case str():
            return ChatTools(given, choice, said, choice)
        case {"type": "function", "name": str(name)}:
            _check_known(name, names, "tool_choice")
            named = {"type": "function", "function": {"name": name}}
            return ChatTools(given, named, said, {"type": "function", "name": name})
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(allowed)}:
            allowed_names = [_allowed(one, names, f"tool_choice.tools[{i}]") for i, one in enumerate(allowed)]
            if not allowed_names:
                raise BadRequest(
                    "tool_choice.tools: give at least one tool, or tool_choice 'none'", param="tool_choice"
                )
            left = [tool for tool in given or () if tool["function"]["name"] in allowed_names]
            return ChatTools(left, mode, said, choice)
        case {"type": str(kind)} if kind not in ("function", "allowed_tools"):
            raise _not_a_function(kind, "tool_choice")
    raise BadRequest(
        "tool_choice: must be 'none', 'auto', 'required', {'type': 'function', 'name': …} or "
        "{'type': 'allowed_tools', 'mode': 'auto' or 'required', 'tools': […]}",
        param="tool_choice",
    )


def _function(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Of a chat.  (What else may be wrong in it, `api/tools.py` says of the same fields.)"""
    kind = tool.get("type")
    if kind != "function":
        raise _not_a_function(kind, where)
    if isinstance(tool.get("function"), Mapping):
        raise BadRequest(
            f"{where}.function: is for /v1/chat/completions; put name, parameters and the rest beside type",
            param="tools",
        )
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise BadRequest(f"{where}.name: it is missing; give the function a name", param="tools")
    if tool.get("defer_loading") or tool.get("async"):
        field = "defer_loading" if tool.get("defer_loading") else "async"
        raise BadRequest(f"{where}.{field}: is not supported; leave it out", param="tools")
    function: dict[str, Any] = {"name": name}
    for field in ("description", "parameters"):
        if tool.get(field) is not None:
            function[field] = tool[field]
    if "strict" in tool:
        function["strict"] = tool["strict"]
    return function


def _said(function: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "function",
        "name": function["name"],
        "description": function.get("description"),
        "parameters": function.get("parameters"),
        "strict": function.get("strict"),
    }


def _allowed(tool: object, names: list[str], where: str) -> str:
    if not isinstance(tool, Mapping):
        raise BadRequest(f"{where}: must be an object with type and name", param="tool_choice")
    if tool.get("type") != "function":
        raise _not_a_function(tool.get("type"), where)
    name = tool.get("name")
    if not isinstance(name, str):
        raise BadRequest(f"{where}.name: it is missing; give a tool's name", param="tool_choice")
    _check_known(name, names, where)
    return name


def _check_known(name: str, names: list[str], where: str) -> None:
    if name not in names:
        raise BadRequest(
            f"{where}: there is no tool {name[:140]!r} in tools; choose one that is there",
            param="tool_choice",
        )


def _not_a_function(kind: object, where: str) -> BadRequest:
    param = "tools" if where.startswith("tools") else "tool_choice"
    if not isinstance(kind, str):
        return BadRequest(f"{where}.type: it is missing; give 'function'", param=param)
    why = next((why for name, why in _HOSTED.items() if kind.startswith(name)), "only functions are")
    return BadRequest(
        f"{where}.type: {kind[:50]!r} is not supported: {why}; {_INSTEAD}",
        param=param,
        code="unsupported_parameter",
    )
