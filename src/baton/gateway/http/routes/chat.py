"""POST /v1/chat/completions."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton.gateway.api.schemas import ChatRequest
from baton.gateway.errors import BadRequest
from baton.gateway.http.context import Gateway, check_room, identity, stream_options
from baton.gateway.http.responses import GenerationResponse
from baton.gateway.parsing.plan import Parsing
from baton.gateway.reading.calling import Function, functions_of, loosened, structure_of
from baton.gateway.reading.prompts import encode
from baton.gateway.reading.reader import Found
from baton.gateway.reading.structured import asked_by, described
from baton.gateway.rendering.chat import ChatOptions, ChatRenderer
from baton.gateway.rendering.formats import TokenNames
from baton.gateway.rendering.formats import encode as encode_json
from baton.gateway.rendering.prompts import rendered
from baton.protocol.sampling_params import SamplingParams, make_params


def chat_routes(gateway: Gateway) -> list[Route]:
    async def chat_completions(request: Request) -> Response:
        arrived = time.monotonic()
        body, found = await gateway.read_prompted(request, "chat")
        model = gateway.model_name(body.model)
        options = stream_options(body)
        who = identity(request, body, gateway.sharing)
        _check(body)
        params = _params(gateway, body)
        gateway.client.check_ready()
        grammar = await _grammar(gateway, body, found)
        (prompt,) = encode(
            found,
            gateway.tokenizer,
            add_special_tokens=bool(body.add_special_tokens),
        )
        name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        check_room(getattr(body, name), name, len(prompt.ids), gateway.served.max_model_len, "messages")
        generation = gateway.generator.start(
            [prompt.ids],
            params,
            **who,
            patient=not body.stream,
            arrived=arrived,
            parsing=_parsing(gateway, body, found),
            grammar=grammar,
        )
        shape = ChatOptions(
            model=model,
            top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            include_reasoning=body.include_reasoning is not False,
            short_ids=gateway.formats.calling is not None and gateway.formats.calling.short_ids,
            prompt_logprobs=body.prompt_logprobs,
            token_ids=bool(body.return_token_ids),
            include_usage=bool(options.include_usage),
            continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
        )
        names = TokenNames(gateway.tokenizer, bool(body.return_tokens_as_token_ids))
        renderer = ChatRenderer(generation, shape, names)
        return GenerationResponse(generation, renderer, stream=bool(body.stream))

    async def render(request: Request) -> Response:
        """The prompt of a conversation, as it would be answered."""
        body, found = await gateway.read_prompted(request, "chat")
        model = gateway.model_name(body.model)
        _check(body)
        params = _params(gateway, body)
        (prompt,) = encode(found, gateway.tokenizer, add_special_tokens=bool(body.add_special_tokens))
        limit = gateway.served.max_model_len
        name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        check_room(getattr(body, name), name, len(prompt.ids), limit, "messages")
        answer = rendered(
            prompt,
            params,
            request_id=body.request_id or request.state.request_id,
            model=model,
            max_model_len=limit,
            stream=bool(body.stream),
        )
        return Response(encode_json(answer), media_type="application/json")

    return [
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/chat/completions/render", render, methods=["POST"]),
    ]


def _check(body: ChatRequest) -> None:
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("top_logprobs: set logprobs to true as well", param="top_logprobs")
    if body.stream and body.prompt_logprobs is not None:
        raise BadRequest("prompt_logprobs: not with stream; set stream to false", param="prompt_logprobs")


async def _grammar(gateway: Gateway, body: ChatRequest, found: Found) -> str:
    """What binds the answers: calls that are demanded, schemas of strict tools, the form of the answer.
    Raises `BadRequest`."""
    asked, tools = asked_by(body), found.tools
    functions = functions_of(tools)

    async def compiled(these: list[Function]) -> str:
        structure = structure_of(
            gateway.formats,
            tools,
            these,
            parallel=body.parallel_tool_calls is not False,
            thinking=found.thinking,
            content=None if asked is None else asked.structure.content,
            budget=_budget(gateway, body),
        )
        if structure is None:
            return ""
        return await gateway.grammar(described(structure, "tools" if asked is None else asked.field))

    try:
        return await compiled(functions)
    except BadRequest:
        # What a schema asks may be more than can be kept; that matters where it was to be.
        loose = loosened(functions, tools)
        if loose == functions:
            raise
    return await compiled(loose)


def _budget(gateway: Gateway, body: ChatRequest) -> int | None:
    """Tokens of reasoning at most.  Raises `BadRequest`."""
    budget = body.thinking_token_budget
    if budget is None or budget < 0:
        return None
    if gateway.formats.thinking is None and not gateway.formats.is_harmony:
        raise BadRequest(
            "thinking_token_budget: how this model writes reasoning is not known; start the server with "
            "--reasoning-parser",
            param="thinking_token_budget",
            code="unsupported_parameter",
        )
    return budget


def _parsing(gateway: Gateway, body: ChatRequest, found: Found) -> Parsing | None:
    """None: the text is the answer."""
    tools, formats = found.tools, gateway.formats
    parsing = Parsing(
        formats=formats,
        thinking=found.thinking,
        calling=tools.wanted,
        tools=frozenset(tools.names),
        types=tools.types,
        parallel=body.parallel_tool_calls is not False,
    )
    return parsing if parsing.changes_anything else None


def _params(gateway: Gateway, body: ChatRequest) -> SamplingParams:
    given = body.sampling()
    given["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
    if body.max_completion_tokens is not None:
        given["max_tokens"] = body.max_completion_tokens
    return make_params(gateway.served.defaults, given, max_tokens=None)
