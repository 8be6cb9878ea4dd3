"""Bodies of the requests that generate nothing: as in `schemas.py`, OpenAI's fields and vLLM's."""

from __future__ import annotations

from typing import Annotated

import msgspec

from baton.gateway.api import fields as f
from baton.gateway.api.fields import MAX_SEQUENCES


class PoolingFields(msgspec.Struct, kw_only=True):
    """What the requests have in common that generate nothing."""

    model: str | None = None
    truncate_prompt_tokens: f.Truncation | None = None
    """A longer prompt is cut to so many tokens; -1: to the model's context."""
    truncation_side: f.TruncationSide | None = None
    add_special_tokens: bool | None = None
    priority: f.Priority | None = None
    cache_salt: f.CacheSalt | None = None
    request_id: f.RequestId | None = None
    user: str | None = None


class EmbeddingRequest(PoolingFields, kw_only=True):
    input: f.Prompt = f.nothing()
    """As the `prompt` of a completion."""
    dimensions: f.AtLeastOne | None = None
    """The first so many elements of each vector."""
    encoding_format: f.EncodingFormat | None = None
    normalize: bool | None = None
    """Each vector is divided by its length."""
    use_activation: bool | None = None
    """vLLM's newer name of `normalize`."""
    add_generation_prompt: f.Ignored = f.nothing()
    continue_final_message: f.Ignored = f.nothing()
    chat_template_kwargs: f.Ignored = f.nothing()


class ClassifyRequest(PoolingFields, kw_only=True):
    input: f.Prompt = f.nothing()
    """As the `prompt` of a completion."""
    use_activation: bool | None = None
    """false: the scores as they are."""


class TextDocument(msgspec.Struct):
    text: f.RankedText


class RankingFields(PoolingFields, kw_only=True):
    instruction: str | None = None
    """What makes a document fit a query, for a model that is asked that (Qwen3-Reranker)."""
    use_activation: bool | None = None
    """false: the model's scores as they are, or the difference of the two logits."""
    chat_template_kwargs: f.Ignored = f.nothing()


class RerankRequest(RankingFields, kw_only=True):
    query: f.RankedText | None = None
    documents: (
        Annotated[list[f.RankedText | TextDocument], msgspec.Meta(min_length=1, max_length=MAX_SEQUENCES)]
        | None
    ) = None
    top_n: f.TokenCount | None = None
    """So many of the best; 0: all."""
    return_documents: bool | None = None


class ScoreRequest(RankingFields, kw_only=True):
    text_1: f.RankedTexts | None = None
    """One for all of `text_2`, or one for each."""
    text_2: f.RankedTexts | None = None
    queries: f.RankedTexts | None = None
    """Another name of `text_1`."""
    documents: f.RankedTexts | None = None
    """Another name of `text_2`."""
