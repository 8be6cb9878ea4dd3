"""Makes the OpenAPI document: from the table of routes below, the structures that decode
requests (`schemas.py`, with the limits of `fields.py`) and those that describe answers (`answers.py`).

A test compares the table with the routes that there are, and schemathesis sends what the document allows, and
what it does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from baton.gateway.anthropic import answers as anthropic
from baton.gateway.anthropic.schemas import CountTokensRequest, MessagesRequest
from baton.gateway.api import answers, events, orders, pooling, schemas, states
from baton.gateway.http.described import INSTANCE, JSON, PAUSE, Route, Schema, event_schema
from baton.gateway.http.paths import WITHOUT_V1
from baton.gateway.http.rights import RIGHTS
from baton.gateway.responses import answers as responses
from baton.gateway.responses.schemas import ResponsesRequest
from baton.version import __version__

_REF = "#/components/schemas/{name}"
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
        "/v1/responses",
        "Answer a conversation with items",
        responses.ResponseObject,
        ResponsesRequest,
        _GENERATION,
        events=responses.ResponseEvent,
        required=("input",),
        marked=False,
    ),
    Route(
        "post",
        "/v1/responses/input_tokens",
        "How many tokens a conversation has",
        responses.InputTokens,
        ResponsesRequest,
        (404, 503),
        required=("input",),
    ),
    Route(
        "post",
        "/v1/responses/compact",
        "A conversation, shortened to its users' messages and a summary",
        responses.CompactedResponse,
        ResponsesRequest,
        (404, 429, 503),
        required=("input",),
    ),
    Route(
        "get",
        "/v1/responses/{name}",
        "An answer that is kept (--responses-store)",
        responses.ResponseObject,
        errors=(400, 404),
    ),
    Route("delete", "/v1/responses/{name}", "Keep it no more", responses.DeletedResponse, errors=(404,)),
    Route(
        "get",
        "/v1/responses/{name}/input_items",
        "What it was given to",
        responses.ItemList,
        errors=(400, 404),
        query=(
            ("after", {"type": "string"}, "Those after this id."),
            ("limit", {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}, "So many at most."),
            ("order", {"enum": ["asc", "desc"], "default": "desc"}, "desc: the newest first."),
        ),
    ),
    Route(
        "post",
        "/v1/messages",
        "Answer a conversation: Anthropic's Messages API",
        anthropic.MessageAnswer,
        MessagesRequest,
        _GENERATION,
        events=anthropic.MessageEvent,
        required=("max_tokens", "messages"),
        marked=False,
        error=anthropic.MessagesError,
    ),
    Route(
        "post",
        "/v1/messages/count_tokens",
        "Tokens of a conversation, without an answer",
        anthropic.TokensCounted,
        CountTokensRequest,
        (404, 503),
        required=("messages",),
        error=anthropic.MessagesError,
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
    Route(
        "get",
        "/v1/models",
        "The names under which the model is served; with a header anthropic-version in Anthropic's shape",
        answers.ModelList,
    ),
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
    Route("get", "/tokenizer_info", "tokenizer_config.json, with the chat template in use", dict[str, Any]),
    Route("get", "/", "That a server is here, and a page for people", "text/plain, text/html"),
    Route("get", "/load", "How many requests are being answered", answers.ServerLoad),
    Route("get", "/ping", "As /health", answers.Health),
    Route("post", "/ping", "As /health", answers.Health),
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
    Route("get", "/stats", "What engines count", dict[str, Any], errors=(404, 503), query=INSTANCE),
    Route("get", "/debug/ledger", "Who holds KV blocks", dict[str, Any], errors=(404, 503), query=INSTANCE),
    Route("get", "/debug/memory", "What the memory of the server's processes is used for", states.MemoryUse),
    Route("get", "/debug/overview", "Instances, totals and open requests", states.Overview),
    Route("get", "/ui", "A page for operators", "text/html"),
    Route("get", "/ui/events", "What it shows, as events", "text/event-stream", errors=(429,)),
    Route("get", "/debug/requests", events.ABOUT, events.Requests, errors=(400, 404), query=events.WHICH),
    Route("get", "/debug/timeline", events.TRACE, events.Trace, errors=(400, 404), query=events.WHEN),
    Route("post", "/pause", "Stop all instances", states.Paused, errors=(400, 409, 503), query=PAUSE),
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
    kinds: list[Any] = []
    for route in ROUTES:
        kinds.append(route.error)
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
            "would change the answer. Every answer has the header X-Request-Id. A key is sent as a bearer or "
            "in the header x-api-key. Of the paths with /v1 the common ones are served without it, too "
            f"({', '.join('/' + path for path in WITHOUT_V1)}).",
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


def _describe_body(component: Schema, required: tuple[str, ...]) -> None:
    """A field that must be given is not null either; the decoder leaves that to the route, which names it."""
    component["required"] = list(required)
    for name, schema in component["properties"].items():
        schema.pop("default", None)
        members = schema.get("anyOf", ())
        if name in required and {"type": "null"} in members:
            members.remove({"type": "null"})
            if len(members) == 1:
                component["properties"][name] = members[0]


def _operation(route: Route, known: Mapping[int, Schema]) -> dict[str, Any]:
    right = RIGHTS[route.path]
    statuses = set(route.errors)
    if right != "open":
        statuses |= {401, 403}
    if route.method in ("post", "put"):
        statuses |= {415}
    if route.body is not None:
        statuses |= {400, 408, 413}
    if isinstance(route.answer, str):
        content: dict[str, Any] = {
            media: {"schema": {"type": "string"}} for media in route.answer.split(", ")
        }
    else:
        content = {JSON: {"schema": known[id(route.answer)]}}
    if route.events is not None:
        shape = event_schema(known[id(route.events)], known[id(route.error)], route.marked)
        content["text/event-stream"] = {"schema": shape}
    statuses_told: dict[str, Any] = {"200": {"description": "Done", "content": content}}
    error = known[id(route.error)]
    for status in sorted(statuses):
        statuses_told[str(status)] = {
            "description": _ERRORS[status],
            "content": {JSON: {"schema": error}},
        }
    for status, kind in route.other.items():
        statuses_told[str(status)] = {
            "description": "See `reason`",
            "content": {JSON: {"schema": known[id(kind)]}},
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
        "tags": [{"open": "open", "user": "users"}.get(right, "operators")],
        "responses": statuses_told,
    }
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {JSON: {"schema": known[id(route.body)]}},
        }
    if right != "open":
        operation["security"] = [{"key": []}, {}]
    return operation
