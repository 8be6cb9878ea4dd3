"""From a conversation that was read to its generation: what /v1/chat/completions and the APIs that are
translated to it have in common.

A route reads a body (`Gateway.read_prompted`), says under which model's name it answers, and starts the
generation here; how the answer looks is its renderer's.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request

from baton.gateway.api.schemas import ChatRequest
from baton.gateway.errors import BadRequest
from baton.gateway.generation.generation import Generation
from baton.gateway.http.context import Gateway, check_room, check_whole, identity
from baton.gateway.parsing.plan import Parsing
from baton.gateway.reading.calling import Function, functions_of, loosened, structure_of
from baton.gateway.reading.prompts import Prompt, encode
from baton.gateway.reading.reader import Found
from baton.gateway.reading.structured import asked_by, described
from baton.gateway.reading.truncation import truncated
from baton.protocol.sampling_params import SamplingParams, make_params


async def start_chat(
    gateway: Gateway,
    request: Request,
    body: ChatRequest,
    found: Found,
    *,
    arrived: float,
    limit: str | None = None,
    source: str = "messages",
    shorten: bool = False,
    drop_output: bool = False,
) -> Generation:
    """Submits it.  The caller answers with the generation, and closes it (`GenerationResponse` does).

    `arrived`: `time.monotonic()` when the request came.  `limit`, `source`: the API's own names of the field
    that bounds the answer, if chat's have others, and of the one that the prompt comes from.  `shorten`: an
    answer for which the context has no room ends with the context, and is not refused.  `drop_output`: only
    the prompt is to be computed.

    Raises `ApiError`, `InvalidParameter`.
    """
    who = identity(request, body, gateway.sharing)
    params = chat_params(gateway, body)
    gateway.client.check_ready()
    grammar = await _grammar(gateway, body, found)
    prompt = chat_prompt(gateway, body, found, limit=limit, source=source, shorten=shorten)
    return gateway.generator.start(
        [prompt.ids],
        params,
        **who,
        patient=not body.stream,
        arrived=arrived,
        parsing=_parsing(gateway, body, found),
        grammar=grammar,
        drop_output=drop_output,
        shorten=shorten,
    )


def chat_params(gateway: Gateway, body: ChatRequest) -> SamplingParams:
    """How it is sampled.  Raises `BadRequest`, `InvalidParameter`."""
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("top_logprobs: set logprobs to true as well", param="top_logprobs")
    check_whole(body)
    given = body.sampling()
    given["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
    if body.max_completion_tokens is not None:
        given["max_tokens"] = body.max_completion_tokens
    return make_params(gateway.served.defaults, given, max_tokens=None)


def chat_prompt(
    gateway: Gateway,
    body: ChatRequest,
    found: Found,
    *,
    limit: str | None = None,
    source: str = "messages",
    shorten: bool = False,
) -> Prompt:
    """What is generated from; the context has room for it and for the answer.  Raises `BadRequest`.

    `limit`, `source`, `shorten`: as of `start_chat`.
    """
    special = bool(body.add_special_tokens)
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    asked: int | None = None if shorten else getattr(body, name)
    (prompt,) = truncated(
        encode(found, gateway.tokenizer, add_special_tokens=special),
        body.truncate_prompt_tokens,
        body.truncation_side,
        gateway.tokenizer,
        limit=gateway.served.max_model_len,
        answer=asked or 0,
        special=special,
    )
    check_room(asked, limit or name, len(prompt.ids), gateway.served.max_model_len, source)
    return prompt


def renamed(error: BadRequest, names: Mapping[str, str]) -> BadRequest:
    """An error about a chat's field in the words of an API that has other names: chat's name → its own."""
    param = error.param or ""
    for name, own in names.items():
        if param == name or param.startswith(f"{name}."):
            message = error.message
            if message.startswith(name):
                message = own + message[len(name) :]
            return BadRequest(message, param=own + param[len(name) :], code=error.code)
    return error


def has_short_ids(gateway: Gateway) -> bool:
    """Calls' ids have nine letters and digits, as the model's template wants them."""
    calling = gateway.formats.calling
    return calling is not None and calling.short_ids


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
