"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton.gateway.http.context import Gateway
from baton.gateway.reading.prompts import encode
from baton.gateway.rendering import formats
from baton.gateway.text.tokenizer import Tokenizer
from baton.protocol.codec import unpack_int32

_NAMES_A_TURN = 4096
"""Tokens whose names are looked up in one turn of the event loop."""


def token_routes(gateway: Gateway) -> list[Route]:
    tokenizer = gateway.tokenizer
    limit = gateway.served.max_model_len

    async def tokenize(request: Request) -> Response:
        body, found = await gateway.read_prompted(request, "tokenize")
        gateway.model_name(body.model)
        default = found.field == "prompt"
        add_special_tokens = default if body.add_special_tokens is None else body.add_special_tokens
        (prompt,) = encode(found, tokenizer, add_special_tokens=add_special_tokens)
        ids = list(prompt.ids)
        answer = {
            "count": len(ids),
            "max_model_len": limit,
            "tokens": ids,
            "token_strs": await _names(tokenizer, ids) if body.return_token_strs else None,
        }
        return Response(formats.encode(answer), media_type="application/json")

    async def detokenize(request: Request) -> Response:
        body, found = await gateway.read_prompted(request, "detokenize")
        gateway.model_name(body.model)
        found.check()
        if found.texts:  # it was long, and decoded where it was read
            (text,) = found.texts
        else:
            text = tokenizer.decode(unpack_int32(found.ids[0]), skip_special_tokens=False)
        return Response(formats.encode({"prompt": text}), media_type="application/json")

    async def tokenizer_info(_: Request) -> Response:
        """What its files say, and the template that is used here."""
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.config}
        answer = {**config, "chat_template": tokenizer.template_source}
        return Response(formats.encode(answer), media_type="application/json")

    return [
        Route("/tokenizer_info", tokenizer_info),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
    ]


async def _names(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str | None]:
    names: list[str | None] = []
    for first in range(0, len(ids), _NAMES_A_TURN):
        names += map(tokenizer.token, ids[first : first + _NAMES_A_TURN])
        await asyncio.sleep(0)
    return names
