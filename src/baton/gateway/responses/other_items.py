"""Items that are calls under other names, and those that tell the model nothing.

Calls of tools that take a text, and of OpenAI's own shells, are functions for the model.  What hosted tools
of another server did (searches, images that were made) is left out: what came of it stands in the messages.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from baton.gateway.api.custom import arguments_of
from baton.gateway.errors import BadRequest
from baton.gateway.responses.tools import flat_name

ASKS_NOTHING = frozenset(
    {
        "web_search_call",
        "file_search_call",
        "image_generation_call",
        "computer_call",
        "computer_call_output",
        "tool_search_call",
        "tool_search_output",
        "mcp_list_tools",
        "mcp_approval_request",
        "mcp_approval_response",
        "program",
        "program_output",
        "additional_tools",
        "configuration_update",
        "context_compaction",
    }
)
"""Items that only another server could have given, or that are not for the model."""
_SEALED = "baton.compaction.1:"
"""What `encrypted_content` of this server's summaries begins with."""
_INTRODUCTION = "What was said before, in short:\n"


def name_of(call: Mapping[str, Any]) -> str:
    """The model's name of the tool that was called."""
    space = call.get("namespace")
    return flat_name(space, call["name"]) if isinstance(space, str) and space else str(call["name"])


def as_function_call(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Of a call with a text.  Raises `BadRequest`."""
    if not isinstance(item.get("input"), str):
        raise BadRequest(f"{where}.input: it is missing; give a text", param="input")
    return {**item, "arguments": arguments_of(item["input"])}


def as_action_call(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Of a call of a shell or a patch: its action is the arguments.  Raises `BadRequest`."""
    action = item.get("operation" if item["type"] == "apply_patch_call" else "action")
    if not isinstance(action, Mapping):
        raise BadRequest(f"{where}.action: it is missing; give an object", param="input")
    name = str(item["type"]).removesuffix("_call")
    arguments = {key: value for key, value in action.items() if key != "type" and value is not None}
    call = item.get("call_id") or item.get("id")
    said = msgspec.json.encode(arguments).decode()
    return {"id": item.get("id"), "call_id": call, "name": name, "arguments": said}


def as_action_output(item: Mapping[str, Any]) -> dict[str, Any]:
    output = item.get("output")
    if isinstance(output, list) or output is None:
        output = msgspec.json.encode(output or "").decode()
    return {**item, "call_id": item.get("call_id") or item.get("id"), "output": output}


def as_answered_call(item: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the call, its output) of what another server called itself."""
    id = str(item.get("id"))
    if item["type"] == "mcp_call":
        name = flat_name(str(item.get("server_label")), str(item.get("name")))
        arguments, output = item.get("arguments"), item.get("output") or item.get("error") or ""
    else:
        name, arguments = "code_interpreter", {"code": item.get("code") or ""}
        outputs = item["outputs"] if isinstance(item.get("outputs"), list) else ()
        logs = [str(one.get("logs") or "") for one in outputs if isinstance(one, Mapping)]
        output = "\n".join(logs)
    return (
        {"call_id": id, "name": name, "arguments": _as_json(arguments)},
        {"call_id": id, "output": output if isinstance(output, str) else _as_json(output)},
    )


def _as_json(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def more_tools(items: Sequence[object]) -> list[Any]:
    """Tools that a conversation brings on its way."""
    return [
        tool
        for item in items
        if isinstance(item, Mapping) and item.get("type") in ("additional_tools", "tool_search_output")
        for tool in (item["tools"] if isinstance(item.get("tools"), list) else ())
    ]


def sealed_summary(summary: str) -> str:
    """`encrypted_content` of a compaction.  It is no secret: whoever has it has the conversation."""
    return _SEALED + base64.b64encode(summary.encode()).decode("ascii")


def compacted(item: Mapping[str, Any], where: str) -> str:
    """What the model gets of a compaction.  Raises `BadRequest` for one of another server, which nobody else
    can read."""
    content = item.get("encrypted_content")
    if isinstance(content, str) and content.startswith(_SEALED):
        try:
            return _INTRODUCTION + base64.b64decode(content[len(_SEALED) :], validate=True).decode()
        except (binascii.Error, ValueError):
            pass
    raise BadRequest(
        f"{where}.encrypted_content: was not made by /v1/responses/compact of this server, so it cannot be "
        "read; send the items that it stands for",
        param="input",
    )
