"""The body of `POST /v1/responses`: OpenAI's fields, and of vLLM's extensions those that chats have."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from baton.gateway.api import fields as f
from baton.gateway.api.tools import MAX_TOOLS
from baton.gateway.api.unknown import Refusal
from baton.protocol.params.limits import MAX_LOGPROBS
from baton.protocol.params.structured_outputs import StructuredOutputs

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
INCLUDABLE = frozenset(
    {
        LOGPROBS,
        ENCRYPTED,
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
"""Of `include`.  Those of tools that there are not here ask for nothing."""
MAX_METADATA = 16

Key = Annotated[str, Meta(min_length=1, max_length=64)]
Value = Annotated[str, Meta(max_length=512)]
Metadata = Annotated[dict[Key, Value], Meta(max_length=MAX_METADATA)]
Item = Annotated[
    dict[str, Any],
    Meta(
        extra_json_schema={
            "properties": {
                "type": {
                    "enum": [
                        "message",
                        "function_call",
                        "function_call_output",
                        "custom_tool_call",
                        "custom_tool_call_output",
                        "local_shell_call",
                        "local_shell_call_output",
                        "reasoning",
                        "compaction",
                        "item_reference",
                    ]
                }
            }
        }
    ),
]
Input = str | Annotated[list[Item], Meta(description="Texts, calls and their results, reasoning.")]
Tool = Annotated[
    dict[str, Any],
    Meta(
        extra_json_schema={
            "anyOf": [
                {
                    "properties": {
                        "type": {"const": "function"},
                        "name": {"type": "string", "minLength": 1, "maxLength": 128},
                        "description": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                        "parameters": {
                            "anyOf": [{"type": "object", "description": "A JSON schema."}, {"type": "null"}]
                        },
                        "strict": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
                    },
                    "required": ["type", "name"],
                },
                {**f.CUSTOM, "properties": {"type": {"const": "custom"}, **f.CUSTOM["properties"]}}
                | {"required": ["type", "name"]},
                {
                    "description": "Tools whose names get the namespace's before them.",
                    "properties": {
                        "type": {"const": "namespace"},
                        "name": {"type": "string", "minLength": 1},
                        "tools": {"type": "array", "items": {"type": "object", "required": ["type"]}},
                    },
                    "required": ["type", "name", "tools"],
                },
                f.OFFERED,
            ],
        }
    ),
]
Tools = Annotated[list[Tool], Meta(extra_json_schema={"maxItems": MAX_TOOLS})]
# (What `tools.py` and `translation.py` check themselves, to say more than that it is wrong.)
ToolChoice = Annotated[
    str | dict[str, Any],
    Meta(
        description="none, auto, required, {'type': 'function', 'name': …} or {'type': 'allowed_tools', …}."
    ),
]
Verbosity = Annotated[
    str,
    Meta(
        description="low, medium or high: comes to the chat template under the name verbosity.",
        extra_json_schema={"enum": ["low", "medium", "high"]},
    ),
]
Truncation = Annotated[
    str,
    Meta(
        description="auto: the oldest messages are left out until the rest fits.",
        extra_json_schema={"enum": ["auto", "disabled"]},
    ),
]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Include = Annotated[list[str], Meta(extra_json_schema={"items": {"enum": sorted(INCLUDABLE)}})]


class TextFormat(msgspec.Struct):
    """What the answer's text must be."""

    type: str | None = None
    """`text`, `json_object` or `json_schema`."""
    name: str | None = None
    schema: f.Anything | None = None
    description: str | None = None
    strict: bool | None = None
    """Without effect: what a schema says is always kept, and what cannot be kept is refused."""


class Text(msgspec.Struct):
    format: TextFormat | None = None
    verbosity: Verbosity | None = None


class Reasoning(msgspec.Struct):
    effort: f.ReasoningEffort | None = None
    summary: str | None = None
    """Without effect: reasoning is given as it is."""
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class StreamOptions(msgspec.Struct):
    include_obfuscation: bool | None = None
    """Without effect: there is none."""


class ResponsesRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    input: Input | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: Text | None = None
    reasoning: Reasoning | None = None
    truncation: Truncation | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_output_tokens: f.AtLeastOne | None = None
    max_tool_calls: f.AtLeastOne | None = None
    """Without effect: it counts calls of tools that the server itself has."""
    temperature: f.Temperature | None = None
    top_p: f.TopP | None = None
    top_logprobs: TopLogprobs | None = None
    include: Include | None = None
    metadata: Metadata | None = None
    user: str | None = None
    safety_identifier: str | None = None
    """Who the user is, where `user` says nothing."""
    prompt_cache_key: str | None = None
    """Without effect: prompts are found by what they are."""
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    service_tier: str | None = None
    top_k: f.TopK | None = None
    min_p: f.MinP | None = None
    presence_penalty: f.Penalty | None = None
    frequency_penalty: f.Penalty | None = None
    repetition_penalty: f.RepetitionPenalty | None = None
    logit_bias: f.LogitBias | None = None
    stop: f.Stop | None = None
    stop_token_ids: f.StopTokenIds | None = None
    ignore_eos: bool | None = None
    min_tokens: f.TokenCount | None = None
    seed: f.Seed | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    timings: bool | None = None
    """As in /v1/chat/completions."""
    return_progress: bool | None = None
    """The same."""
    thinking_token_budget: f.Budget | None = None
    priority: f.Priority | None = None
    cache_salt: f.CacheSalt | None = None
    request_id: f.RequestId | None = None
    spaces_between_special_tokens: bool | None = None
    client_metadata: f.Ignored = f.nothing()
    prompt_cache_options: f.Ignored = f.nothing()
    prompt_cache_retention: f.Ignored = f.nothing()
    session_id: f.Ignored = f.nothing()
    vllm_xargs: f.Ignored = f.nothing()
    mm_payload: f.Ignored = f.nothing()
    return_mm_kwargs: f.Ignored = f.nothing()

    UNSUPPORTED: ClassVar[dict[str, Refusal]] = {
        "messages": ((), "is for /v1/chat/completions; give input"),
        "max_tokens": ((), "is for /v1/chat/completions; give max_output_tokens"),
        "max_completion_tokens": ((), "is for /v1/chat/completions; give max_output_tokens"),
        "response_format": ((), "is for /v1/chat/completions; give text.format"),
        "reasoning_effort": ((), "is for /v1/chat/completions; give reasoning.effort"),
        "functions": (([],), "is not supported; give tools"),
        "function_call": (("none", "auto"), "is not supported; give tools and tool_choice"),
        "logprobs": ((False,), f"is for /v1/chat/completions; give include with {LOGPROBS!r}"),
        "n": ((1,), "an answer here is one; send several requests"),
        "prompt": ((), "templates of prompts are kept by OpenAI's platform, not here; give input"),
        "conversation": ((), "conversations are kept by OpenAI's platform, not here; give input"),
        "background": (
            (False,),
            "an answer comes on the connection that asked for it; leave it out, and stream",
        ),
        "context_management": (([],), "is not supported; leave it out"),
        "moderation": ((), "is not supported; leave it out"),
        "previous_input_messages": ((), "is not supported; give input"),
        "previous_response": ((), "is not supported; give its output items in input"),
        "enable_response_messages": ((False,), "is not supported; leave it out"),
        "include_reasoning": ((True,), "is for /v1/chat/completions; reasoning is an item of its own here"),
        "watermarking": ((False,), "texts are not watermarked; leave it out"),
        "kv_transfer_params": ((), "is not supported; leave it out"),
        "ec_transfer_params": ((), "is not supported; leave it out"),
        "media_io_kwargs": ((), "is not supported; leave it out"),
        "allowed_token_ids": ((), "is not supported; leave it out"),
        "bad_words": ((), "is not supported; leave it out"),
        "logits_processors": ((), "is not supported; leave it out"),
        "mm_processor_kwargs": ((), "is not supported; leave it out"),
        "modalities": ((["text"],), "only text is generated; leave it out"),
    }
    """As `api/schemas.py` has it of chats."""
