"""The HTTP application: OpenAI's API on a cluster of instances.

`create_app` puts the parts together; what happens to a request is in `routes/`, how errors look in
`errors.py` and `middleware.py`.  Nothing here starts or watches instances: their supervisors do, on
the same event loop, through the `ClusterClient`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ExceptionHandler, Receive, Scope, Send

from baton.gateway.access import Access
from baton.gateway.errors import ApiError, BadRequest, MethodNotAllowed, NotFound
from baton.gateway.generation.generator import Generator
from baton.gateway.http.alive import SILENT, SignsOfLife
from baton.gateway.http.context import Gateway
from baton.gateway.http.failures import error_response
from baton.gateway.http.middleware import GatewayMiddleware
from baton.gateway.http.paths import own_path
from baton.gateway.http.responses import SEND, SIGNS
from baton.gateway.http.routes.chat import chat_routes
from baton.gateway.http.routes.cluster import cluster_routes
from baton.gateway.http.routes.completions import completion_routes
from baton.gateway.http.routes.docs import docs_routes
from baton.gateway.http.routes.embeddings import embedding_routes
from baton.gateway.http.routes.events import event_routes
from baton.gateway.http.routes.front import front_routes
from baton.gateway.http.routes.messages import message_routes
from baton.gateway.http.routes.ranking import ranking_routes
from baton.gateway.http.routes.responses import responses_routes
from baton.gateway.http.routes.server import server_routes
from baton.gateway.http.routes.tokens import token_routes
from baton.gateway.http.routes.ui import ui_routes
from baton.gateway.instances.client import ClusterClient, Requirements
from baton.gateway.responses.store import ResponseStore
from baton.gateway.served_model import ServedModel
from baton.gateway.sharing import Sharing, SharingOptions
from baton.gateway.text.chat_template import ChatTemplateError
from baton.gateway.text.tokenizer import Tokenizer
from baton.observe.metrics import Metrics
from baton.protocol.params.sampling_params import InvalidParameter


def create_app(
    served: ServedModel,
    client: ClusterClient,
    *,
    access: Access | None = None,
    sharing: SharingOptions | None = None,
    tokenizer: Tokenizer | None = None,
    root_path: str = "",
    signs: SignsOfLife | None = None,
    responses: ResponseStore | None = None,
    refuse_tools: bool = False,
) -> Starlette:
    """The application for one served model.

    `access`: who may do what; None: no keys.  `sharing`: how users share the server.  `tokenizer`: if it is
    loaded already.  `root_path`: what a proxy puts before paths.  `signs`: what clients are sent while
    nothing else comes; None: nothing.  `responses`: where answers of /v1/responses are kept; None: nowhere.
    `refuse_tools`: those that the server cannot serve are refused, not left out.

    Raises `TokenizerError` or `ChatTemplateError` if it cannot be loaded, and `WeightsError`.
    """
    access = access or Access()
    tokenizer = tokenizer or Tokenizer.from_directory(served.tokenizer)
    tokenizer.use_template(served.chat_template)
    metrics = Metrics(served.name)
    gateway = Gateway(
        served=served,
        tokenizer=tokenizer,
        client=client,
        generator=Generator(served, tokenizer, client, metrics=metrics),
        metrics=metrics,
        access=access,
        sharing=Sharing(access, sharing),
        responses=ResponseStore() if responses is None else responses,
        refuse_tools=refuse_tools,
    )
    client.require(Requirements(served.max_model_len, served.vocab_size))
    client.cluster.start_name = served.checkpoint

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        gateway.close()

    routes = [
        *completion_routes(gateway),
        *chat_routes(gateway),
        *responses_routes(gateway),
        *message_routes(gateway),
        *embedding_routes(gateway),
        *ranking_routes(gateway),
        *token_routes(gateway),
        *server_routes(gateway),
        *event_routes(gateway),
        *cluster_routes(gateway),
        *ui_routes(gateway),
        *docs_routes(root_path),
        *front_routes(root_path),
    ]
    app = _Application(routes=routes, lifespan=lifespan, exception_handlers=_ERROR_HANDLERS)
    app.root_path, app.signs = root_path, signs or SILENT
    app.router.redirect_slashes = False
    app.state.gateway = gateway
    app.add_middleware(GatewayMiddleware, access=access, metrics=metrics)
    if access.allowed_origins:
        # Around the keys: a browser asks first whether it may send them.
        app.add_middleware(
            CORSMiddleware, allow_origins=access.allowed_origins, allow_methods=["*"], allow_headers=["*"]
        )
    return app


class _Application(Starlette):
    """Keeps the server's `send` for who writes many pieces; reads `/health/`, and what has a proxy's path
    before it, as `/health`, and so on (`paths.py`), before anything looks at the path."""

    root_path = ""
    signs = SILENT

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["path"] = own_path(scope["path"], self.root_path)
        scope[SEND] = send
        scope[SIGNS] = self.signs
        await super().__call__(scope, receive, send)


async def _on_api_error(request: Request, error: Any) -> Response:
    return error_response(error, request.scope)


async def _on_invalid_parameter(request: Request, error: Any) -> Response:
    return error_response(BadRequest(str(error), param=error.field), request.scope)


async def _on_template_error(request: Request, error: Exception) -> Response:
    return error_response(BadRequest(str(error), param="messages"), request.scope)


async def _on_http_error(request: Request, error: Any) -> Response:
    path, scope = request.url.path, request.scope
    if error.status_code == 404:
        return error_response(NotFound(f"there is nothing at {path}", code="not_found"), scope)
    if error.status_code == 405:
        response = error_response(MethodNotAllowed(f"{request.method} is not allowed at {path}"), scope)
        response.headers.update(error.headers or {})
        return response
    failure = BadRequest(str(error.detail))
    failure.status = error.status_code
    return error_response(failure, scope)


async def _on_disconnect(_: Request, __: Exception) -> Response:
    """Nobody reads this; it keeps a client that left during its upload out of the error log."""
    return Response(status_code=400)


_ERROR_HANDLERS: dict[Any, ExceptionHandler] = {
    ApiError: _on_api_error,
    InvalidParameter: _on_invalid_parameter,
    ChatTemplateError: _on_template_error,
    HTTPException: _on_http_error,
    ClientDisconnect: _on_disconnect,
}
"""Every error leaves in OpenAI's shape."""
