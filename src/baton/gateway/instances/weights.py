"""New weights for all instances, or for none: the two phases of `/update_weights`.

Theory.  First every instance checks (`check_weights`): configuration, names, shapes, whether files can be
read; and where weights lie in images, it makes the new one, once on each host, or maps it
(`executor/weights/new_weights.py`).  Nothing changes, requests go on, and each instance is locked for this
gateway (`engine/workers/controls.py`).  Making images may take longer than a lock lasts, so those that are
ready are asked again, now and then, until the last one is: they say so at once.  If one cannot, or is not
there, or finds another checkpoint at that path than the others do (a path on another host), the locks are
released, the answer says who and why, and nothing was changed anywhere.

Then the gateway *decides*, in one turn of its event loop: supervisors are told, so that whatever starts
from now on loads the new weights, and every instance that is ready is ordered to load them.  Whatever is
submitted after that comes after the order on each connection, so no request goes back from new weights to
old ones.  An instance that fails while it loads is lost like any other, and starts again with what was
decided; one that was away, or comes later, says in `Welcome` what it has, and is ordered before it gets its
first request.

A gateway that stands still or dies before it decides has changed nothing: the locks have a deadline.  One
that dies while it decides may leave instances of both kinds behind; what they say in `Welcome` brings the
next one to the newer weights (`protocol/weights.py`).
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from baton.gateway.cluster.member import Member
from baton.gateway.errors import ApiError, BadRequest, Conflict, InstanceUnavailable
from baton.gateway.instances.connection import InstanceClient
from baton.gateway.instances.orders import Answers
from baton.gateway.instances.patience import any_within

if TYPE_CHECKING:
    from baton.gateway.instances.client import ClusterClient

log = logging.getLogger(__name__)

_AGAIN_S = 10.0
"""Who has prepared the weights is asked again that often, while others prepare them."""
_LOCKED_S = 25.0
"""Less than `engine.controls.PREPARED_S`: so long after a question its lock may be over."""
_CHECKS = 3
"""How often they are asked until all have said yes within that time."""
_LOAD_S = 86_400.0
"""Instances bound loading by `--startup-timeout`, and give up or fail then; this is for one that does
neither."""


async def update_weights(client: ClusterClient, path: str) -> dict[str, Any]:
    """Returns what the single instance says, or `instances`: what each of them says.

    Raises `Conflict` while another update is under way, `BadRequest` if an instance cannot load it, and
    `InstanceUnavailable` if one is not there to be asked, or all have failed while they loaded.
    """
    if client.updating:
        raise Conflict("another update_weights is under way; try again when it is done", code="busy")
    client.updating = True
    try:
        name = await _check(client, path)
        return await _load(client, name, path)
    finally:
        client.updating = False


async def _check(client: ClusterClient, path: str) -> str:
    """The first phase.  Returns the name of the weights."""
    for link in client.instances.values():
        if link.state in ("starting", "restarting"):
            raise link.member.unavailable(client.cluster.call(link.name))
    loop = asyncio.get_running_loop()
    asked = [link.name for link in client.instances.values() if link.state == "ready"]
    try:
        for _ in range(_CHECKS):
            each, asked_at = await _all_check(client, path)
            if not each:
                raise client.cluster.unavailable()
            name = agreed(each, path)
            if loop.time() - asked_at <= _LOCKED_S:
                return name
        raise InstanceUnavailable(
            "the server stood still while the instances checked; nothing was changed, try again",
            code="timeout",
            retry_after_s=1,
        )
    except (ApiError, asyncio.CancelledError):
        client.release_weights(asked)
        raise


async def _all_check(client: ClusterClient, path: str) -> tuple[Answers, float]:
    """Until all that are ready have answered.  Returns when the last question to one of them was, at the
    earliest: all are locked since then."""
    loop = asyncio.get_running_loop()
    links = [link for link in client.instances.values() if link.state == "ready"]
    last = asyncio.Event()
    unheard = len(links)

    async def ask(link: InstanceClient) -> tuple[dict[str, Any] | ApiError, float]:
        nonlocal unheard
        heard = False
        while True:
            asked_at = loop.time()
            answer: dict[str, Any] | ApiError
            try:
                answer = await link.query("check_weights", _LOAD_S, path)
            except ApiError as error:
                answer = error
            unheard -= not heard
            heard = True
            if not unheard:
                last.set()
            if isinstance(answer, ApiError) or "error" in answer:
                return answer, asked_at
            with suppress(TimeoutError):
                await asyncio.wait_for(last.wait(), _AGAIN_S)
                return answer, asked_at

    found = await asyncio.gather(*map(ask, links))
    each = {link.name: answer for link, (answer, _) in zip(links, found, strict=True)}
    return each, min((asked_at for _, asked_at in found), default=loop.time())


def agreed(each: Answers, path: str) -> str:
    wrong: dict[str, str] = {}
    codes: list[str | None] = []
    names: dict[str, str] = {}
    for instance, answer in each.items():
        if isinstance(answer, ApiError):
            wrong[instance], code = answer.message, answer.code
        elif "error" in answer:
            wrong[instance], code = str(answer["error"]), answer.get("code")
        else:
            names[instance] = str(answer.get("weights") or path)
            continue
        codes.append(code)
    if wrong:
        text = next(iter(wrong.values()))
        if len(each) > 1:
            said = "; ".join(f"{instance}: {why}" for instance, why in wrong.items())
            text = f"{said}; no instance was changed"
        if "busy" in codes:
            raise Conflict(text, code="busy")
        if "refused" in codes:
            raise BadRequest(f"path: {text}", param="path", code="refused")
        raise InstanceUnavailable(text, code=codes[0], retry_after_s=5)
    if len(set(names.values())) > 1:
        found = ", ".join(f"{instance}: {name}" for instance, name in names.items())
        raise BadRequest(
            f"path: the instances find different checkpoints at {path!r} ({found}); no instance was changed",
            param="path",
            code="refused",
        )
    return next(iter(names.values()))


async def _load(client: ClusterClient, name: str, path: str) -> dict[str, Any]:
    """The second phase: it is decided."""
    cluster = client.cluster
    weights = cluster.next_weights(name, path)
    log.info("all instances get the weights %s (%s)", path, name)
    told = client.decide(weights)
    loaded = asyncio.ensure_future(
        client.wait_for(lambda: all(_is_through(cluster.members.get(member.name), member) for member in told))
    )
    try:
        if not await any_within((loaded,), _LOAD_S):
            raise InstanceUnavailable(f"the instances have not loaded {path!r} in a day", code="timeout")
    finally:
        loaded.cancel()
    results = {member.name: _result(member) for member in told}
    failed = [str(result["error"]) for result in results.values() if "error" in result]
    if len(failed) == len(results):
        raise InstanceUnavailable(
            f"it was lost while it loaded the new weights, and starts again with them: {failed[0]}",
            code="instance_restarting",
            retry_after_s=5,
        )
    if len(cluster.members) == 1:
        return next(iter(results.values()))
    return {"path": path, "weights": name, "generation": weights.generation, "instances": results}


def _is_through(now: Member | None, told: Member) -> bool:
    """It has answered, or is gone: then it starts again with these weights."""
    return now is not told or told.load_answer is not None or told.state != "ready"


def _result(member: Member) -> dict[str, Any]:
    if member.load_answer is not None:
        return member.load_answer
    return {"error": member.failure or "it was lost while it loaded them", "code": "instance_restarting"}
