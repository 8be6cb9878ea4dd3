"""How errors look over HTTP."""

from __future__ import annotations

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from baton.gateway.errors import ApiError, Unauthorized


def error_response(error: ApiError, scope: Scope) -> Response:
    """In the shape of the API that the path belongs to, OpenAI's by default; with `Retry-After` where
    waiting helps."""
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    return Response(
        msgspec.json.encode(error.body()), error.status, headers=headers, media_type="application/json"
    )
