"""The shapes of what /v1/responses answers, for `/openapi.json` and tests alone."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from baton.gateway.api.answers import PromptProgress, Timings

Count = Annotated[int, Meta(ge=0)]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class ResponseTopLogprob(Struct, forbid_unknown_fields=True):
    token: str
    logprob: float
    bytes: list[Count]


class ResponseLogprob(Struct, forbid_unknown_fields=True):
    token: str
    logprob: float
    bytes: list[Count]
    top_logprobs: list[ResponseTopLogprob]


class OutputText(Struct, forbid_unknown_fields=True, tag="output_text"):
    annotations: list[Any]
    logprobs: list[ResponseLogprob]
    text: str


class ReasoningText(Struct, forbid_unknown_fields=True, tag="reasoning_text"):
    text: str


class MessageItem(Struct, forbid_unknown_fields=True, tag="message"):
    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningItem(Struct, forbid_unknown_fields=True, tag="reasoning"):
    id: str
    status: ItemStatus
    summary: list[Any]
    encrypted_content: str | None
    """What it says once more, for clients that give back nothing else of it."""
    content: list[ReasoningText]


class FunctionCallItem(Struct, forbid_unknown_fields=True, tag="function_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None
    """The one that the tool is in."""


class CustomToolCallItem(Struct, forbid_unknown_fields=True, tag="custom_tool_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    input: str
    """The text that the tool gets, as it is."""
    namespace: str | None = None


class CompactionItem(Struct, forbid_unknown_fields=True, tag="compaction"):
    id: str
    encrypted_content: str
    """A summary of what was said, for later requests to this server."""


OutputItem = MessageItem | ReasoningItem | FunctionCallItem | CustomToolCallItem


class ResponseError(Struct, forbid_unknown_fields=True):
    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class IncompleteDetails(Struct, forbid_unknown_fields=True):
    reason: Literal["max_output_tokens"]


class InputTokensDetails(Struct, forbid_unknown_fields=True):
    cached_tokens: Count
    cache_write_tokens: Count
    """Always 0: it is not counted."""


class OutputTokensDetails(Struct, forbid_unknown_fields=True):
    reasoning_tokens: Count


class ResponseUsage(Struct, forbid_unknown_fields=True):
    input_tokens: Count
    input_tokens_details: InputTokensDetails
    output_tokens: Count
    output_tokens_details: OutputTokensDetails
    total_tokens: Count


class ResponseObject(Struct, forbid_unknown_fields=True):
    """An answer.  Much of it repeats the request."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    completed_at: int | None
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    model: str
    temperature: float
    top_p: float
    store: bool
    """It is kept; false where it cannot be, whatever was asked for."""
    background: Literal[False]
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: Literal["default"]
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    truncation: Literal["auto", "disabled"]
    user: str | None
    output: list[OutputItem]
    usage: ResponseUsage | None
    timings: Timings | None = None


class ResponseEvent(Struct, forbid_unknown_fields=True):
    """The `data` of one event of a stream; `type` is the event's name, too."""

    type: str
    sequence_number: Count
    response: ResponseObject | None = None
    prompt_progress: PromptProgress | None = None
    """Of `response.in_progress`."""
    output_index: Count | None = None
    item: OutputItem | None = None
    item_id: str | None = None
    content_index: Count | None = None
    part: OutputText | ReasoningText | None = None
    delta: str | None = None
    text: str | None = None
    logprobs: list[ResponseLogprob] | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None


class CompactedResponse(Struct, forbid_unknown_fields=True):
    """What a conversation became: messages of users as they were, and a summary."""

    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[dict[str, Any]]
    usage: ResponseUsage


class InputTokens(Struct, forbid_unknown_fields=True):
    object: Literal["response.input_tokens"]
    input_tokens: Count


class DeletedResponse(Struct, forbid_unknown_fields=True):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ItemList(Struct, forbid_unknown_fields=True):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
