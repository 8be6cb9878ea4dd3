"""What every HTTP request passes: a request id, its rights (`rights.py`), a counter, the last net for errors.

It leaves in the scope's state: `request_id`; `key_id`, which stands for the key that was sent ("": none was
needed); `min_priority`, the best `priority` that this caller may ask for (None: any); `signed`, the signature
of a member (None: there is none).  What a handler leaves there as `headers` is added to those of the answer.

Pure ASGI: a middleware that wraps responses in tasks and queues would cost more than all the rest.
"""

from __future__ import annotations

import logging
import re
import uuid
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.gateway.access import Access
from baton.gateway.errors import ApiError, BadRequest, InternalError
from baton.gateway.http.failures import error_response, is_messages
from baton.gateway.http.members import Exchange, NoMember, Unheard, Unsigned
from baton.gateway.http.rights import Guard
from baton.observe.metrics import Metrics
from baton.protocol.rules.signing import Signed

log = logging.getLogger(__name__)

REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}\Z")
_CLIENT_GONE = 499


class GatewayMiddleware:
    """Wraps the application."""

    def __init__(self, app: ASGIApp, *, access: Access, metrics: Metrics) -> None:
        self._app = app
        self._guard = Guard(access)
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = given if REQUEST_ID.match(given) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = [(b"x-request-id", request_id.encode())]
                if is_messages(scope["path"]):
                    own.append((b"request-id", request_id.encode()))  # (Anthropic's name of it)
                own += state.get("headers", ())
                message["headers"] = [*message.get("headers", ()), *own]
            await send(message)

        try:
            try:
                caller = self._guard.check(scope, headers)
            except ApiError as error:
                if isinstance(error, NoMember | Unsigned):
                    self._count_refusal(scope, error)
                await error_response(error, scope)(scope, receive, send_with_id)
            except Unheard as refused:
                if refused.error.code != "other_server":  # (how each one begins)
                    self._count_refusal(scope, refused.error)
                exchange = Exchange(self._guard.members, refused.secret, refused.nonce, send_with_id)
                await error_response(refused.error, scope)(scope, receive, exchange.send)
            else:
                state["key_id"], state["min_priority"] = caller.key, self._guard.min_priority(caller)
                state["signed"] = caller.signed
                if caller.signed is None:
                    await self._app(scope, receive, send_with_id)
                else:
                    await self._exchange(caller.signed, scope, receive, send_with_id)
        except Exception:
            about = {"request_id": request_id}
            log.exception("request %s to %s failed", request_id, scope["path"], extra=about)
            if status:
                raise
            failure = InternalError(
                f"internal error; the server's log has it under request {request_id}", code="internal"
            )
            await error_response(failure, scope)(scope, receive, send_with_id)
        finally:
            self._metrics.http_request(scope["method"], _route(scope), status or _CLIENT_GONE)

    async def _exchange(self, signed: Signed, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(self._guard.members, signed.secret, signed.nonce, send)
        try:
            await exchange.run(self._app, scope, receive, signed.body)
        except BadRequest as error:
            self._count_refusal(scope, error)
            await error_response(error, scope)(scope, receive, exchange.send)

    def _count_refusal(self, scope: Scope, error: ApiError) -> None:
        """Who is no member, or says twice what counts once."""
        client = scope.get("client")
        asker = client[0] if client is not None else "a local socket"
        log.warning("%s of %s by %s is refused: %s", scope["method"], scope["path"], asker, error.message)
        self._metrics.member_refused(error.code or "other")


def _route(scope: dict[str, Any] | Scope) -> str:
    """The route's template: a label must not have as many values as there are paths."""
    route = scope.get("route")
    if route is not None:
        return str(getattr(route, "path", "unmatched"))
    # A plain route says only that it matched; those that there are have no parameters.
    return scope["path"] if "endpoint" in scope else "unmatched"
