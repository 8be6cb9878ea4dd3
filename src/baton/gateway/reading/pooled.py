"""What the bodies hold of requests that generate nothing: inputs, or pairs of texts.  Raises `BadRequest`."""

from __future__ import annotations

from typing import Any

from baton.gateway.api.pooling import (
    ClassifyRequest,
    EmbeddingRequest,
    RankingFields,
    RerankRequest,
    ScoreRequest,
    TextDocument,
)
from baton.gateway.api.schemas import decode_prompt
from baton.gateway.errors import BadRequest
from baton.gateway.served_model import Judge


def inputs_of(request: EmbeddingRequest | ClassifyRequest) -> list[str] | list[list[int]]:
    """Texts that are not empty, or rows of token ids."""
    decoded = decode_prompt(request.input, "input")
    if not decoded:
        raise BadRequest(
            "input: give a text, a list of texts, a list of token ids, or a list of such lists", param="input"
        )
    many: list[Any] = [decoded] if isinstance(decoded, str) else decoded
    if not isinstance(many[0], str):
        return many if isinstance(many[0], list) else [many]
    if not all(many):
        raise BadRequest("input: a text is empty; give at least one character", param="input")
    return many


def pairs_of(request: RankingFields) -> tuple[list[str], list[str]]:
    """(queries, documents): one query for all documents, or one for each."""
    if isinstance(request, RerankRequest):
        if request.query is None or request.documents is None:
            field = "query" if request.query is None else "documents"
            raise BadRequest(f"{field}: it is missing; give query and documents", param=field)
        documents = [one.text if isinstance(one, TextDocument) else one for one in request.documents]
        return [request.query], documents
    assert isinstance(request, ScoreRequest)
    queries, documents = _either(request, "text_1", "queries"), _either(request, "text_2", "documents")
    if len(queries) not in (1, len(documents)):
        raise BadRequest(
            f"text_1: {len(queries)} texts for the {len(documents)} of text_2; give one, or as many",
            param="text_1",
        )
    return queries, documents


def prompts_of(
    queries: list[str], documents: list[str], judge: Judge | None, instruction: str | None
) -> list[str]:
    """A question about each pair, or each text by itself."""
    if judge is None:
        return [*queries, *documents]
    firsts = queries * len(documents) if len(queries) == 1 else queries
    return [
        judge.prompt(query, document, instruction) for query, document in zip(firsts, documents, strict=True)
    ]


def _either(request: ScoreRequest, name: str, other: str) -> list[str]:
    given = [value for value in (getattr(request, name), getattr(request, other)) if value is not None]
    if len(given) != 1:
        raise BadRequest(f"{name}: give either {name} or {other}", param=name)
    return [given[0]] if isinstance(given[0], str) else given[0]
