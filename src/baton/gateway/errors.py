"""Errors that a client of the API sees, without HTTP: what went wrong, whose fault, how to go on.

The HTTP layer turns them into OpenAI's error shape; the Python API raises them.
"""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """A request that got no answer.  `status` is the HTTP status that says whose fault it is."""

    status = 500
    type = "server_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class BadRequest(ApiError, ValueError):
    """The request itself cannot be served; the message names the field and the fix."""

    status = 400
    type = "invalid_request_error"


class ContextTooLong(BadRequest):
    """More tokens than the model's context holds.  Begins with OpenAI's words, by which clients (LiteLLM,
    LangChain) know that they should shorten the conversation or take another model."""

    def __init__(self, limit: int, however: str, fix: str, *, param: str, tokens: int | None = None) -> None:
        """`limit`: the context in tokens; `however`: what was sent; `fix`: what helps; `tokens`: of the
        prompt, if that alone is too long."""
        super().__init__(
            f"This model's maximum context length is {limit} tokens. However, {however}. {fix}.",
            param=param,
            code="context_length_exceeded",
        )
        self.limit = limit
        self.tokens = tokens


class TooLarge(BadRequest):
    """The body is larger than the server reads."""

    status = 413


class UnsupportedMediaType(BadRequest):
    """The body is of a kind that is not read here."""

    status = 415


class Unauthorized(ApiError):
    status = 401
    type = "authentication_error"


class Forbidden(ApiError):
    """The caller has not the right that this route needs; another key may have it."""

    status = 403
    type = "permission_error"


class NotFound(ApiError):
    status = 404
    type = "not_found_error"


class MethodNotAllowed(ApiError):
    status = 405
    type = "invalid_request_error"


class Conflict(ApiError):
    """Something that excludes it is under way."""

    status = 409
    type = "conflict_error"


class Overloaded(ApiError):
    """The queue is full; try again after `retry_after_s`."""

    status = 429
    type = "rate_limit_error"


class InstanceUnavailable(ApiError):
    """No instance can serve now: it starts, restarts, was lost with this request, or shuts down."""

    status = 503
    type = "service_unavailable_error"


class InternalError(ApiError):
    """The instance failed on this request."""


class RequestCancelled(Exception):
    """The request was cancelled on this side; there is nobody to answer."""
