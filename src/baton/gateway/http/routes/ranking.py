"""POST /rerank, /v1/rerank, /v2/rerank, /score, /v1/score, in vLLM's shapes: Jina's and Cohere's."""

from __future__ import annotations

import time
from typing import Any

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton.gateway.api.pooling import RankingFields
from baton.gateway.generation.generation import Generation
from baton.gateway.http.context import Gateway, identity
from baton.gateway.http.responses import GenerationResponse
from baton.gateway.http.routes.embeddings import check_task, ids_of
from baton.gateway.reading.judging import Scorer, judging, scorer_of
from baton.gateway.reading.reader import Found
from baton.gateway.rendering.pooled import RerankRenderer, ScoreRenderer
from baton.protocol.params.sampling_params import NO_TOKENS

RERANK = ("/rerank", "/v1/rerank", "/v2/rerank")
SCORE = ("/score", "/v1/score")


def ranking_routes(gateway: Gateway) -> list[Route]:
    """Raises `TokenizerError` if the model cannot be asked what it is to be asked."""
    judge = gateway.served.judge
    if judge is None:
        pooling = replace(gateway.served.pooling, normalize=True)
    else:
        pooling = judging(judge, gateway.tokenizer)

    async def start(
        request: Request, body: RankingFields, found: Found
    ) -> tuple[Generation, str, int, Scorer | None]:
        """What `ScoringRenderer` takes."""
        arrived = time.monotonic()
        model = gateway.model_name(body.model)
        who: dict[str, Any] = identity(gateway, request, body)
        check_task(gateway.served, "score")
        gateway.client.check_ready()
        prompts = await ids_of(gateway, body, found)
        generation = gateway.generator.start(
            prompts, NO_TOKENS, **who, arrived=arrived, pooling=pooling, field=found.field
        )
        return generation, model, found.num_queries, scorer_of(gateway.served, body.use_activation)

    async def rerank(request: Request) -> Response:
        body, found = await gateway.read_prompted(request, "rerank")
        started = await start(request, body, found)
        documents = None if body.return_documents is False else found.documents
        renderer = RerankRenderer(*started, documents, body.top_n or 0)
        return GenerationResponse(started[0], renderer, stream=False)

    async def score(request: Request) -> Response:
        body, found = await gateway.read_prompted(request, "score")
        started = await start(request, body, found)
        return GenerationResponse(started[0], ScoreRenderer(*started), stream=False)

    return [
        *(Route(path, rerank, methods=["POST"]) for path in RERANK),
        *(Route(path, score, methods=["POST"]) for path in SCORE),
    ]
