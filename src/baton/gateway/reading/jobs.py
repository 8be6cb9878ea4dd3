"""Which bodies are read, and into what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import msgspec

from baton.gateway.anthropic import translation as anthropic
from baton.gateway.anthropic.schemas import CountTokensRequest, MessagesRequest
from baton.gateway.api.pooling import ClassifyRequest, EmbeddingRequest, RerankRequest, ScoreRequest
from baton.gateway.api.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from baton.gateway.reading.constraints.structured import FIELDS
from baton.gateway.responses.compaction import compacting
from baton.gateway.responses.schemas import ResponsesRequest
from baton.gateway.responses.translation import Known, ReadResponses, translate

Job = Literal[
    "completion",
    "chat",
    "tokenize",
    "detokenize",
    "embedding",
    "classify",
    "rerank",
    "score",
    "responses",
    "compact",
    "messages",
    "count_tokens",
    "structure",
]
KINDS: dict[Job, type[msgspec.Struct]] = {
    "completion": CompletionRequest,
    "chat": ChatRequest,
    "tokenize": TokenizeRequest,
    "detokenize": DetokenizeRequest,
    "embedding": EmbeddingRequest,
    "classify": ClassifyRequest,
    "rerank": RerankRequest,
    "score": ScoreRequest,
    "responses": ResponsesRequest,
    "compact": ResponsesRequest,
    "messages": MessagesRequest,
    "count_tokens": CountTokensRequest,
}
JOBS: tuple[Job, ...] = (*KINDS, "structure")
"""`structure`: what an answer must be, and no body of a client's (`constraints/structured.py`)."""


class Beside(NamedTuple):
    """What a translation may depend on besides the body."""

    keeps: bool = False
    """The server keeps answers."""
    more: bytes = b""
    """What the gateway knows: sent before the body, by jobs that have a `MORE`."""
    thinks: bool = True
    """It is known how the model writes reasoning."""
    refuse_tools: bool = False
    """Tools that the server cannot serve are refused, not left out."""
    max_model_len: int = 0
    """Tokens of the context."""


class Translation(NamedTuple):
    """How the body of another API becomes a chat's."""

    chat: Callable[[Any, Beside], tuple[msgspec.Struct, ChatRequest | None, list[str]]]
    """(what the gateway gets to know of the body, the chat, kinds of tools that were left out; None: it
    cannot be read yet).  Raises `BadRequest` in that API's own names."""
    kind: type[msgspec.Struct]
    """Of the first of these."""
    apart: frozenset[str] = frozenset()
    """Its fields that nobody needs once it is translated: what became messages and tools."""


def _responses(body: ResponsesRequest, beside: Beside) -> tuple[ReadResponses, ChatRequest | None, list[str]]:
    known = msgspec.msgpack.decode(beside.more, type=Known) if beside.more else None
    return translate(body, keeps=beside.keeps, known=known, refuse=beside.refuse_tools)


def _compact(body: ResponsesRequest, beside: Beside) -> tuple[ReadResponses, ChatRequest | None, list[str]]:
    known = msgspec.msgpack.decode(beside.more, type=Known) if beside.more else None
    return compacting(
        body,
        keeps=beside.keeps,
        known=known,
        max_model_len=beside.max_model_len,
    )


def _messages(body: CountTokensRequest, beside: Beside) -> tuple[CountTokensRequest, ChatRequest, list[str]]:
    chat, skipped = anthropic.chat_of(body, refuse_tools=beside.refuse_tools)
    if not beside.thinks:
        chat.thinking_token_budget = None  # (there is nothing to bound)
    return body, chat, skipped


TRANSLATIONS: dict[Job, Translation] = {
    "responses": Translation(_responses, ReadResponses),
    "compact": Translation(_compact, ReadResponses),
    "messages": Translation(_messages, MessagesRequest, anthropic.APART),
    "count_tokens": Translation(_messages, CountTokensRequest, anthropic.APART),
}
"""A kind that is here is read as a `Translated`, and its prompt as a chat's."""
MORE: frozenset[Job] = frozenset({"responses", "compact"})
"""Before their bodies stands `Beside.more`, and its length as four bytes."""


class Translated(NamedTuple):
    """A body of another API than chat's."""

    body: Any
    """What is known of it, as its `Translation` says."""
    chat: ChatRequest
    """What it asks for, in chat's terms, without messages and tools."""


CONVERSATIONS: frozenset[Job] = frozenset({"chat", "tokenize", *TRANSLATIONS})
"""They may need the model's chat template."""
APART = frozenset(
    {
        "prompt",
        "input",
        "messages",
        "chat_template_kwargs",
        "tools",
        "tool_choice",
        "web_search_options",
        "tokens",
        "query",
        "queries",
        "documents",
        "text_1",
        "text_2",
        *FIELDS,
    }
)
"""Fields that an answer does not repeat: prompts, tools, and what is described in `Found.bindings`."""


def with_more(more: bytes, body: list[bytes]) -> list[bytes]:
    """The pieces of a body of a job in `MORE`."""
    return [len(more).to_bytes(4, "little") + more, *body]
