"""POST /v1/embeddings."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton.gateway.api.pooling import EmbeddingRequest, PoolingFields, RankingFields
from baton.gateway.errors import BadRequest
from baton.gateway.generation.generation import SUBMITTED_AT_ONCE
from baton.gateway.http.context import Gateway, identity
from baton.gateway.http.responses import GenerationResponse
from baton.gateway.reading.checks import check_length, check_not_empty
from baton.gateway.reading.judging import truncate_question
from baton.gateway.reading.prompts import encode
from baton.gateway.reading.reader import Found
from baton.gateway.reading.truncation import Side, truncate
from baton.gateway.rendering.pooled import ClassifyRenderer, EmbeddingRenderer
from baton.gateway.served_model import ServedModel, Task
from baton.protocol.params.pooling import SCORES, Pooling
from baton.protocol.params.sampling_params import NO_TOKENS


def embedding_routes(gateway: Gateway) -> list[Route]:
    async def embeddings(request: Request) -> Response:
        arrived = time.monotonic()
        body, found = await gateway.read_prompted(request, "embedding")
        model = gateway.model_name(body.model)
        who = identity(gateway, request, body)
        check_task(gateway.served, "embed")
        pooling = pooling_of(body, gateway.served)
        packed = _is_packed(body)
        gateway.client.check_ready()
        prompts = await ids_of(gateway, body, found)
        generation = gateway.generator.start(
            prompts, NO_TOKENS, **who, arrived=arrived, pooling=pooling, field=found.field
        )
        renderer = EmbeddingRenderer(generation, model, packed=packed)
        return GenerationResponse(generation, renderer, stream=False)

    async def classify(request: Request) -> Response:
        arrived = time.monotonic()
        body, found = await gateway.read_prompted(request, "classify")
        model = gateway.model_name(body.model)
        who = identity(gateway, request, body)
        check_task(gateway.served, "classify")
        gateway.client.check_ready()
        prompts = await ids_of(gateway, body, found)
        generation = gateway.generator.start(
            prompts, NO_TOKENS, **who, arrived=arrived, pooling=SCORES, field=found.field
        )
        activation = "identity" if body.use_activation is False else gateway.served.activation
        renderer = ClassifyRenderer(generation, model, gateway.served.labels, activation)
        return GenerationResponse(generation, renderer, stream=False)

    return [
        Route("/v1/embeddings", embeddings, methods=["POST"]),
        Route("/classify", classify, methods=["POST"]),
    ]


async def ids_of(gateway: Gateway, body: PoolingFields, found: Found) -> list[Sequence[int]]:
    """The token ids of all prompts, cut where the request says so.  Raises `BadRequest`."""
    side, judge = _side(body), gateway.served.judge if isinstance(body, RankingFields) else None
    asked = judge is not None and not judge.head
    special = not asked if body.add_special_tokens is None else body.add_special_tokens
    prompts = encode(found, gateway.tokenizer, add_special_tokens=special)
    limit, most = gateway.served.max_model_len, body.truncate_prompt_tokens
    if most == 0:
        raise BadRequest(
            "truncate_prompt_tokens: give at least 1, or -1 for the model's context",
            param="truncate_prompt_tokens",
        )
    if most is not None and most > limit:
        raise BadRequest(
            f"truncate_prompt_tokens: {most} is more than the model's context, {limit}",
            param="truncate_prompt_tokens",
        )
    if len(prompts) > SUBMITTED_AT_ONCE:
        await asyncio.sleep(0)  # reading that many was a turn's work, and so is what follows
    rows: list[Sequence[int]] = []
    for prompt in prompts:
        ids = prompt.ids
        if most is not None:
            room = limit if most == -1 else most
            if judge is not None and asked:
                ids = truncate_question(ids, room, judge, gateway.tokenizer)
            else:
                ids = truncate(prompt, room, side, gateway.tokenizer, special=special)
        check_not_empty(ids, found.field)
        check_length(ids, limit, found.field)
        rows.append(ids)
    return rows


def check_task(served: ServedModel, task: Task) -> None:
    """Raises `BadRequest` if the model is not served for it."""
    if task in served.tasks:
        return
    fix = {
        "embed": "start the server with --runner pooling, or with --convert embed to have vectors and texts",
        "score": "start the server with --runner pooling, or with --convert classify for a reranker",
        "classify": "serve a model with a head of scores (…ForSequenceClassification)",
        "generate": "start the server with --runner generate",
    }
    raise BadRequest(
        f"model: {served.name!r} is served for {' and '.join(sorted(served.tasks))} alone; {fix[task]}",
        param="model",
        code="unsupported_task",
    )


def pooling_of(body: EmbeddingRequest, served: ServedModel) -> Pooling:
    """Raises `BadRequest`."""
    pooling = served.pooling
    if body.dimensions is not None:
        if served.dimensions and body.dimensions > served.dimensions:
            raise BadRequest(
                f"dimensions: {body.dimensions} is more than the model's {served.dimensions}",
                param="dimensions",
            )
        pooling = replace(pooling, dimensions=body.dimensions)
    normalize = body.use_activation if body.normalize is None else body.normalize
    if normalize is not None:
        pooling = replace(pooling, normalize=normalize)
    return pooling


def _is_packed(body: EmbeddingRequest) -> bool:
    if body.encoding_format not in (None, "float", "base64"):
        raise BadRequest("encoding_format: give float or base64", param="encoding_format")
    return body.encoding_format == "base64"


def _side(body: PoolingFields) -> Side:
    if body.truncation_side not in (None, "left", "right"):
        raise BadRequest("truncation_side: give left or right", param="truncation_side")
    return "left" if body.truncation_side == "left" else "right"
