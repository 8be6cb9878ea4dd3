"""Types of request fields, with limits that msgspec checks as it decodes and that `/openapi.json` lists.

`SamplingParams` checks the same again, for Python's callers; a test holds both to the same limits.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from baton.gateway.api.tools import MAX_TOOLS
from baton.protocol.params.sampling_params import (
    LEAST_FACTOR,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_LENGTH,
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MOST_FACTOR,
)

INT32 = (1 << 31) - 1
Budget = Annotated[int, Meta(ge=-1, le=INT32, description="Tokens of reasoning at most; -1: any number.")]
MAX_SEQUENCES = 4096
"""Of one request: prompts times n."""
MAX_CACHE_SALT = 256
"""Characters."""
MAX_ROLE = 64
"""Characters.  Which roles there are is the template's to say: some models have roles of their own."""

Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES, description="Answers to each prompt.")]
Temperature = Annotated[float, Meta(ge=0, le=MOST_FACTOR, description="0: always the most likely token.")]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, description="0 or -1: all tokens.")]
MinP = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(ge=LEAST_FACTOR, le=MOST_FACTOR)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
LogitBias = Annotated[
    dict[str, Bias],
    Meta(
        max_length=MAX_LOGIT_BIAS,
        description="Token id → what is added to its logit.",
        extra_json_schema={"propertyNames": {"pattern": "^[0-9]+$"}},
    ),
]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]
Stop = StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)]
TokenId = Annotated[int, Meta(ge=0, le=INT32)]
StopTokenIds = Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)]
AllowedTokenIds = Annotated[
    list[TokenId],
    Meta(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS, description="No other tokens come."),
]
LogprobTokenIds = Annotated[
    list[TokenId],
    Meta(
        min_length=1,
        max_length=MAX_LOGPROB_TOKEN_IDS,
        description="With logprobs: of these tokens instead of the most likely ones.",
    ),
]
BadWord = Annotated[str, Meta(min_length=1, max_length=MAX_BAD_WORD_LENGTH)]
BadWords = Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS, description="Words that do not come.")]
Documents = Annotated[
    list[dict[str, Any]], Meta(max_length=1024, description="For templates that know documents.")
]
TokenCount = Annotated[int, Meta(ge=0)]
AtLeastOne = Annotated[int, Meta(ge=1)]
Seed = Annotated[
    int,
    Meta(
        ge=-(1 << 63),
        extra_json_schema={"maximum": (1 << 64) - 1},  # (msgspec's own limits end at 64 bits with a sign)
        description="The same seed gives the same tokens, in whatever batch.",
    ),
]
Logprobs = Annotated[
    int,
    Meta(ge=-1, le=INT32, description="At most --max-logprobs, which is 20; -1: of all tokens."),
]
RoutesStart = Annotated[
    int, Meta(ge=0, le=INT32, description="Positions of the prompt before it are left out.")
]
Priority = Annotated[int, Meta(ge=-INT32, le=INT32, description="Lower is served earlier.")]
CacheSalt = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=MAX_CACHE_SALT,
        # (An empty one would share with all who give none.)
        description="A secret: cached prefixes are shared only among requests of the same salt.",
    ),
]
RequestId = Annotated[
    str, Meta(pattern=r"^[\x21-\x7e]{1,128}\Z", extra_json_schema={"pattern": "^[!-~]{1,128}$"})
]


def _part(field: str, *kinds: str) -> dict[str, Any]:
    """Of a message: what `messages.read_messages` takes."""
    properties: dict[str, Any] = {"type": {"enum": list(kinds)}, field: {"type": "string"}}
    required = ["type", field]
    if field in kinds:  # (a text is one without its type, too)
        properties["type"]["enum"].append(None)
        required = [field]
    return {"type": "object", "properties": properties, "required": required}


OTHER_PART: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"type": "string", "not": {"enum": ["text", "input_text", "output_text", "refusal"]}},
    },
    "required": ["type"],
    "description": "An image, say: noted, or refused (--unsupported-content).",
}
"""Of a message: what is no text."""


Message = Annotated[
    dict[str, Any],
    Meta(
        extra_json_schema={
            "properties": {
                "role": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": MAX_ROLE,
                    "description": "system, developer, user, assistant, tool, or what the template knows.",
                },
                "content": {
                    "anyOf": [
                        {"type": "string"},
                        {
                            "type": "array",
                            "items": {
                                "anyOf": [
                                    {"type": "string"},
                                    _part("text", "text", "input_text", "output_text"),
                                    _part("refusal", "refusal"),
                                    OTHER_PART,
                                ]
                            },
                        },
                        {"type": "null"},
                    ]
                },
                "tool_calls": {"anyOf": [{"type": "array", "items": {"type": "object"}}, {"type": "null"}]},
            },
            "required": ["role"],
        }
    ),
]
Messages = Annotated[list[Message], Meta(min_length=1)]
CUSTOM: dict[str, Any] = {
    "type": "object",
    "description": "A tool that takes a text.",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 128},
        "description": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "format": {"anyOf": [{"type": "object"}, {"type": "null"}], "description": "text, or a grammar."},
    },
    "required": ["name"],
}
OFFERED: dict[str, Any] = {
    "description": "A tool that this server does not have: left out (--unknown-tools).",
    "properties": {"type": {"type": "string", "not": {"enum": ["function", "custom", "namespace"]}}},
    "required": ["type"],
}
Tool = Annotated[
    dict[str, Any],
    Meta(
        extra_json_schema={
            "anyOf": [
                {
                    "properties": {
                        "type": {"const": "function"},
                        "function": {
                            "type": "object",
                            "properties": {
                                "name": {"type": "string", "minLength": 1, "maxLength": 128},
                                "description": {"type": "string"},
                                "parameters": {"type": "object", "description": "A JSON schema."},
                                "strict": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
                            },
                            "required": ["name"],
                        },
                    },
                    "required": ["function"],
                },
                {
                    "properties": {"type": {"const": "custom"}, "custom": CUSTOM},
                    "required": ["type", "custom"],
                },
                OFFERED,
            ],
        }
    ),
]
Tools = Annotated[list[Tool], Meta(extra_json_schema={"maxItems": MAX_TOOLS})]
# (What `api/tools.py` checks itself, to say more than that it is wrong.)
ToolChoice = Annotated[
    str | dict[str, Any],
    Meta(
        description="none, auto, required, or {'type': 'function', 'function': {'name': …}}.",
    ),
]
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""vLLM's.  A template's own words can be given in `chat_template_kwargs`."""
ReasoningEffort = Annotated[
    str,
    Meta(
        description="Comes to the chat template under this name; none: with thinking switched off, too.",
        extra_json_schema={"enum": list(EFFORTS)},
    ),
]
Prompt = Annotated[
    msgspec.Raw,
    Meta(
        description="A text, a list of texts, a list of token ids, or a list of such lists.",
        extra_json_schema={
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_SEQUENCES},
                {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
                {
                    "type": "array",
                    "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
                    "minItems": 1,
                    "maxItems": MAX_SEQUENCES,
                },
            ]
        },
    ),
]
RankedText = Annotated[str, Meta(min_length=1)]
RankedTexts = RankedText | Annotated[list[RankedText], Meta(min_length=1, max_length=MAX_SEQUENCES)]
Truncation = Annotated[int, Meta(ge=-1, le=INT32, description="-1: to what the context has room for.")]
# (What the routes check themselves, to say more than that it is wrong.)
TruncationSide = Annotated[
    str,
    Meta(description="Which end is cut off.", extra_json_schema={"enum": ["left", "right"]}),
]
EncodingFormat = Annotated[
    str,
    Meta(
        description="base64: of 32-bit floats, little-endian.",
        extra_json_schema={"enum": ["float", "base64"]},
    ),
]
Anything = Annotated[Any, Meta(description="Any JSON.")]
Ignored = Annotated[msgspec.Raw, Meta(description="Accepted, and of no effect.")]
Directory = Annotated[str, Meta(description="Below the directory that --weights-dir or --profile-dir names.")]

MIN_TTL_S, MAX_TTL_S = 1.0, 3600.0
MAX_MOVE_S = 86_400.0
Ttl = Annotated[float, Meta(ge=MIN_TTL_S, le=MAX_TTL_S)]
MoveAfter = Annotated[float, Meta(ge=0, le=MAX_MOVE_S)]
# (What the routes check themselves, to say more than that it is wrong.)
Label = Annotated[str, Meta(extra_json_schema={"enum": ["prefill", "decode", "mixed"]})]
InstanceState = Annotated[str, Meta(extra_json_schema={"enum": ["draining", "active"]})]
Endpoint = Annotated[
    str,
    Meta(
        description="Where this server reaches the engine: tcp://HOST:PORT, with ?curve=KEY, or ipc:///PATH.",
        extra_json_schema={"pattern": "^(tcp|ipc)://"},
    ),
]
Incarnation = Annotated[str, Meta(extra_json_schema={"pattern": "^[!-~]{1,64}$"})]


def nothing() -> Any:
    """The default of a raw field (a factory, as no JSON says a raw default)."""
    return msgspec.field(default_factory=msgspec.Raw)
