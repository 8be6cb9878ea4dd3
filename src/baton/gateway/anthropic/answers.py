"""The shapes of what /v1/messages answers, for `/openapi.json` alone: `rendering/messages.py` writes them
faster.

Tests compare served answers with these: a field that only one side has fails them.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from baton.gateway.api.answers import Count, PromptProgress, Timings

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn", "model_context_window_exceeded"
]


class MessagesErrorDetail(Struct, forbid_unknown_fields=True):
    type: str
    message: str


class MessagesError(Struct, forbid_unknown_fields=True, tag="error", tag_field="type"):
    """Every error of these paths, in Anthropic's shape."""

    error: MessagesErrorDetail
    request_id: str


class ThinkingTokens(Struct, forbid_unknown_fields=True):
    thinking_tokens: Count


class MessageUsage(Struct, forbid_unknown_fields=True):
    """The tokens of the prompt are `input_tokens` and `cache_read_input_tokens` together."""

    input_tokens: Count
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: Count
    output_tokens: Count
    output_tokens_details: ThinkingTokens | None = None
    """Of a model that reasons."""


class TextBlock(Struct, forbid_unknown_fields=True, tag="text", tag_field="type"):
    text: str


class ThinkingBlock(Struct, forbid_unknown_fields=True, tag="thinking", tag_field="type"):
    thinking: str
    signature: str


class ToolUseBlock(Struct, forbid_unknown_fields=True, tag="tool_use", tag_field="type"):
    id: str
    name: str
    input: dict[str, Any]
    """Of a call in which the answer was cut off: what was complete in it."""


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageAnswer(Struct, forbid_unknown_fields=True):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    """Null in `message_start` alone."""
    stop_sequence: str | None
    usage: MessageUsage
    timings: Timings | None = None


class TokensCounted(Struct, forbid_unknown_fields=True):
    input_tokens: Count


class TextDelta(Struct, forbid_unknown_fields=True, tag="text_delta", tag_field="type"):
    text: str


class ThinkingDelta(Struct, forbid_unknown_fields=True, tag="thinking_delta", tag_field="type"):
    thinking: str


class SignatureDelta(Struct, forbid_unknown_fields=True, tag="signature_delta", tag_field="type"):
    signature: str


class InputDelta(Struct, forbid_unknown_fields=True, tag="input_json_delta", tag_field="type"):
    partial_json: str


class MessageEnd(Struct, forbid_unknown_fields=True):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageStart(Struct, forbid_unknown_fields=True, tag="message_start", tag_field="type"):
    message: MessageAnswer


class BlockStart(Struct, forbid_unknown_fields=True, tag="content_block_start", tag_field="type"):
    index: Count
    content_block: Block


class BlockDelta(Struct, forbid_unknown_fields=True, tag="content_block_delta", tag_field="type"):
    index: Count
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(Struct, forbid_unknown_fields=True, tag="content_block_stop", tag_field="type"):
    index: Count


class MessageDelta(Struct, forbid_unknown_fields=True, tag="message_delta", tag_field="type"):
    delta: MessageEnd
    usage: MessageUsage
    timings: Timings | None = None


class MessageStop(Struct, forbid_unknown_fields=True, tag="message_stop", tag_field="type"):
    pass


class Ping(Struct, forbid_unknown_fields=True, tag="ping", tag_field="type"):
    prompt_progress: PromptProgress | None = None


MessageEvent = (
    MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping | MessagesError
)
