"""From the body of `POST /v1/responses` to a chat, and to what its answer repeats."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from baton.gateway.api.content import added
from baton.gateway.api.formats import JsonSchemaFormat, ResponseFormat
from baton.gateway.api.schemas import ChatRequest
from baton.gateway.errors import BadRequest
from baton.gateway.responses.items import Turns, is_reference, references
from baton.gateway.responses.other_items import more_tools
from baton.gateway.responses.schemas import (
    ENCRYPTED,
    INCLUDABLE,
    LOGPROBS,
    ResponsesRequest,
    Text,
    TextFormat,
)
from baton.gateway.responses.tools import ChatTools, Names, chat_tools

_SAME = (
    "model",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "seed",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "structured_outputs",
    "thinking_token_budget",
    "timings",
    "return_progress",
    "priority",
    "cache_salt",
    "request_id",
)
"""Fields that a chat has under the same names."""
NAMES = {
    "messages": "input",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}
"""Fields of a chat by the names that they have here: for errors."""
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
    "compaction": "cmp",
}
"""Of items' ids."""


class BoundChat(ChatRequest, kw_only=True):
    """A chat whose tools' schemas are kept wherever they can be."""

    binds_tools: ClassVar[bool] = True
    drops_oldest: bool = False
    """Its oldest messages are left out until the rest fits."""


class Known(msgspec.Struct, array_like=True):
    """What was kept of earlier answers, for a body that names it.  Items as JSON."""

    history: list[bytes] = []
    """All of the conversation before this."""
    references: dict[str, bytes] = {}
    """By the items' ids."""


class ReadResponses(msgspec.Struct):
    """What of a body concerns its answer."""

    said: str = ""
    """Members of the answer that repeat the body, as JSON without braces."""
    items: list[tuple[str, str]] = []
    """Those of `input`, with their ids, as JSON: to be kept."""
    keeps: bool = False
    """The answer is to be kept."""
    previous: str | None = None
    """The answer that this one follows."""
    needs: list[str] = []
    """Ids of items, or `previous`: without them the body cannot be read."""
    encrypted: bool = False
    logprobs: bool = False
    names: Names = {}
    """Of tools in namespaces."""


def translate(
    body: ResponsesRequest, *, keeps: bool, known: Known | None, refuse: bool = False
) -> tuple[ReadResponses, ChatRequest | None, list[str]]:
    """(what concerns the answer, the chat, kinds of tools that were left out; None: more has to be known
    first).

    `keeps`: this server keeps answers.  `known`: what it has kept.  `refuse`: no tools are left out.  Raises
    `BadRequest`.
    """
    given = body.input
    if given is None:
        raise BadRequest("input: it is missing; give a text, or a list of items", param="input")
    # (An empty one asks for an answer to nothing, which clients do to see whether a model is there.)
    items = given if isinstance(given, list) and given else [_user(given if isinstance(given, str) else "")]
    named = references(items)
    previous = body.previous_response_id
    if previous is not None or named:
        _check_keeps("previous_response_id" if previous is not None else "input", keeps)
        if known is None:
            return ReadResponses(previous=previous, needs=named), None, []
    known = known or Known()
    items = resolved(items, known)
    history = [msgspec.json.decode(item) for item in known.history]
    turns = Turns()
    for number, item in enumerate(history):
        turns.add(item, f"previous_response_id: item {number}")
    for number, item in enumerate(items):
        turns.add(item, f"input[{number}]" if isinstance(given, list) else "input")
    tools = chat_tools(body.tools, body.tool_choice, refuse=refuse, more=more_tools([*history, *items]))
    chat = _chat(body, with_instructions(body.instructions, turns.finished()), tools)
    read = ReadResponses(said=_said(body, tools), previous=previous, names=tools.names)
    include = body.include or ()
    read.encrypted, read.logprobs = ENCRYPTED in include, LOGPROBS in include
    read.keeps = keeps and body.store is not False
    if read.keeps:
        read.items = [listed(item) for item in items]
    return read, chat, tools.skipped


def with_instructions(instructions: str | None, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """They come first, and what the conversation's first messages tell the model joins them: many templates
    have a place for one such message."""
    if not instructions:
        return messages
    content: Any = instructions
    count = 0
    for message in messages:
        if message["role"] not in ("system", "developer"):
            break
        content = added(content, message["content"])
        count += 1
    return [{"role": "system", "content": content}, *messages[count:]]


def _user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def _check_keeps(field: str, keeps: bool) -> None:
    if not keeps:
        what = "previous_response_id" if field == "previous_response_id" else "input: item_reference"
        raise BadRequest(
            f"{what}: this server keeps no answers; start it with --responses-store N, or send the whole "
            "conversation in input",
            param=field,
            code="unsupported_parameter",
        )


def resolved(items: Sequence[Any], known: Known) -> list[Any]:
    """With the items that are named in place of their names."""
    return [
        msgspec.json.decode(known.references[item["id"]]) if is_reference(item) else item for item in items
    ]


def _chat(body: ResponsesRequest, messages: list[dict[str, Any]], tools: ChatTools) -> ChatRequest:
    text, reasoning = body.text or Text(), body.reasoning
    variables = dict(body.chat_template_kwargs or {})
    if text.verbosity is not None:
        _one_of("text.verbosity", text.verbosity, ("low", "medium", "high"))
        variables.setdefault("verbosity", text.verbosity)
    chat = BoundChat(
        messages=messages,
        tools=tools.tools,
        tool_choice=tools.choice,
        parallel_tool_calls=body.parallel_tool_calls,
        chat_template_kwargs=variables or None,
        reasoning_effort=None if reasoning is None else reasoning.effort,
        response_format=_format(text.format),
        drops_oldest=body.truncation == "auto",
        model=body.model,
    )
    _one_of("truncation", body.truncation, ("auto", "disabled"))
    _complete(chat, body)
    return chat


def _complete(chat: ChatRequest, body: ResponsesRequest) -> None:
    """How the answer is generated."""
    for name in _SAME:
        setattr(chat, name, getattr(body, name))
    chat.max_completion_tokens = body.max_output_tokens
    chat.user = body.user or body.safety_identifier
    for name in body.include or ():
        _one_of("include", name, sorted(INCLUDABLE))
    if LOGPROBS in (body.include or ()):
        chat.logprobs, chat.top_logprobs = True, body.top_logprobs or 0
    elif body.top_logprobs:
        raise BadRequest(f"top_logprobs: give include with {LOGPROBS!r} as well", param="top_logprobs")
    if body.stream_options is not None and not body.stream:
        raise BadRequest(
            "stream_options: only with stream set to true; set that or leave it out", param="stream_options"
        )


def _format(wanted: TextFormat | None) -> ResponseFormat | None:
    if wanted is None:
        return None
    if wanted.type in (None, "text"):
        if wanted.schema is not None:
            raise BadRequest("text.format.schema: goes with type json_schema", param="text.format.type")
        return None
    if wanted.type == "json_object":
        return ResponseFormat("json_object", schema=wanted.schema)
    if wanted.type != "json_schema":
        raise BadRequest(
            f"text.format.type: {str(wanted.type)[:50]!r} must be text, json_object or json_schema",
            param="text.format.type",
        )
    if wanted.schema is None:
        raise BadRequest("text.format.schema: it is missing; give a JSON schema", param="text.format.schema")
    return ResponseFormat("json_schema", JsonSchemaFormat(wanted.name, wanted.schema))


def _one_of(field: str, value: str | None, known: Sequence[str]) -> None:
    if value is not None and value not in known:
        raise BadRequest(f"{field}: {value[:50]!r} must be one of {', '.join(known)}", param=field)


def _said(body: ResponsesRequest, tools: ChatTools) -> str:
    text, reasoning = body.text or Text(), body.reasoning
    said = {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning and reasoning.effort, "summary": reasoning and reasoning.summary},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "text": {"format": _format_said(text.format), "verbosity": text.verbosity},
        "tool_choice": tools.choice_said,
        "tools": tools.said,
        "top_logprobs": body.top_logprobs or 0,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }
    return msgspec.json.encode(said)[1:-1].decode()


def _format_said(wanted: TextFormat | None) -> dict[str, Any]:
    if wanted is None or wanted.type != "json_schema":
        return {"type": (wanted and wanted.type) or "text"}
    return {
        "type": "json_schema",
        "name": wanted.name or "schema",
        "schema": wanted.schema,
        "description": wanted.description,
        "strict": wanted.strict is not False,
    }


def listed(item: Mapping[str, Any]) -> tuple[str, str]:
    """(its id, the item as JSON, in the form in which items are listed)."""
    kind = item.get("type") or "message"
    id = item.get("id")
    if not isinstance(id, str) or not id:
        id = f"{_PREFIXES.get(kind, 'item')}_{secrets.token_hex(16)}"
    kept = {"id": id, "type": kind, **item}
    if kind == "message" and isinstance(item.get("content"), str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        kept["content"] = [{"type": part, "text": item["content"]}]
        if part == "output_text":
            kept["content"][0]["annotations"] = []
    kept["id"] = id
    kept.setdefault("status", "completed")
    return id, msgspec.json.encode(kept).decode()
