"""Which bodies are read, and into what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import msgspec

from baton.gateway.api.pooling import ClassifyRequest, EmbeddingRequest, RerankRequest, ScoreRequest
from baton.gateway.api.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

Job = Literal[
    "completion",
    "chat",
    "tokenize",
    "detokenize",
    "embedding",
    "classify",
    "rerank",
    "score",
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
}
JOBS: tuple[Job, ...] = (*KINDS, "structure")
"""`structure`: what an answer must be, and no body of a client's (`structured.py`)."""


class Translation(NamedTuple):
    """How the body of another API becomes a chat's."""

    chat: Callable[[Any], ChatRequest]
    """Raises `BadRequest` in that API's own names."""
    apart: frozenset[str]
    """Fields of the body that nobody needs once it is translated: what became messages and tools."""


TRANSLATIONS: dict[Job, Translation] = {}
"""A kind that is here is read as a `Translated`, and its prompt as a chat's."""


class Translated(NamedTuple):
    """A body of another API than chat's."""

    body: Any
    """As a struct of `KINDS`, without its prompts."""
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
        "tokens",
        "query",
        "queries",
        "documents",
        "text_1",
        "text_2",
    }
)
"""Fields that an answer does not repeat."""
