"""POST /v1/chat/completions."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton.gateway.http.chatting import chat_params, chat_prompt, has_short_ids, skipped_header, start_chat
from baton.gateway.http.context import Gateway, stream_options
from baton.gateway.http.responses import GenerationResponse
from baton.gateway.rendering.chat import ChatOptions, ChatRenderer
from baton.gateway.rendering.formats import TokenNames
from baton.gateway.rendering.formats import encode as encode_json
from baton.gateway.rendering.prompts import rendered


def chat_routes(gateway: Gateway) -> list[Route]:
    async def chat_completions(request: Request) -> Response:
        arrived = time.monotonic()
        body, found = await gateway.read_prompted(request, "chat")
        model = gateway.model_name(body.model)
        options = stream_options(body)
        generation = await start_chat(gateway, request, body, found, arrived=arrived)
        shape = ChatOptions(
            model=model,
            top_logprobs=len(body.logprob_token_ids or ()) or body.top_logprobs or 0
            if body.logprobs
            else None,
            echo=found.echo,
            include_reasoning=body.include_reasoning is not False,
            short_ids=has_short_ids(gateway),
            custom=frozenset(found.tools.custom),
            prompt_logprobs=body.prompt_logprobs,
            token_ids=bool(body.return_token_ids),
            routed_experts=bool(body.return_routed_experts),
            include_usage=bool(options.include_usage),
            continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
            timings=bool(body.timings),
        )
        names = TokenNames(gateway.tokenizer, bool(body.return_tokens_as_token_ids))
        renderer = ChatRenderer(generation, shape, names)
        return GenerationResponse(
            generation,
            renderer,
            stream=bool(body.stream),
            progress=bool(body.return_progress),
            headers=skipped_header(found),
        )

    async def render(request: Request) -> Response:
        """The prompt of a conversation, as it would be answered."""
        body, found = await gateway.read_prompted(request, "chat")
        model = gateway.model_name(body.model)
        params = chat_params(gateway, body)
        answer = rendered(
            chat_prompt(gateway, body, found),
            params,
            request_id=body.request_id or request.state.request_id,
            model=model,
            max_model_len=gateway.served.max_model_len,
            stream=bool(body.stream),
        )
        return Response(encode_json(answer), media_type="application/json")

    return [
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/chat/completions/render", render, methods=["POST"]),
    ]
