"""How errors look over HTTP."""

from __future__ import annotations

import logging

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from baton.gateway.anthropic.shapes import error_body
from baton.gateway.errors import ApiError, Unauthorized

log = logging.getLogger(__name__)

_MESSAGES = "/v1/messages"
_OURS = 500
"""Statuses from here on say that the server failed, not the client."""


def is_messages(path: str) -> bool:
    """Of Anthropic's API."""
    return path.startswith(_MESSAGES) and path[len(_MESSAGES) :][:1] in ("", "/")


def log_failure(error: ApiError, request_id: str, where: str) -> None:
    """A warning if the error is the server's own, with the id that the client sees as `x-request-id`; less
    where the server has been told to stop.  `where`: which path, or part of the answer."""
    if error.status >= _OURS:
        level = logging.INFO if error.code == "shutting_down" else logging.WARNING
        about = {"request_id": request_id}
        log.log(level, "request %s %s: %d %s", request_id, where, error.status, error.message, extra=about)


def error_response(error: ApiError, scope: Scope) -> Response:
    """In the shape of the API that the path belongs to, OpenAI's by default; with `Retry-After` where
    waiting helps.  Failures of the server are logged."""
    log_failure(error, scope["state"]["request_id"], f"to {scope['path'][:200]}")
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    if is_messages(scope["path"]):
        body = error_body(error, scope["state"]["request_id"])
    else:
        body = error.body()
    return Response(msgspec.json.encode(body), error.status, headers=headers, media_type="application/json")
