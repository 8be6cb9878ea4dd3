"""Request bodies of /v1/messages and /v1/messages/count_tokens.

What is of no effect here (`cache_control`: prefixes are cached by themselves; `service_tier`, `speed`, …) is
accepted; what would change the answer and is not supported is refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from baton.gateway.api import fields as f
from baton.gateway.api.unknown import Refusal

_TEXTS: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "anyOf": [
                    {
                        "type": "object",
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        "required": ["type", "text"],
                    },
                    f.OTHER_PART,
                ]
            },
        },
    ]
}
_BLOCKS: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "type": {
                        "type": "string",
                        "description": "text, tool_use, tool_result, thinking or redacted_thinking; others "
                        "(image, …) are noted or refused (--unsupported-content).",
                    }
                },
                "required": ["type"],
            },
        },
    ]
}
System = Annotated[
    str | list[dict[str, Any]],
    Meta(description="A text, or blocks of type text.", extra_json_schema=_TEXTS),
]
Message = Annotated[
    dict[str, Any],
    Meta(
        extra_json_schema={
            "properties": {"role": {"enum": ["user", "assistant", "system"]}, "content": _BLOCKS},
            "required": ["role", "content"],
        }
    ),
]
Messages = Annotated[list[Message], Meta(min_length=1)]
Tool = Annotated[
    dict[str, Any],
    Meta(
        extra_json_schema={
            "anyOf": [
                {
                    "properties": {
                        "type": {"enum": ["custom", None]},
                        "name": {"type": "string", "minLength": 1, "maxLength": 128},
                        "description": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                        "input_schema": {"type": "object", "description": "A JSON schema."},
                        "strict": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
                    },
                    "required": ["name", "input_schema"],
                },
                {
                    "description": "A tool of Anthropic's: left out, or called by its own schema.",
                    "properties": {"type": {"type": "string", "not": {"const": "custom"}}},
                    "required": ["type"],
                },
            ],
        }
    ),
]
Tools = Annotated[list[Tool], Meta(extra_json_schema={"maxItems": f.MAX_TOOLS})]
StopSequences = Annotated[list[f.StopString], Meta(max_length=f.MAX_STOP_STRINGS)]
# (What `translation.py` checks itself, to say more than that it is wrong.)
ThinkingKind = Annotated[str, Meta(description="enabled, adaptive, between_tools or disabled.")]
ChoiceKind = Annotated[str, Meta(description="auto, any, tool or none.")]


class Thinking(msgspec.Struct):
    type: ThinkingKind | None = None
    budget_tokens: f.AtLeastOne | None = None
    """With `enabled`: tokens of reasoning at most."""
    display: str | None = None
    """`omitted`: thinking blocks come without their text."""


class MessagesToolChoice(msgspec.Struct):
    type: ChoiceKind | None = None
    name: str | None = None
    """With `tool`."""
    disable_parallel_tool_use: bool | None = None


class OutputFormat(msgspec.Struct):
    type: str | None = None
    """`json_schema`."""
    schema: f.Anything | None = None


class OutputConfig(msgspec.Struct):
    effort: f.ReasoningEffort | None = None
    format: OutputFormat | None = None


class MessagesMetadata(msgspec.Struct):
    user_id: str | None = None
    """Whose share of the server it is."""


class CountTokensRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    messages: Messages | None = None
    system: System | None = None
    tools: Tools | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """The older place of `output_config.format`."""
    mcp_servers: list[dict[str, Any]] | None = None
    """Left out: this server calls no others."""
    chat_template_kwargs: dict[str, Any] | None = None
    """As in /v1/chat/completions."""
    cache_control: f.Ignored = f.nothing()
    context_management: f.Ignored = f.nothing()
    speed: f.Ignored = f.nothing()

    UNSUPPORTED: ClassVar[dict[str, Refusal]] = {
        "container": ((), "no code runs on this server; leave it out"),
        "n": ((1,), "an answer here is one; send several requests"),
        "stop": (([],), "is for /v1/chat/completions; give stop_sequences"),
        "max_completion_tokens": ((), "is for /v1/chat/completions; give max_tokens"),
        "response_format": ((), "is for /v1/chat/completions; give output_config.format"),
        "reasoning_effort": ((), "is for /v1/chat/completions; give output_config.effort"),
        "parallel_tool_calls": (
            (),
            "is for /v1/chat/completions; give tool_choice.disable_parallel_tool_use",
        ),
        "logprobs": ((False,), "is for /v1/chat/completions; leave it out"),
        "watermarking": ((False,), "texts are not watermarked; leave it out"),
        "kv_transfer_params": ((), "is not supported; leave it out"),
        "ec_transfer_params": ((), "is not supported; leave it out"),
    }


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: f.TokenCount | None = None
    """Of the answer; it ends earlier where the context does."""
    temperature: f.Temperature | None = None
    top_p: f.TopP | None = None
    top_k: f.TopK | None = None
    stop_sequences: StopSequences | None = None
    stream: bool | None = None
    metadata: MessagesMetadata | None = None
    seed: f.Seed | None = None
    timings: bool | None = None
    """As in /v1/chat/completions."""
    return_progress: bool | None = None
    """The same."""
    priority: f.Priority | None = None
    cache_salt: f.CacheSalt | None = None
    service_tier: f.Ignored = f.nothing()
    inference_geo: f.Ignored = f.nothing()
    diagnostics: f.Ignored = f.nothing()
    vllm_xargs: f.Ignored = f.nothing()
    mm_payload: f.Ignored = f.nothing()
    return_mm_kwargs: f.Ignored = f.nothing()
