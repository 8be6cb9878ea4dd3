"""The shapes of what is answered, for `/openapi.json` alone: `render_*.py` and the routes write them faster.

Tests compare served answers with these: a field that only one side has fails them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from baton.gateway.api.calls import ToolCall, ToolCallDelta

FinishReason = Literal["stop", "length", "abort", "repetition"]
ChatFinishReason = Literal["stop", "length", "abort", "repetition", "tool_calls"]
Count = Annotated[int, Meta(ge=0)]
AnyObject = dict[str, Any]


class ErrorDetail(Struct, forbid_unknown_fields=True):
    message: str
    type: str
    param: str | None
    """The field that it is about; the message begins with it."""
    code: str | None


class Error(Struct, forbid_unknown_fields=True):
    """Every error, in OpenAI's shape."""

    error: ErrorDetail


class PromptTokensDetails(Struct, forbid_unknown_fields=True):
    cached_tokens: Count


class CompletionTokensDetails(Struct, forbid_unknown_fields=True):
    reasoning_tokens: Count


class Usage(Struct, forbid_unknown_fields=True):
    prompt_tokens: Count
    total_tokens: Count
    completion_tokens: Count
    prompt_tokens_details: PromptTokensDetails | None
    completion_tokens_details: CompletionTokensDetails | None = None
    """Of chats with a model that reasons."""


class PromptLogprob(Struct, forbid_unknown_fields=True):
    logprob: float
    rank: Annotated[int, Meta(ge=1)]
    decoded_token: str


Timings = dict[str, float | None]
"""Where the time went, in milliseconds; `clock_error_ms` may be null (docs/observability.md)."""
PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""Of each prompt token, by token id; of the first none."""


RoutedExperts = str
"""Base64 of a file of numpy (.npy) with [tokens, mixtures, chosen] ids."""


class Embedding(Struct, forbid_unknown_fields=True):
    index: Count
    object: Literal["embedding"]
    embedding: list[float] | str
    """Base64 of 32-bit floats, little-endian, if that was asked for."""


class Embeddings(Struct, forbid_unknown_fields=True):
    id: str
    object: Literal["list"]
    created: Count
    model: str
    data: list[Embedding]
    usage: Usage


class Rendered(Struct, forbid_unknown_fields=True):
    request_id: str
    token_ids: list[Count]
    prompt: str | None
    """Null of a prompt that came as token ids."""
    features: None
    sampling_params: dict[str, Any]
    model: str
    stream: bool


class Class(Struct, forbid_unknown_fields=True):
    index: Count
    label: str
    """The likeliest."""
    probs: list[float]
    """Of each label, in the order of the model's."""
    num_classes: Count


class Classified(Struct, forbid_unknown_fields=True):
    id: str
    object: Literal["list"]
    created: Count
    model: str
    data: list[Class]
    usage: Usage


class DocumentText(Struct, forbid_unknown_fields=True):
    text: str


class RankedDocument(Struct, forbid_unknown_fields=True):
    index: Count
    relevance_score: float
    document: DocumentText | None = None


class Reranked(Struct, forbid_unknown_fields=True):
    id: str
    model: str
    usage: Usage
    results: list[RankedDocument]
    """The best first."""


class Score(Struct, forbid_unknown_fields=True):
    index: Count
    object: Literal["score"]
    score: float


class Scores(Struct, forbid_unknown_fields=True):
    id: str
    object: Literal["list"]
    created: Count
    model: str
    data: list[Score]
    usage: Usage


class CompletionLogprobs(Struct, forbid_unknown_fields=True):
    """Four lists of the same length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[Count]


class CompletionChoice(Struct, forbid_unknown_fields=True):
    index: Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None
    routed_experts: RoutedExperts | None = None


class Completion(Struct, forbid_unknown_fields=True):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    service_tier: None
    system_fingerprint: None
    choices: list[CompletionChoice]
    usage: Usage
    kv_transfer_params: None
    timings: Timings | None = None


class PromptProgress(Struct, forbid_unknown_fields=True):
    """With `return_progress`, in events of a stream before its first text: how far the prompts are, in
    tokens, under llama.cpp's names."""

    total: Count
    cache: Count
    """Tokens of the prompts that came from the prefix cache."""
    processed: Count
    """Tokens of the prompts that are computed or came from the cache."""
    time_ms: Count
    """Since the prompt was begun."""


class CompletionChunkChoice(Struct, forbid_unknown_fields=True):
    index: Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    token_ids: list[int] | None
    prompt_token_ids: list[int] | None


class CompletionChunk(Struct, forbid_unknown_fields=True):
    """The `data` of one event of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: Usage | None = None
    timings: Timings | None = None
    """In the last one."""
    prompt_progress: PromptProgress | None = None


class TopLogprob(Struct, forbid_unknown_fields=True):
    token: str
    logprob: float
    bytes: list[Count]


class TokenLogprob(Struct, forbid_unknown_fields=True):
    token: str
    logprob: float
    bytes: list[Count]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, forbid_unknown_fields=True):
    content: list[TokenLogprob]
    refusal: None


class ChatMessage(Struct, forbid_unknown_fields=True):
    role: Literal["assistant"]
    content: str | None
    """null where there is nothing but calls or reasoning."""
    refusal: None
    annotations: None
    audio: None
    function_call: None
    reasoning: str | None
    reasoning_content: str | None
    """The same under its older name."""
    tool_calls: list[ToolCall] | None = None
    """Only where there are calls."""


class ChatChoice(Struct, forbid_unknown_fields=True):
    index: Count
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: int | str | None
    token_ids: list[int] | None
    routed_experts: RoutedExperts | None = None


class ChatCompletion(Struct, forbid_unknown_fields=True):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    service_tier: None
    system_fingerprint: None
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None
    kv_transfer_params: None
    timings: Timings | None = None


class Delta(Struct, forbid_unknown_fields=True):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """The same under its older name."""
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(Struct, forbid_unknown_fields=True):
    index: Count
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    token_ids: list[int] | None = None
    """Not in the first one."""
    stop_reason: int | str | None = None


class ChatCompletionChunk(Struct, forbid_unknown_fields=True):
    """The `data` of one event of a stream.  The first one of each choice says the role, and has the prompt's
    ids if they are wanted."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    timings: Timings | None = None
    """In the last one."""
    prompt_progress: PromptProgress | None = None


class ModelCard(Struct, forbid_unknown_fields=True):
    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["baton"]
    root: str
    """Where the model and its tokenizer are: a directory of the server, or a name on the hub."""
    parent: None
    max_model_len: Annotated[int, Meta(ge=2)]


class ModelList(Struct, forbid_unknown_fields=True):
    object: Literal["list"]
    data: list[ModelCard]


class Tokens(Struct, forbid_unknown_fields=True):
    count: Count
    max_model_len: int
    tokens: list[Count]
    token_strs: list[str | None] | None


class Text(Struct, forbid_unknown_fields=True):
    prompt: str


class ServerLoad(Struct, forbid_unknown_fields=True):
    server_load: Count


class Health(Struct, forbid_unknown_fields=True):
    status: Literal["alive"]


class Ready(Struct, forbid_unknown_fields=True):
    status: Literal["ready"]


class NotReady(Struct, forbid_unknown_fields=True):
    status: Literal["starting", "restarting", "failed", "paused", "ready"]
    """That of the cluster; `ready` while some instance of this server still starts."""
    reason: str


class Version(Struct, forbid_unknown_fields=True):
    version: str


class ServerInfo(Struct, forbid_unknown_fields=True):
    """How the server was started."""

    version: str
    model: dict[str, Any]
    """Names, where it is, its sizes."""
    flags: dict[str, Any] = {}
    """The value of every flag, secrets hidden."""
    given: dict[str, str] = {}
    """Where the flags come from that were given."""
    instance: dict[str, Any] = {}
    """What one of its own instances is configured with: sizes and types as they were resolved."""
