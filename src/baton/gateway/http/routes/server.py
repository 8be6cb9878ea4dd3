"""Models, health, version, metrics, and the few switches of the instances."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton.gateway.anthropic.shapes import model_body, models_body
from baton.gateway.api.orders import StartProfileRequest, UpdateWeightsRequest
from baton.gateway.cluster.continued import BOUNDS
from baton.gateway.directories import below
from baton.gateway.errors import BadRequest, InstanceUnavailable
from baton.gateway.generation.pausing import PAUSE_MODES
from baton.gateway.http.context import Gateway
from baton.gateway.http.memory import MemorySamples
from baton.gateway.instances.client import QueryKind
from baton.gateway.instances.orders import checked
from baton.gateway.instances.weights import update_weights as update
from baton.gateway.rendering.formats import encode
from baton.observe.handovers import Losses
from baton.observe.memory import memory_of_all, sum_of
from baton.observe.metrics import CONTENT_TYPE, InstanceSample
from baton.version import __version__

_VERSION = "anthropic-version"
"""A header of Anthropic's clients, which know their own shapes."""
_CODEX = "client_version"
"""A parameter with which Codex asks for the list of models."""
_SCRAPE_DEADLINE_S = 1.0
_SWITCH_DEADLINE_S = 10.0
_ORDER_DEADLINE_S = 1800.0
"""Of profiles: the instance bounds each part by its step_timeout_s, and fails then."""


def server_routes(gateway: Gateway) -> list[Route]:
    client, served = gateway.client, gateway.served
    used = MemorySamples(lambda: gateway.processes())

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

    async def models(request: Request) -> Response:
        if _VERSION in request.headers:
            cards = [model_body(name, served.created, served.max_model_len) for name in served.names]
            return _json(models_body(cards))
        listed = {"object": "list", "data": [model_card(name) for name in served.names]}
        if _CODEX in request.query_params:
            # (Codex wants its own catalogue's form, and logs an error for an answer without one: an empty
            # one leaves it with what it knows.)
            return _json({**listed, "models": []})
        return _json(listed)

    async def model(request: Request) -> Response:
        name = gateway.model_name(request.path_params["name"])
        if _VERSION in request.headers:
            return _json(model_body(name, served.created, served.max_model_len))
        return _json(model_card(name))

    async def health(_: Request) -> Response:
        """200 while the server may serve again, be it ready or not; 503 once it never will: an instance of
        its own was given up, and the process is about to end."""
        if client.state == "failed":
            return _json({"status": "failed", "reason": client.cluster.unavailable().message}, 503)
        return _json({"status": "alive"})

    async def ready(_: Request) -> Response:
        """200 if a request would be served now, else 503 with the reason.  After the start of the server:
        when all its instances are ready.  From the notice that it will stop: never again."""
        if gateway.leaving:
            body = {"status": "stopping", "reason": "the server will stop soon"}
            return _json(body, 503, {"retry-after": "5"})
        try:
            client.check_ready()
            client.check_settled()
        except InstanceUnavailable as error:
            headers = {"retry-after": str(error.retry_after_s or 5)}
            return _json({"status": client.state, "reason": error.message}, 503, headers)
        reason = gateway.pausing.reason
        if reason is not None:
            return _json({"status": "paused", "reason": reason}, 503, {"retry-after": "5"})
        return _json({"status": "ready"})

    async def load(_: Request) -> Response:
        """Requests that are being answered."""
        return _json({"server_load": len(gateway.generator.open)})

    async def version(_: Request) -> Response:
        return _json({"version": __version__})

    async def server_info(_: Request) -> Response:
        """How the server was started.  Secrets are not in it."""
        model = {
            "names": served.names,
            "root": served.root or str(served.tokenizer),
            "tokenizer": str(served.tokenizer),
            "max_model_len": served.max_model_len,
            "vocab_size": served.vocab_size,
            "dtype": served.dtype,
            "checkpoint": served.checkpoint,
        }
        return _json({"version": __version__, "model": model, **gateway.started_with})

    async def metrics(_: Request) -> Response:
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
                paused=entry["paused"],
            )
        table = client.cluster.table
        lost = table.continued
        data = gateway.metrics.render(
            samples,
            handed_over=table.num_handed_over,
            continued=lost.times,
            held=gateway.generator.num_held,
            losses=Losses(
                continued=lost.times,
                failed=lost.failed,
                tokens=lost.tokens,
                bounds=BOUNDS,
                gaps=lost.gaps,
                gap_seconds=lost.gap_seconds,
            ),
            memory=await used.latest(),
        )
        return Response(data, headers={"content-type": CONTENT_TYPE})

    async def stats(request: Request) -> Response:
        """What the engine of one instance counts, or of all."""
        instance = request.query_params.get("instance")
        return _json(await (client.query_one(instance, "stats") if instance else client.query("stats")))

    async def ledger(request: Request) -> Response:
        """Who holds the KV blocks, of one instance or of all."""
        instance = request.query_params.get("instance")
        return _json(await (client.query_one(instance, "ledger") if instance else client.query("ledger")))

    async def memory(_: Request) -> Response:
        """What the memory of this server's processes is used for; not those of instances that joined."""
        processes = dict(gateway.processes())
        elsewhere = [name for name in client.instances if f"{name} engine" not in processes]
        try:
            found = await asyncio.to_thread(memory_of_all, processes)
        except OSError as error:
            reason = f"this system does not say what its processes use: {error.strerror} ({error.filename})"
            return _json({"available": False, "reason": reason, "processes": [], "elsewhere": elsewhere})
        rows = [{"process": name, "pid": processes[name], **part.as_dict()} for name, part in found.items()]
        total = sum_of(found.values()).as_dict()
        return _json({"available": True, "sum": total, "processes": rows, "elsewhere": elsewhere})

    async def reset_prefix_cache(_: Request) -> Response:
        return _json(checked(await client.query("reset_prefix_cache", _SWITCH_DEADLINE_S)))

    async def pause(request: Request) -> Response:
        """See `pausing.py`.  `mode` and `clear_cache` have vLLM's names and defaults."""
        return _json(await gateway.pausing.pause(**_pause_options(request.query_params)))

    async def resume(_: Request) -> Response:
        return _json(await gateway.pausing.resume())

    async def is_paused(_: Request) -> Response:
        return _json(gateway.pausing.describe())

    async def update_weights(request: Request) -> Response:
        """Other weights of the same model, for all instances or none.  Requests wait and go on with them."""
        body = await gateway.read(request, UpdateWeightsRequest)
        path = await asyncio.to_thread(below, gateway.access.weights_dir, "--weights-dir", "path", body.path)
        return _json(await update(client, path))

    async def start_profile(request: Request) -> Response:
        body = await gateway.read(request, StartProfileRequest)
        path = await asyncio.to_thread(
            below, gateway.access.profile_dir, "--profile-dir", "directory", body.directory
        )
        return _json(await order("start_profile", "directory", path))

    async def stop_profile(_: Request) -> Response:
        """Each rank writes its trace into the directory, before this is answered."""
        return _json(await order("stop_profile", None))

    async def order(what: QueryKind, field: str | None, argument: str = "") -> dict[str, Any]:
        return checked(await client.query(what, _ORDER_DEADLINE_S, argument, everybody=True), field)

    return [
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/health", health),
        Route("/ping", health, methods=["GET", "POST"]),
        Route("/ready", ready),
        Route("/load", load),
        Route("/version", version),
        Route("/server_info", server_info),
        Route("/metrics", metrics),
        Route("/stats", stats),
        Route("/debug/ledger", ledger),
        Route("/debug/memory", memory),
        Route("/reset_prefix_cache", reset_prefix_cache, methods=["POST"]),
        Route("/pause", pause, methods=["POST"]),
        Route("/resume", resume, methods=["POST"]),
        Route("/is_paused", is_paused),
        Route("/update_weights", update_weights, methods=["POST"]),
        Route("/start_profile", start_profile, methods=["POST"]),
        Route("/stop_profile", stop_profile, methods=["POST"]),
    ]


_PAUSE_OPTIONS = ("mode", "clear_cache", "wait_for_inflight_requests", "timeout_s", "resume_after_s")
_MAX_PAUSE_S = 86_400.0


def _pause_options(given: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of `Pausing.pause`.  Raises `BadRequest`."""
    for name in given:
        if name not in _PAUSE_OPTIONS:
            raise BadRequest(
                f"{name[:50]}: is no option; there are {', '.join(_PAUSE_OPTIONS)}", param=name[:50]
            )
    mode: Any = given.get("mode", "wait" if _truth(given, "wait_for_inflight_requests", False) else "abort")
    if mode not in PAUSE_MODES:
        raise BadRequest(f"mode: {mode[:50]!r} must be one of {', '.join(PAUSE_MODES)}", param="mode")
    return {
        "mode": mode,
        "clear_cache": _truth(given, "clear_cache", mode != "keep"),
        "timeout_s": _seconds(given, "timeout_s", _ORDER_DEADLINE_S),
        "resume_after_s": _seconds(given, "resume_after_s", None),
    }


def _truth(given: Mapping[str, str], name: str, default: bool) -> bool:
    text = given.get(name)
    if text is None:
        return default
    if text.lower() not in ("true", "false", "1", "0"):
        raise BadRequest(f"{name}: {text[:50]!r} must be true or false", param=name)
    return text.lower() in ("true", "1")


_Default = TypeVar("_Default", float, None)


def _seconds(given: Mapping[str, str], name: str, default: _Default) -> float | _Default:
    text = given.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= _MAX_PAUSE_S:
        raise BadRequest(
            f"{name}: {text[:50]!r} must be more than 0 and at most {_MAX_PAUSE_S:g} seconds", param=name
        )
    return value


def _json(body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode(body), status, headers=headers, media_type="application/json")
