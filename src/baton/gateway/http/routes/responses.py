"""POST /v1/responses and what belongs to it: answers that are kept, and counting tokens."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton.gateway.errors import ApiError, BadRequest, NotFound
from baton.gateway.generation.generation import Generation
from baton.gateway.http.chatting import chat_params, has_short_ids, renamed, skipped_header, start_chat
from baton.gateway.http.context import Gateway
from baton.gateway.http.responses import GenerationResponse
from baton.gateway.reading.jobs import Job, Translated
from baton.gateway.reading.prompts import encode
from baton.gateway.reading.reader import Found
from baton.gateway.rendering.compaction import CompactionRenderer
from baton.gateway.rendering.formats import TokenNames, in_turns
from baton.gateway.rendering.responses import Keep, ResponsesOptions, ResponsesRenderer
from baton.gateway.responses.store import Kept, Run
from baton.gateway.responses.translation import NAMES, Known, ReadResponses

_PAGE = 20
_MAX_PAGE = 100
"""Items of a list."""


def responses_routes(gateway: Gateway) -> list[Route]:
    store = gateway.responses

    async def create(request: Request) -> Response:
        arrived = time.monotonic()
        try:
            (body, chat), found, before = await _read(gateway, request)
            model = gateway.model_name(chat.model)
            params = chat_params(gateway, chat)
            generation = await start_chat(
                gateway,
                request,
                chat,
                found,
                arrived=arrived,
                limit="max_output_tokens",
                source="input",
                names=NAMES,
            )
        except ApiError as error:
            raise renamed(error, NAMES) from None
        options = ResponsesOptions(
            token=secrets.token_hex(16),
            model=model,
            said=body.said,
            temperature=params.temperature,
            top_p=params.top_p,
            stream=bool(chat.stream),
            encrypted=body.encrypted,
            top_logprobs=(chat.top_logprobs or 0) if body.logprobs else None,
            short_ids=has_short_ids(gateway),
            timings=bool(chat.timings),
            custom=frozenset(found.tools.custom),
            names=body.names,
        )
        keep = _keeper(gateway, request, body, options, before) if body.keeps else None
        names = TokenNames(gateway.tokenizer, as_ids=False)
        renderer = ResponsesRenderer(generation, options, names, keep)
        progress = bool(chat.return_progress)
        return ItemsResponse(generation, renderer, options.stream, progress, skipped_header(found))

    async def count(request: Request) -> Response:
        """How many tokens the prompt has."""
        try:
            (_, chat), found, _ = await _read(gateway, request)
            gateway.model_name(chat.model)
            chat_params(gateway, chat)
            (prompt,) = encode(found, gateway.tokenizer, add_special_tokens=False)
        except ApiError as error:
            raise renamed(error, NAMES) from None
        return _json({"object": "response.input_tokens", "input_tokens": len(prompt.ids)})

    async def compact(request: Request) -> Response:
        """A conversation that is shortened, by the model."""
        arrived = time.monotonic()
        try:
            (body, chat), found, _ = await _read(gateway, request, "compact")
            gateway.model_name(chat.model)
            generation = await start_chat(
                gateway,
                request,
                chat,
                found,
                arrived=arrived,
                limit="max_output_tokens",
                source="input",
                shorten=True,
                names=NAMES,
            )
        except ApiError as error:
            raise renamed(error, NAMES) from None
        renderer = CompactionRenderer(generation, secrets.token_hex(16), body.items)
        return GenerationResponse(generation, renderer, stream=False)

    async def retrieve(request: Request) -> Response:
        kept = _kept(gateway, request)
        if request.query_params.get("stream") == "true":
            raise BadRequest(
                "stream: an answer that is kept is given as a whole; leave it out", param="stream"
            )
        return Response(kept.body, media_type="application/json")

    async def delete(request: Request) -> Response:
        _kept(gateway, request)
        id = request.path_params["name"]
        store.delete(_owner(request), id)
        return _json({"id": id, "object": "response", "deleted": True})

    async def input_items(request: Request) -> Response:
        return _listed(_kept(gateway, request), request)

    path = "/v1/responses/{name}"
    return [
        Route("/v1/responses", create, methods=["POST"]),
        Route("/v1/responses/input_tokens", count, methods=["POST"]),
        Route("/v1/responses/compact", compact, methods=["POST"]),
        Route(path, retrieve, methods=["GET"]),
        Route(path, delete, methods=["DELETE"]),
        Route(path + "/input_items", input_items, methods=["GET"]),
    ]


class ItemsResponse(GenerationResponse):
    """Its items come in the order in which the model says them, also as a whole."""

    def __init__(
        self,
        generation: Generation,
        renderer: ResponsesRenderer,
        stream: bool,
        progress: bool,
        headers: Sequence[tuple[bytes, bytes]],
    ) -> None:
        super().__init__(generation, renderer, stream=stream, progress=progress, headers=headers)
        self._items = renderer

    async def _whole(self) -> bytes:
        generation, renderer = self._generation, self._items
        try:
            while not generation.done:
                updates = await generation.next()
                await in_turns(part for update in updates for part in renderer.parts(update))
        finally:
            generation.close()
        return await in_turns(renderer.whole([]))


async def _read(
    gateway: Gateway, request: Request, job: Job = "responses"
) -> tuple[Translated, Found, Sequence[Run]]:
    """(the body, its prompt, the conversation before it).  Raises `ApiError` in a chat's names."""
    owner, store = _owner(request), gateway.responses
    runs: Sequence[Run] = ()

    def known(body: ReadResponses) -> bytes | None:
        nonlocal runs
        if body.said:
            return None
        history: list[bytes] = []
        if body.previous is not None:
            before = store.get(owner, body.previous)
            if before is None:
                raise BadRequest(
                    f"previous_response_id: there is no answer {body.previous[:100]!r} here (any more); send "
                    "the whole conversation in input",
                    param="previous_response_id",
                    code="previous_response_not_found",
                )
            history, runs = before.conversation, before.runs
        references: dict[str, bytes] = {}
        for id in body.needs:
            item = store.item(owner, id)
            if item is None:
                raise BadRequest(
                    f"input: there is no item {id[:100]!r} here (any more); send the item itself",
                    param="input",
                    code="item_not_found",
                )
            references[id] = item
        return msgspec.msgpack.encode(Known(history, references))

    read, found = await gateway.read_prompted(request, job, known)
    found.check()
    return read, found, runs


def _keeper(
    gateway: Gateway,
    request: Request,
    body: ReadResponses,
    options: ResponsesOptions,
    before: Sequence[Run],
) -> Keep:
    owner, store = _owner(request), gateway.responses
    given = [(id, item.encode()) for id, item in body.items]

    def keep(response: bytes, said: list[tuple[str, bytes]]) -> bool:
        return store.add(owner, f"resp_{options.token}", response, before, given, said)

    return keep


def _owner(request: Request) -> str:
    """The id of the key that was sent; without keys all are one."""
    return str(getattr(request.state, "key_id", ""))


def _kept(gateway: Gateway, request: Request) -> Kept:
    id = request.path_params["name"]
    kept = gateway.responses.get(_owner(request), id)
    if kept is None:
        why = "" if gateway.responses.keeps else "; start the server with --responses-store N to keep answers"
        raise NotFound(f"there is no answer {id[:100]!r} here{why}", code="not_found")
    return kept


def _listed(kept: Kept, request: Request) -> Response:
    """OpenAI's list, with its parameters.  Raises `BadRequest`."""
    query = request.query_params
    order, after = query.get("order", "desc"), query.get("after")
    if order not in ("asc", "desc"):
        raise BadRequest(f"order: {order[:50]!r} must be asc or desc", param="order")
    limit = query.get("limit", str(_PAGE))
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= _MAX_PAGE):
        raise BadRequest(f"limit: must be from 1 to {_MAX_PAGE}", param="limit")
    items: Sequence[tuple[str, bytes]] = kept.input
    items = items if order == "asc" else items[::-1]
    if after is not None:
        places = [number for number, (id, _) in enumerate(items) if id == after]
        if not places:
            raise BadRequest(f"after: there is no item {after[:100]!r}", param="after")
        items = items[places[0] + 1 :]
    page = items[: int(limit)]
    return _json(
        {
            "object": "list",
            "data": [msgspec.Raw(data) for _, data in page],
            "first_id": page[0][0] if page else None,
            "last_id": page[-1][0] if page else None,
            "has_more": len(items) > len(page),
        }
    )


def _json(value: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
