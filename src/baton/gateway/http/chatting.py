"""From a conversation that was read to its generation: what /v1/chat/completions and the APIs that are
translated to it have in common.

A route reads a body (`Gateway.read_prompted`), says under which model's name it answers, and starts the
generation here; how the answer looks is its renderer's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from starlette.requests import Request

from baton.gateway.api.schemas import ChatRequest
from baton.gateway.errors import ApiError, BadRequest
from baton.gateway.generation.costs import fill_logprobs
from baton.gateway.generation.generation import Generation
from baton.gateway.http.context import Gateway, check_room, check_whole, identity
from baton.gateway.parsing.plan import Parsing
from baton.gateway.reading.prompts import Prompt, encode
from baton.gateway.reading.reader import Found
from baton.gateway.reading.truncation import truncated
from baton.protocol.params.sampling_params import SamplingParams, make_params

_CHAT_NAMES: Mapping[str, str] = {}
SKIPPED_TOOLS = b"x-baton-skipped-tools"
_MAX_SKIPPED = 20
"""Kinds in a header."""


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
    names: Mapping[str, str] = _CHAT_NAMES,
) -> Generation:
    """Submits it.  The caller answers with the generation, and closes it (`GenerationResponse` does).

    `arrived`: `time.monotonic()` when the request came.  `limit`, `source`: the API's own names of the field
    that bounds the answer, if chat's have others, and of the one that the prompt comes from.  `shorten`: an
    answer for which the context has no room ends with the context, and is not refused.  `drop_output`: only
    the prompt is to be computed.  `names`: of a chat's fields in the API, for errors of a generation that
    runs.

    Raises `ApiError`, `InvalidParameter`.
    """
    who = identity(gateway, request, body)
    params = chat_params(gateway, body)
    gateway.client.check_ready()
    grammar, field = await gateway.grammar(found)
    named = _named(field, names)
    prompt = chat_prompt(gateway, body, found, limit=limit, source=source, shorten=shorten)
    return await gateway.start(
        [prompt.ids],
        params,
        **who,
        patient=not body.stream,
        arrived=arrived,
        parsing=_parsing(gateway, body, found),
        grammar=grammar,
        grammar_field=field if named is None else named[1],
        drop_output=drop_output,
        shorten=shorten,
        timed=bool(body.timings),
        progress=bool(body.stream and body.return_progress),
    )


def chat_params(gateway: Gateway, body: ChatRequest) -> SamplingParams:
    """How it is sampled.  Raises `BadRequest`, `InvalidParameter`."""
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("top_logprobs: set logprobs to true as well", param="top_logprobs")
    check_whole(body)
    fill_logprobs(body, gateway.served, "top_logprobs", "prompt_logprobs")
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


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """The same error, with an API's names of a chat's fields: chat's name → its own."""
    found = _named(error.param or "", names)
    if found is not None:
        name, error.param = found
        if error.message.startswith(name):
            error.message = names[name] + error.message[len(name) :]
    return error


def _named(field: str, names: Mapping[str, str]) -> tuple[str, str] | None:
    """(which of the names the field has or begins with, the field by its own name)."""
    for name, own in names.items():
        if field == name or field.startswith((f"{name}.", f"{name}[")):
            return name, own + field[len(name) :]
    return None


def skipped_header(found: Found) -> list[tuple[bytes, bytes]]:
    """Kinds of tools that were offered and left out, for the answer's headers."""
    if not found.skipped:
        return []
    kinds = [re.sub(r"[^!-+.-~-]", "?", kind[:60]) for kind in found.skipped[:_MAX_SKIPPED]]
    return [(SKIPPED_TOOLS, ", ".join(kinds).encode())]


def has_short_ids(gateway: Gateway) -> bool:
    """Calls' ids have nine letters and digits, as the model's template wants them."""
    calling = gateway.formats.calling
    return calling is not None and calling.short_ids


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
        demanded=tools.demanded,
    )
    return parsing if parsing.changes_anything else None
