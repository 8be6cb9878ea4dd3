"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API, as a chat."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton.gateway.anthropic.translation import NAMES
from baton.gateway.errors import BadRequest
from baton.gateway.http.chatting import has_short_ids, renamed, skipped_header, start_chat
from baton.gateway.http.context import Gateway
from baton.gateway.http.responses import GenerationResponse
from baton.gateway.reading.prompts import encode
from baton.gateway.rendering.formats import encode as encode_json
from baton.gateway.rendering.messages import MessageOptions, MessageRenderer


def message_routes(gateway: Gateway) -> list[Route]:
    async def messages(request: Request) -> Response:
        arrived = time.monotonic()
        (body, chat), found = await gateway.read_prompted(request, "messages")
        model = gateway.model_name(body.model)
        if body.max_tokens is None:
            raise BadRequest(
                "max_tokens: it is missing; give how many tokens the answer may have", param="max_tokens"
            )
        chat.max_tokens = body.max_tokens or 1
        try:
            generation = await start_chat(
                gateway,
                request,
                chat,
                found,
                arrived=arrived,
                shorten=True,
                drop_output=not body.max_tokens,  # (0: the prefix cache is to be filled)
                names=NAMES,
            )
        except BadRequest as error:
            raise renamed(error, NAMES) from None
        thinking = chat.include_reasoning is not False
        options = MessageOptions(
            model=model,
            max_tokens=body.max_tokens,
            thinking=thinking,
            omitted=thinking and body.thinking is not None and body.thinking.display == "omitted",
            short_ids=has_short_ids(gateway),
            timings=bool(body.timings),
        )
        renderer = MessageRenderer(generation, options)
        return GenerationResponse(
            generation,
            renderer,
            stream=bool(body.stream),
            progress=bool(body.return_progress),
            headers=skipped_header(found),
        )

    async def count_tokens(request: Request) -> Response:
        (body, chat), found = await gateway.read_prompted(request, "count_tokens")
        gateway.model_name(body.model)
        (prompt,) = encode(found, gateway.tokenizer, add_special_tokens=bool(chat.add_special_tokens))
        return Response(encode_json({"input_tokens": len(prompt.ids)}), media_type="application/json")

    return [
        Route("/v1/messages", messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    ]
