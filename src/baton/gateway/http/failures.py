"""How errors look over HTTP."""

from __future__ import annotations

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from baton.gateway.anthropic.shapes import error_body
from baton.gateway.errors import ApiError, Unauthorized

_MESSAGES = "/v1/messages"


def is_messages(path: str) -> bool:
    """Of Anthropic's API."""
    return path.startswith(_MESSAGES) and path[len(_MESSAGES) :][:1] in ("", "/")


def error_response(error: ApiError, scope: Scope) -> Response:
    """In the shape of the API that the path belongs to, OpenAI's by default; with `Retry-After` where
    waiting helps."""
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
