"""Models, health, version, metrics, and the few switches of the instances."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from baton.gateway.cluster_client import QueryKind
from baton.gateway.errors import BadRequest, Conflict, InstanceUnavailable
from baton.gateway.formats import encode
from baton.gateway.schemas import StartProfileRequest, UpdateWeightsRequest
from baton.gateway.state import Gateway
from baton.observe.metrics import CONTENT_TYPE, InstanceSample
from baton.version import __version__

_SCRAPE_DEADLINE_S = 1.0
_SWITCH_DEADLINE_S = 10.0
_ORDER_DEADLINE_S = 1800.0
"""Of new weights and profiles: the instance bounds each part by its step_timeout_s, and fails then."""
_MAX_PATH = 4096


def server_routes(gateway: Gateway) -> APIRouter:
    router = APIRouter()
    client, served = gateway.client, gateway.served

    def model_card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": served.created,
            "owned_by": "baton",
            "root": served.root or str(served.tokenizer),
            "parent": None,
            "max_model_len": served.max_model_len,
        }

    @router.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [model_card(name) for name in served.names]})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return _json(model_card(gateway.model_name(name)))

    @router.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        """The server is alive, whether or not it can serve."""
        return _json({"status": "alive"})

    @router.api_route("/ready", methods=["GET", "HEAD"])
    async def ready() -> Response:
        """200 if a request would be served now, else 503 with the reason.  After the start of the server:
        when all its instances are ready."""
        try:
            client.check_ready()
            client.check_settled()
        except InstanceUnavailable as error:
            headers = {"retry-after": str(error.retry_after_s or 5)}
            return _json({"status": client.state, "reason": error.message}, 503, headers)
        if client.paused:
            return _json({"status": "paused", "reason": "paused"}, 503, {"retry-after": "5"})
        return _json({"status": "ready"})

    @router.get("/version")
    async def version() -> Response:
        return _json({"version": __version__})

    @router.get("/metrics")
    async def metrics() -> Response:
        """Prometheus text; without an engine's part if it does not answer within a second."""
        stats = await client.query_each("stats", _SCRAPE_DEADLINE_S)
        samples = {}
        for entry in client.describe():
            answer = stats.get(entry["name"])
            samples[entry["name"]] = InstanceSample(
                stats=answer if isinstance(answer, dict) else None,
                label=entry["label"],
                ready=entry["state"] == "ready",
                draining=entry["draining"],
                in_flight=entry["in_flight"],
                restarts=entry["restarts"],
            )
        table = client.cluster.table
        data = gateway.metrics.render(
            samples, handed_over=table.num_handed_over, continued=table.num_continued
        )
        return Response(data, headers={"content-type": CONTENT_TYPE})

    @router.get("/stats")
    async def stats(instance: str | None = None) -> Response:
        """What the engine of one instance counts, or of all."""
        return _json(await (client.query_one(instance, "stats") if instance else client.query("stats")))

    @router.get("/debug/ledger")
    async def ledger(instance: str | None = None) -> Response:
        """Who holds the KV blocks, of one instance or of all."""
        return _json(await (client.query_one(instance, "ledger") if instance else client.query("ledger")))

    def switch(path: str, what: QueryKind) -> None:
        async def route(request: Request) -> Response:
            return _json(_checked(await client.query(what, _SWITCH_DEADLINE_S), None))

        router.add_api_route(path, route, methods=["POST"], name=what)

    switch("/reset_prefix_cache", "reset_prefix_cache")
    switch("/pause", "pause")
    switch("/resume", "resume")

    @router.post("/update_weights")
    async def update_weights(request: Request) -> Response:
        """Other weights of the same model.  Running requests wait and go on with them."""
        body = await gateway.read(request, UpdateWeightsRequest)
        path = _directory("path", body.path)
        answer = _json(await order("update_weights", "path", path))
        gateway.weights, gateway.checkpoint = path, gateway.on_weights(path)
        return answer

    @router.post("/start_profile")
    async def start_profile(request: Request) -> Response:
        body = await gateway.read(request, StartProfileRequest)
        return _json(await order("start_profile", "directory", _directory("directory", body.directory)))

    @router.post("/stop_profile")
    async def stop_profile() -> Response:
        """Each rank writes its trace into the directory, before this is answered."""
        return _json(await order("stop_profile", None))

    async def order(what: QueryKind, field: str | None, argument: str = "") -> dict[str, Any]:
        return _checked(await client.query(what, _ORDER_DEADLINE_S, argument, everybody=True), field)

    return router


def _checked(body: dict[str, Any], field: str | None) -> dict[str, Any]:
    """The answer to an order; raises `ApiError` if it was not carried out (by all instances)."""
    if "error" not in body:
        return body
    message, code = body["error"], body.get("code")
    if code == "busy":
        raise Conflict(message, code=code)
    if code == "refused":
        raise BadRequest(f"{field}: {message}" if field else message, param=field, code=code)
    raise InstanceUnavailable(message, code=code, retry_after_s=5)


def _directory(field: str, value: str | None) -> str:
    """Raises `BadRequest` unless it is an absolute path."""
    if not value:
        raise BadRequest(f"{field}: it is missing; give a directory on the server", param=field)
    if not value.startswith("/") or "\0" in value or len(value) > _MAX_PATH:
        raise BadRequest(
            f"{field}: {value[:200]!r} is no absolute path of at most {_MAX_PATH} characters", param=field
        )
    return value


def _json(body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode(body), status, headers=headers, media_type="application/json")
