"""From a conversation, with tools, to the prompt's text, and how the answer to it begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from baton.gateway.api.fields import EFFORTS
from baton.gateway.api.schemas import ChatFields
from baton.gateway.api.tools import Tools, narrowed, read_tools, shown
from baton.gateway.errors import BadRequest
from baton.gateway.parsing.choice import Formats
from baton.gateway.text.chat_template import ChatTemplate


class Conversation(NamedTuple):
    """What matters of it for the answer."""

    tools: Tools
    thinking: bool
    """The answer begins inside of reasoning."""


def render_conversation(
    request: ChatFields,
    messages: Sequence[Mapping[str, Any]],
    template: ChatTemplate,
    formats: Formats,
    defaults: Mapping[str, Any],
    *,
    strict: bool = True,
) -> tuple[str, Conversation]:
    """`messages`: those of the request, read; `defaults`: of the template's switches.  `strict`: tools are
    refused where it is not known how the model calls, also those that need not be called.  Raises
    `BadRequest`, `ChatTemplateError`."""
    given, choice = narrowed(request.tools, request.tool_choice)
    tools = read_tools(given, choice, bind=getattr(request, "binds_tools", False))
    if tools.wanted and (strict or tools.demanded or not template.shapes.shows_tools):
        check_calling(formats, shows_tools=template.shapes.shows_tools)
    text = template.render(
        messages,
        add_generation_prompt=request.add_generation_prompt is not False,
        continue_final_message=bool(request.continue_final_message),
        tools=shown(given) if tools.wanted else None,
        documents=request.documents,
        variables={**defaults, **_variables(request.chat_template_kwargs, request.reasoning_effort)},
    )
    continued = _text_of(messages[-1], template) if request.continue_final_message else None
    return text, Conversation(tools, formats.begins_thinking(text, continued=continued))


def echo_of(request: ChatFields, messages: Sequence[Mapping[str, Any]], template: ChatTemplate) -> str:
    """The text of the last message, if who answers has written it."""
    last = messages[-1]
    answers = last.get("role") == "assistant" or request.add_generation_prompt is False
    return _text_of(last, template) if answers else ""


def _variables(given: Mapping[str, Any] | None, effort: str | None) -> dict[str, Any]:
    """What the chat template gets of these fields.  Raises `BadRequest`."""
    if effort is None:
        return dict(given or {})
    if effort not in EFFORTS:
        raise BadRequest(
            f"reasoning_effort: {effort[:50]!r} must be one of {', '.join(EFFORTS)}; what else the model's "
            "template knows can be given in chat_template_kwargs",
            param="reasoning_effort",
        )
    off = {"enable_thinking": False, "thinking": False} if effort == "none" else {}
    return {"reasoning_effort": effort, **off, **(given or {})}


def check_calling(formats: Formats, *, shows_tools: bool) -> None:
    """Raises `BadRequest` where the model cannot be given tools.  `shows_tools`: its template does."""
    if not shows_tools:
        raise BadRequest(
            "tools: the model's chat template has no place for tools; use a model that was trained for calls",
            param="tools",
            code="unsupported_parameter",
        )
    if not formats.calls:
        raise BadRequest(
            "tools: in which format this model calls is not known; start the server with --tool-call-parser",
            param="tools",
            code="unsupported_parameter",
        )


def _text_of(message: Mapping[str, Any], template: ChatTemplate) -> str:
    """As it stands in the prompt."""
    content = template.shapes.content(message["role"], message.get("content"))
    return content if isinstance(content, str) else "".join(part["text"] for part in content or ())
