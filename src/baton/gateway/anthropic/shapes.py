"""Errors and models in Anthropic's shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from baton.gateway.errors import ApiError, ContextTooLong

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""By status; else it is the client's fault, or the server's."""


def error_body(error: ApiError, request_id: str) -> dict[str, Any]:
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    message = error.message
    if isinstance(error, ContextTooLong) and error.tokens is not None:
        # (Clients know by these words that they should shorten the conversation.)
        message = f"prompt is too long: {error.tokens} tokens > {error.limit} maximum. {message}"
    elif error.code == "context_length_exceeded":
        message = f"prompt is too long. {message}"
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def model_body(name: str, created: int, max_model_len: int) -> dict[str, Any]:
    """`created`: Unix time."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": max_model_len,
        "max_tokens": max_model_len,
    }


def models_body(models: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All on one page."""
    return {
        "data": models,
        "first_id": models[0]["id"],
        "last_id": models[-1]["id"],
        "has_more": False,
    }
