"""The instances: how they stand, their labels, draining; and registration of those that run elsewhere.

| request | who sends it | what it does |
| --- | --- | --- |
| `GET /cluster/instances` | people, tools | how every instance stands |
| `GET /cluster/instances/{name}` | the same | how one stands |
| `POST /cluster/instances/{name}` | the same | another label; `state`: `draining` or `active` |
| `PUT /cluster/instances/{name}` | an instance | joins; the same again within `ttl_s`: it still lives |
| `DELETE /cluster/instances/{name}` | an instance | leaves at once; what runs there is continued elsewhere |

The gateway sends requests to an instance when the engine that answers at its endpoint has proven that it is
the one that registered (`protocol/rules/proof.py`).  An instance that wants to leave in peace asks for
`draining`, looks until it is `drained`, and leaves then.
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton.gateway.api.fields import MAX_TTL_S, MIN_TTL_S
from baton.gateway.api.orders import InstanceRequest, JoinRequest
from baton.gateway.cluster.member import INSTANCE_NAME, LABELS, Label
from baton.gateway.errors import BadRequest
from baton.gateway.http.context import Gateway
from baton.gateway.http.rights import is_local
from baton.gateway.instances.endpoints import check_endpoint
from baton.gateway.rendering.formats import encode
from baton.ipc.sockets.curve import Place
from baton.protocol.rules.cluster_secret import REGISTRATION
from baton.protocol.rules.proof import MAX_SECRET, MIN_SECRET, SECRET_VARIABLE
from baton.protocol.rules.signing import Signed

log = logging.getLogger(__name__)

_SECRET = re.compile(rf"[\x21-\x7e]{{{MIN_SECRET},{MAX_SECRET}}}\Z")
_SALT = re.compile(r"[0-9a-f]{32}\Z")
_INCARNATION = re.compile(r"[\x21-\x7e]{1,64}\Z")


def cluster_routes(gateway: Gateway) -> list[Route]:
    client = gateway.client

    async def instances(_: Request) -> Response:
        cluster = client.cluster
        return _json(
            {
                "instances": client.describe(),
                "unplaced": gateway.placing(),
                "arranging": cluster.roles.describe(asyncio.get_running_loop().time()),
                "slo": str(cluster.table.traffic.slo),
                "traffic": cluster.table.traffic.now()._asdict(),
                # What all are to have; an instance that is about to join looks at it.
                "weights": cluster.weights.describe(),
                "checkpoint": gateway.checkpoint,
            }
        )

    async def instance(request: Request) -> Response:
        name = request.path_params["name"]
        return _json(client.describe(name)[0])

    async def join(request: Request) -> Response:
        name = request.path_params["name"]
        body = await gateway.read(request, JoinRequest)
        if not INSTANCE_NAME.match(name):
            raise BadRequest(
                "name: give 1 to 63 letters, digits, '.', '_' or '-', a letter or digit first", param="name"
            )
        if not body.incarnation or not _INCARNATION.match(body.incarnation):
            raise BadRequest(
                "incarnation: give 1 to 64 printable characters, others after each start", param="incarnation"
            )
        link = client.instances.get(name)
        renewal = link is not None and link.incarnation == body.incarnation
        if link is None or link.endpoint != body.endpoint:
            endpoint = _check_endpoint(gateway, request, body.endpoint)
        else:
            endpoint = link.endpoint  # (its socket may be gone when it renews)
        secret = _secret(body, request.state.signed)
        _check_fit(gateway, body, renewal)
        ttl_s = _within("ttl_s", body.ttl_s, MIN_TTL_S, MAX_TTL_S)
        label = _label(body.label or "mixed")
        client.join(
            name,
            endpoint,
            body.incarnation,
            label,
            ttl_s,
            process=body.process or "",
            secret=secret,
        )
        return _json({**client.describe(name)[0], "decided_weights": client.cluster.weights.describe()})

    async def change(request: Request) -> Response:
        name = request.path_params["name"]
        body = await gateway.read(request, InstanceRequest)
        client.describe(name)
        if body.label is None and body.state is None:
            raise BadRequest("give a label, a state, or both", param="label")
        if body.state not in (None, "draining", "active"):
            raise BadRequest(f"state: {body.state[:50]!r} must be 'draining' or 'active'", param="state")
        move_after_s = body.move_after_s
        if move_after_s is not None and body.state != "draining":
            raise BadRequest("move_after_s: only with state 'draining'", param="move_after_s")
        if body.label is not None:
            await client.set_label(name, _label(body.label))
        if body.state == "draining":
            await client.drain(name, move_after_s)
        elif body.state == "active":
            await client.undrain(name)
        now = client.describe(name)[0]
        state = "draining" if now["draining"] else "active"
        log.info("%s: now %s, %s, %d requests", name, now["label"], state, now["in_flight"])
        return _json(now)

    async def leave(request: Request) -> Response:
        name = request.path_params["name"]
        client.leave(name)
        return _json({"name": name, "state": "gone"})

    return [
        Route("/cluster/instances", instances),
        Route("/cluster/instances/{name}", instance),
        Route("/cluster/instances/{name}", join, methods=["PUT"]),
        Route("/cluster/instances/{name}", change, methods=["POST"]),
        Route("/cluster/instances/{name}", leave, methods=["DELETE"]),
    ]


def _secret(body: JoinRequest, signed: Signed | None) -> str:
    """Which the engine and this server prove themselves with."""
    if signed is not None:
        if not body.salt or not _SALT.match(body.salt):
            raise BadRequest("salt: give 32 random hexadecimal digits", param="salt")
        return signed.secret.key(REGISTRATION, body.salt).hex()
    if not body.secret or not _SECRET.match(body.secret):
        raise BadRequest(
            f"secret: give {MIN_SECRET} to {MAX_SECRET} random characters, which the engine knows "
            f"({SECRET_VARIABLE})",
            param="secret",
        )
    return body.secret


def _check_endpoint(gateway: Gateway, request: Request, endpoint: str | None) -> str:
    signed, local = request.state.signed is not None, is_local(request.scope)
    proven = signed or bool(request.state.key_id)
    far = signed or gateway.access.insecure_cluster
    checked = check_endpoint(endpoint, local=local, proven=proven, far=far)
    place = Place.parse(checked)
    encrypted = gateway.client.encryption is not None
    if place.address.startswith("tcp:") and bool(place.key) != encrypted:
        here, there = ("", "not ") if encrypted else ("not ", "")
        raise _misfit(
            "endpoint",
            f"the instance does {there}encrypt its connections, and this server does {here}so; start both "
            "with the same --cluster-secret and --transfer-encryption",
        )
    return checked


def _check_fit(gateway: Gateway, body: JoinRequest, renewal: bool) -> None:
    """Raises `BadRequest` if requests must not wander between this instance and the others.

    What it said when it came is not looked at again: it may have been given other weights since."""
    served = gateway.served
    names = ", ".join(repr(known) for known in served.names)
    if body.model is not None and body.model not in served.names:
        raise _misfit(
            "model", f"{body.model[:200]!r} is not served here, but {names}; start the instance with it"
        )
    if renewal:
        return
    if body.checkpoint and gateway.checkpoint and body.checkpoint != gateway.checkpoint:
        raise _misfit(
            "checkpoint",
            f"it loads another one ({body.checkpoint[:64]}) than is served here as {names} "
            f"({gateway.checkpoint}); start the instance with the same files",
        )
    if body.dtype and served.dtype and body.dtype != served.dtype:
        raise _misfit(
            "dtype",
            f"it computes in {body.dtype[:64]}, the instances here in {served.dtype}; start it with the same "
            "--dtype, --quantization, --kv-cache-dtype, --model-impl and --executor",
        )
    if body.angles and served.angles and body.angles != served.angles:
        raise _misfit(
            "angles",
            f"its --max-model-len makes it turn keys by LongRoPE's {body.angles[:64]!r} angles, that of the "
            f"server by the {served.angles!r} ones; start both with the same --max-model-len",
        )


def _misfit(field: str, why: str) -> BadRequest:
    return BadRequest(f"{field}: {why}", param=field, code="misfit")


def _label(label: str) -> Label:
    if label not in LABELS:
        raise BadRequest(f"label: {label[:50]!r} must be one of {', '.join(LABELS)}", param="label")
    return label


def _within(field: str, value: float | None, least: float, most: float) -> float:
    if value is None or not least <= value <= most:
        raise BadRequest(f"{field}: give seconds from {least:g} to {most:g}, not {value}", param=field)
    return value


def _json(body: dict[str, Any]) -> Response:
    return Response(encode(body), media_type="application/json")
