"""A request to the Messages API as one for a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from baton.gateway.anthropic.conversations import conversation_of
from baton.gateway.anthropic.schemas import (
    CountTokensRequest,
    MessagesRequest,
    MessagesToolChoice,
    OutputFormat,
    Thinking,
)
from baton.gateway.anthropic.tools import tool_of
from baton.gateway.api.formats import JsonSchemaFormat, ResponseFormat
from baton.gateway.api.schemas import ChatRequest
from baton.gateway.api.tools import check_count
from baton.gateway.errors import BadRequest

APART = frozenset(
    {"messages", "system", "tools", "mcp_servers", "tool_choice", "output_config", "output_format"}
)
"""Fields of a body that nobody needs once it is translated."""
NAMES = {
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "stop": "stop_sequences",
    "user": "metadata.user_id",
}
"""Fields of a chat by the names that they have here: for errors."""


def chat_of(body: CountTokensRequest, *, refuse_tools: bool = False) -> tuple[ChatRequest, list[str]]:
    """(the chat, kinds of tools that were left out).  `refuse_tools`: none is.  Raises `BadRequest`."""
    if body.messages is None:
        raise _wrong("messages", "it is missing; give a list with at least one message")
    conversation = conversation_of(body.system, body.messages)
    chat = ChatRequest(
        model=body.model,
        messages=conversation.messages,
        continue_final_message=conversation.prefilled,
        add_generation_prompt=not conversation.prefilled,
        tools=None,
        response_format=_form(body),
        reasoning_effort=None if body.output_config is None else body.output_config.effort,
    )
    skipped: list[str] = []
    if body.tools is not None:
        check_count(len(body.tools))
        chat.tools = []
        for i, tool in enumerate(body.tools):
            made = tool_of(tool, f"tools[{i}]", refuse=refuse_tools)
            if made is not None:
                chat.tools.append(made)
            elif tool["type"] not in skipped:
                skipped.append(tool["type"])
    if body.mcp_servers:
        if refuse_tools:
            raise _wrong("mcp_servers", "this server calls no others; leave it out")
        skipped.append("mcp_servers")
    _choose(chat, body.tool_choice, skipped)
    switches = _think(chat, body.thinking, after_tools=conversation.after_tools)
    chat.chat_template_kwargs = {**switches, **(body.chat_template_kwargs or {})} or None
    if isinstance(body, MessagesRequest):
        _set_sampling(chat, body)
    if skipped:
        chat.tools = chat.tools or None
    return chat, skipped


def _set_sampling(chat: ChatRequest, body: MessagesRequest) -> None:
    chat.max_tokens = body.max_tokens
    chat.temperature, chat.top_p, chat.top_k = body.temperature, body.top_p, body.top_k
    chat.stop = body.stop_sequences
    chat.stream, chat.timings, chat.return_progress = body.stream, body.timings, body.return_progress
    chat.seed, chat.priority, chat.cache_salt = body.seed, body.priority, body.cache_salt
    chat.user = None if body.metadata is None else body.metadata.user_id
    budget = chat.thinking_token_budget
    if budget is not None and body.max_tokens is not None and budget >= body.max_tokens:
        chat.thinking_token_budget = None  # (`max_tokens` ends it first)


def _choose(chat: ChatRequest, choice: MessagesToolChoice | None, skipped: Sequence[str]) -> None:
    if choice is None:
        return
    match choice.type:
        case "auto" | "none":
            chat.tool_choice = choice.type
        case "any" | "tool" if not chat.tools:
            if skipped:
                raise _wrong(
                    "tool_choice", f"this server has no {', '.join(skipped)[:200]}; give a tool of your own"
                )
            raise _wrong("tool_choice", f"{choice.type!r} needs tools; give some")
        case "any":
            chat.tool_choice = "required"
        case "tool":
            if choice.name not in _names(chat.tools or ()):
                raise _wrong(
                    "tool_choice.name",
                    f"there is no tool {str(choice.name)[:140]!r} in tools; give one's name",
                )
            chat.tool_choice = {"type": "function", "function": {"name": choice.name}}
        case _:
            raise _wrong(
                "tool_choice.type", f"{str(choice.type)[:50]!r} must be 'auto', 'any', 'tool' or 'none'"
            )
    if choice.disable_parallel_tool_use:
        chat.parallel_tool_calls = False


def _names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    return [tool["function"]["name"] for tool in tools]


def _think(chat: ChatRequest, thinking: Thinking | None, *, after_tools: bool) -> dict[str, Any]:
    """Sets what the chat has for it; the template's switches.  Without the field a model does as it does."""
    if thinking is None:
        return {}
    on = thinking.type != "disabled"
    match thinking.type:
        case "enabled":
            chat.thinking_token_budget = thinking.budget_tokens
        case "between_tools":
            on = after_tools
        case "adaptive" | "disabled":
            pass
        case _:
            raise _wrong(
                "thinking.type",
                f"{str(thinking.type)[:50]!r} must be 'enabled', 'adaptive', 'between_tools' or 'disabled'",
            )
    if thinking.display not in (None, "summarized", "omitted"):
        raise _wrong("thinking.display", f"{thinking.display[:50]!r} must be 'summarized' or 'omitted'")
    chat.include_reasoning = on
    return {"enable_thinking": on, "thinking": on}


def _form(body: CountTokensRequest) -> ResponseFormat | None:
    config = body.output_config
    form: OutputFormat | None = body.output_format
    if config is not None and config.format is not None:
        form = config.format
    if form is None:
        return None
    if form.type != "json_schema":
        raise _wrong("output_config.format.type", f"{str(form.type)[:50]!r} must be 'json_schema'")
    if not isinstance(form.schema, Mapping):
        raise _wrong("output_config.format.schema", "must be a JSON schema, an object")
    return ResponseFormat("json_schema", JsonSchemaFormat("answer", form.schema))


def _wrong(where: str, what: str) -> BadRequest:
    return BadRequest(f"{where}: {what}", param=where)
