"""Questions and orders to several instances at once, and one answer made of theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from baton.gateway.errors import ApiError, BadRequest, Conflict, InstanceUnavailable
from baton.gateway.instances.connection import InstanceClient
from baton.protocol.messages.requests import QueryKind

Answers = dict[str, dict[str, Any] | ApiError]
"""By instance: what it says, or why it does not."""


async def ask_each(
    instances: Mapping[str, InstanceClient], what: QueryKind, deadline_s: float, argument: str = ""
) -> Answers:
    """Asks every instance that is ready."""
    ready = [link for link in instances.values() if link.state == "ready"]
    answers = await asyncio.gather(
        *(link.query(what, deadline_s, argument) for link in ready), return_exceptions=True
    )
    each: Answers = {}
    for link, answer in zip(ready, answers, strict=True):
        if isinstance(answer, BaseException) and not isinstance(answer, ApiError):
            raise answer
        each[link.name] = answer
    return each


def merge(each: Answers) -> dict[str, Any]:
    """`{"instances": {name: answer}}`, with `error` and `code` if any of them refused or did not answer: then
    `error` says of each why, and who did what was ordered."""
    bodies: dict[str, dict[str, Any]] = {}
    for name, answer in each.items():
        if isinstance(answer, ApiError):
            bodies[name] = {"error": answer.message, "code": answer.code}
        else:
            bodies[name] = answer
    merged: dict[str, Any] = {"instances": bodies}
    wrong = {name: body for name, body in bodies.items() if "error" in body}
    if wrong:
        done = [name for name in bodies if name not in wrong]
        text = "; ".join(f"{name}: {body['error']}" for name, body in wrong.items())
        merged["error"] = text + (f"; done by {', '.join(done)}" if done else "")
        merged["code"] = next(iter(wrong.values())).get("code")
    return merged


def checked(body: dict[str, Any], field: str | None = None) -> dict[str, Any]:
    """The answer to an order.  Raises `ApiError` if it was not carried out (by all instances); `field` is the
    one of the request that the instance may refuse."""
    if "error" not in body:
        return body
    message, code = body["error"], body.get("code")
    if code in ("busy", "stale"):
        raise Conflict(message, code=code)
    if code == "refused":
        raise BadRequest(f"{field}: {message}" if field else message, param=field, code=code)
    raise InstanceUnavailable(message, code=code, retry_after_s=5)
