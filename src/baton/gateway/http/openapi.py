"""Makes the OpenAPI document: from the table of routes below, the structures that decode
requests (`schemas.py`, with the limits of `fields.py`) and those that describe answers (`answers.py`).

A test compares the table with the routes that there are, and schemathesis sends what the document allows, and
what it does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from baton.gateway.api import answers, orders, pooling, schemas, states
from baton.gateway.generation.pausing import PAUSE_MODES
from baton.gateway.http.rights import RIGHTS
from baton.version import __version__

_Schema = dict[str, Any]
_REF = "#/components/schemas/{name}"
_JSON = "application/json"


class Route(NamedTuple):
    """One method of one path."""

    method: str
    path: str
    """As it is declared; see `RIGHTS`."""
    summary: str
    answer: Any
    """Type of the body of a 200; a media type if it is not JSON."""
    body: type[msgspec.Struct] | None = None
    errors: tuple[int, ...] = ()
    """Statuses besides those that the path's right, and a body, bring with them."""
    query: tuple[tuple[str, _Schema, str], ...] = ()
    """(name, schema, what it means) of parameters of the query."""
    events: type[msgspec.Struct] | None = None
    """With `stream`: what the `data` of each event is."""
    required: tuple[str, ...] = ()
    """Fields of the body that must be given."""
    other: Mapping[int, Any] = {}
    """Statuses whose body is no `Error`."""


_INSTANCE = (("instance", {"type": "string"}, "One instance; default: all."),)
_PAUSE: tuple[tuple[str, _Schema, str], ...] = (
    (
        "mode",
        {"enum": list(PAUSE_MODES), "default": "abort"},
        "What running requests see: abort: they end at once with what they have; wait: they end first; "
        "keep: they stand still and go on with /resume.",
    ),
    (
        "clear_cache",
        {"enum": ["true", "false", "1", "0"]},
        "Forget the prefix cache. Default: true, with mode keep false.",
    ),
    (
        "wait_for_inflight_requests",
        {"enum": ["true", "false", "1", "0"]},
        "true: mode wait. vLLM's older name.",
    ),
    (
        "timeout_s",
        {"type": "number", "exclusiveMinimum": 0, "maximum": 86400, "default": 1800},
        "With mode wait: how long; nothing is paused after that.",
    ),
    (
        "resume_after_s",
        {"type": "number", "exclusiveMinimum": 0, "maximum": 86400},
        "The pause ends by itself. Default: it lasts until /resume.",
    ),
)
_GENERATION = (404, 429, 500, 503)

ROUTES: tuple[Route, ...] = (
    Route(
        "post",
        "/v1/chat/completions",
        "Answer a conversation",
        answers.ChatCompletion,
        schemas.ChatRequest,
        _GENERATION,
        events=answers.ChatCompletionChunk,
        required=("messages",),
    ),
    Route(
        "post",
        "/v1/completions",
        "Complete texts",
        answers.Completion,
        schemas.CompletionRequest,
        _GENERATION,
        events=answers.CompletionChunk,
        required=("prompt",),
    ),
    Route(
        "post",
        "/v1/chat/completions/render",
        "The prompt of a conversation, without an answer",
        answers.Rendered,
        schemas.ChatRequest,
        (404, 503),
        required=("messages",),
    ),
    Route(
        "post",
        "/v1/completions/render",
        "The prompts of texts, without an answer",
        list[answers.Rendered],
        schemas.CompletionRequest,
        (404, 503),
        required=("prompt",),
    ),
    Route(
        "post",
        "/v1/embeddings",
        "Vectors of texts",
        answers.Embeddings,
        pooling.EmbeddingRequest,
        _GENERATION,
        required=("input",),
    ),
    Route(
        "post",
        "/classify",
        "Labels of texts",
        answers.Classified,
        pooling.ClassifyRequest,
        _GENERATION,
        required=("input",),
    ),
    *(
        Route(
            "post",
            path,
            "Documents by how well they fit a query",
            answers.Reranked,
            pooling.RerankRequest,
            _GENERATION,
            required=("query", "documents"),
        )
        for path in ("/v1/rerank", "/v2/rerank", "/rerank")
    ),
    *(
        Route(
            "post",
            path,
            "How well pairs of texts fit",
            answers.Scores,
            pooling.ScoreRequest,
            _GENERATION,
        )
        for path in ("/v1/score", "/score")
    ),
    Route("get", "/v1/models", "The names under which the model is served", answers.ModelList),
    Route("get", "/v1/models/{name:path}", "One of them", answers.ModelCard, errors=(404,)),
    Route(
        "post",
        "/tokenize",
        "Token ids of a text or of a conversation",
        answers.Tokens,
        schemas.TokenizeRequest,
        (404, 503),
    ),
    Route(
        "post",
        "/detokenize",
        "The text of token ids",
        answers.Text,
        schemas.DetokenizeRequest,
        (404, 503),
        required=("tokens",),
    ),
    Route("get", "/health", "The server is alive, whether or not it can serve", answers.Health),
    Route(
        "get",
        "/ready",
        "A request would be served now",
        answers.Ready,
        other={503: answers.NotReady},
    ),
    Route("get", "/version", "Baton's version", answers.Version),
    Route("get", "/server_info", "How the server was started: every flag's value", answers.ServerInfo),
    Route("get", "/metrics", "Prometheus: vLLM's names with the prefix baton:", "text/plain"),
    Route("get", "/openapi.json", "This document", dict[str, Any]),
    Route("get", "/docs", "This document, to be read", "text/html"),
    Route("get", "/stats", "What engines count", dict[str, Any], errors=(404, 503), query=_INSTANCE),
    Route("get", "/debug/ledger", "Who holds KV blocks", dict[str, Any], errors=(404, 503), query=_INSTANCE),
    Route("get", "/debug/memory", "What the memory of the server's processes is used for", states.MemoryUse),
    Route("post", "/pause", "Stop all instances", states.Paused, errors=(400, 409, 503), query=_PAUSE),
    Route("post", "/resume", "Let them go on", states.Resumed, errors=(503,)),
    Route("get", "/is_paused", "Whether they stand still, and since when", states.PauseStatus),
    Route("post", "/reset_prefix_cache", "Forget cached prefixes", dict[str, Any], errors=(503,)),
    Route(
        "post",
        "/update_weights",
        "Other weights of the same model, on all instances or none; running requests go on",
        dict[str, Any],
        orders.UpdateWeightsRequest,
        (409, 503),
        required=("path",),
    ),
    Route(
        "post",
        "/start_profile",
        "Record what steps spend their time on",
        dict[str, Any],
        orders.StartProfileRequest,
        (409, 503),
        required=("directory",),
    ),
    Route("post", "/stop_profile", "Write the record", dict[str, Any], errors=(400, 409, 503)),
    Route("get", "/cluster/instances", "How the instances stand", states.Instances),
    Route("get", "/cluster/instances/{name}", "How one stands", states.Instance, errors=(404,)),
    Route(
        "put",
        "/cluster/instances/{name}",
        "An instance joins; the same again within ttl_s: it still lives",
        states.Instance,
        orders.JoinRequest,
        (409, 429, 503),
        required=("endpoint", "incarnation", "ttl_s"),
    ),
    Route(
        "post",
        "/cluster/instances/{name}",
        "Another label; draining or active",
        states.Instance,
        orders.InstanceRequest,
        (404,),
    ),
    Route(
        "delete",
        "/cluster/instances/{name}",
        "An instance that joined leaves at once; what runs there goes on elsewhere",
        states.Gone,
        errors=(404, 409),
    ),
)

_ERRORS = {
    400: "A field cannot be served: the message names it and the fix",
    401: "The key is missing or wrong",
    403: "For operators, or a page of another origin asks",
    404: "There is no such thing",
    408: "The body came too slowly",
    409: "Something that excludes it is under way",
    413: "The body is too large",
    415: "The body is not application/json",
    429: "The queue is full; see Retry-After",
    500: "The instance failed on this request",
    503: "No instance can serve now; see Retry-After",
}


def make_document() -> dict[str, Any]:
    """OpenAPI 3.1."""
    kinds: list[Any] = [answers.Error]
    for route in ROUTES:
        kinds += [kind for kind in (route.body, route.events, *route.other.values()) if kind is not None]
        if not isinstance(route.answer, str):
            kinds.append(route.answer)
    shapes, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    known = {id(kind): shape for kind, shape in zip(kinds, shapes, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(public_path(route.path), {})[route.method] = _operation(route, known)
        if route.body is not None:
            _describe_body(components[route.body.__name__], route.required)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Baton",
            "version": __version__,
            "description": "OpenAI's API with vLLM's extensions. Fields that are null were not given; those "
            "that are not listed are ignored, with a line in the server's log, or refused by name if they "
            "would change the answer. Every answer has the header X-Request-Id.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def public_path(path: str) -> str:
    """Without the name of a converter."""
    return path.replace("{name:path}", "{name}")


def _describe_body(component: _Schema, required: tuple[str, ...]) -> None:
    """A field that must be given is not null either; the decoder leaves that to the route, which names it."""
    component["required"] = list(required)
    for name, schema in component["properties"].items():
        schema.pop("default", None)
        members = schema.get("anyOf", ())
        if name in required and {"type": "null"} in members:
            members.remove({"type": "null"})
            if len(members) == 1:
                component["properties"][name] = members[0]


def _event(chunk: _Schema, error: _Schema) -> _Schema:
    """Of each event of a stream (OpenAPI before 3.2 has no word for that)."""
    name = chunk["$ref"].rsplit("/", 1)[1]
    return {
        "type": "object",
        "description": f"With stream. Each event's data is a {name}, or an Error, which is the last then; "
        "after the last chunk it is [DONE].",
        "properties": {
            "data": {
                "anyOf": [
                    {"const": "[DONE]"},
                    {
                        "type": "string",
                        "contentMediaType": _JSON,
                        "contentSchema": {"anyOf": [chunk, error]},
                    },
                ]
            }
        },
        "required": ["data"],
    }


def _operation(route: Route, known: Mapping[int, _Schema]) -> dict[str, Any]:
    right = RIGHTS[route.path]
    statuses = set(route.errors)
    if right != "open":
        statuses |= {401, 403}
    if route.method in ("post", "put"):
        statuses |= {415}
    if route.body is not None:
        statuses |= {400, 408, 413}
    if isinstance(route.answer, str):
        content: dict[str, Any] = {route.answer: {"schema": {"type": "string"}}}
    else:
        content = {_JSON: {"schema": known[id(route.answer)]}}
    if route.events is not None:
        content["text/event-stream"] = {"schema": _event(known[id(route.events)], known[id(answers.Error)])}
    responses: dict[str, Any] = {"200": {"description": "Done", "content": content}}
    error = known[id(answers.Error)]
    for status in sorted(statuses):
        responses[str(status)] = {
            "description": _ERRORS[status],
            "content": {_JSON: {"schema": error}},
        }
    for status, kind in route.other.items():
        responses[str(status)] = {
            "description": "See `reason`",
            "content": {_JSON: {"schema": known[id(kind)]}},
        }
    parameters = [
        {"name": name, "in": "query", "required": False, "schema": schema, "description": text}
        for name, schema, text in route.query
    ]
    if "{name" in route.path:
        parameters.insert(
            0, {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        )
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": f"{route.method} {public_path(route.path)}",
        "tags": [{"open": "open", "user": "users", "operator": "operators"}[right]],
        "responses": responses,
    }
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {_JSON: {"schema": known[id(route.body)]}},
        }
    if right != "open":
        operation["security"] = [{"key": []}, {}]
    return operation
