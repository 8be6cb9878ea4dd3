"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import Response

from baton.gateway.errors import BadRequest
from baton.gateway.formats import encode
from baton.gateway.prompts import read_chat, read_prompts
from baton.gateway.schemas import DetokenizeRequest, TokenizeRequest
from baton.gateway.state import Gateway

_MANY_TOKENS = 4096
"""More are decoded outside of the event loop."""


def token_routes(gateway: Gateway) -> APIRouter:
    router = APIRouter()
    tokenizer = gateway.tokenizer
    limit = gateway.served.max_model_len
    vocab_size = gateway.served.vocab_size or 1 << 31

    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = await gateway.read(request, TokenizeRequest)
        gateway.model_name(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise BadRequest("prompt: give either prompt or messages", param="prompt")
        if body.prompt is not None:
            add_special_tokens = body.add_special_tokens is not False
            prompts = await read_prompts(
                body.prompt, tokenizer, max_model_len=limit, add_special_tokens=add_special_tokens
            )
            ids = prompts[0].ids
        else:
            add_special_tokens = bool(body.add_special_tokens)
            prompt = await read_chat(
                body, tokenizer, max_model_len=limit, add_special_tokens=add_special_tokens
            )
            ids = prompt.ids
        answer = {
            "count": len(ids),
            "max_model_len": limit,
            "tokens": ids,
            "token_strs": [tokenizer.token(token) for token in ids] if body.return_token_strs else None,
        }
        return Response(encode(answer), media_type="application/json")

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = await gateway.read(request, DetokenizeRequest)
        gateway.model_name(body.model)
        if body.tokens is None:
            raise BadRequest("tokens: it is missing; give a list of token ids", param="tokens")
        ids = body.tokens
        if ids and (min(ids) < 0 or max(ids) >= vocab_size):
            raise BadRequest(f"tokens: token ids must be from 0 to {vocab_size - 1}", param="tokens")
        if len(ids) <= _MANY_TOKENS:
            text = tokenizer.decode(ids, skip_special_tokens=False)
        else:
            text = await asyncio.to_thread(tokenizer.decode, ids, skip_special_tokens=False)
        return Response(encode({"prompt": text}), media_type="application/json")

    return router
