"""`baton serve` as a process: HTTP server, gateway and the supervisors of its instances on one event loop.

The instances are started first.  While they load their model this process imports and makes the application;
then HTTP answers (`/health` 200, `/ready` 503 with the reason), and connections that came earlier have
waited.  SIGINT and SIGTERM stop accepting and give running requests `shutdown_timeout_s` to end; those that
have not are then answered with an error, and the instances are stopped.  A second signal does that at once
and kills the instances.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from baton.gateway.access import Access
from baton.gateway.cluster_client import ClusterClient
from baton.ipc.process import process_age_s
from baton.launch.announce import announce
from baton.launch.checkpoint import fingerprint
from baton.launch.cluster_options import ClusterOptions, InstancePlan, check_cluster, plan_instances
from baton.launch.fleet import Fleet
from baton.launch.limits import MAX_SECONDS, OptionError, check_range
from baton.launch.options import Plan, ServeOptions, make_plan
from baton.launch.supervisor import InstanceFailed
from baton.observe.logs import configure_logging

if TYPE_CHECKING:
    from baton.gateway.served_model import ServedModel
    from baton.launch.http import HttpServer

log = logging.getLogger(__name__)

_BACKLOG = 2048


@dataclass(frozen=True)
class ServerOptions:
    """The flags of `baton serve` that concern HTTP and supervision."""

    host: str = "127.0.0.1"
    port: int = 8000
    access: Access = field(default_factory=Access)
    shutdown_timeout_s: float = 10.0
    max_restarts: int = 5


@dataclass(frozen=True)
class _Served:
    """What one server serves."""

    plan: Plan
    instances: tuple[InstancePlan, ...]
    disaggregation_threshold: int | None


def run_server(options: ServeOptions, server: ServerOptions, cluster: ClusterOptions) -> None:
    """Serves until a signal.  Raises `ValueError` for wrong options, `InstanceFailed` when it gives up."""
    _check(server)
    check_cluster(cluster)
    started = time.monotonic() - process_age_s()
    configure_logging(options.log_level, "gateway")
    plan = make_plan(options)
    if options.dtype == "auto" and cluster.runs_none:
        plan = replace(plan, served=replace(plan.served, dtype=""))  # "auto" is for the others' machines
    served = _Served(plan, plan_instances(plan, cluster), cluster.disaggregation_threshold)
    listener = _listen(server.host, server.port)
    with contextlib.closing(listener), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(served, server, listener, started))


def _listen(host: str, port: int) -> socket.socket:
    """Before anything is loaded, so that a taken port is known at once."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)  # connections wait until they are accepted
    except OSError as error:
        if isinstance(error, socket.gaierror):
            raise OptionError(f"--host {host}: {error.strerror}; give an address of this machine") from None
        raise OptionError(f"cannot listen on {host}:{port}: {error.strerror}; give another --port") from None
    return listener


async def _serve(served: _Served, options: ServerOptions, listener: socket.socket, started: float) -> None:
    plan = served.plan
    fatal: list[str] = []
    stopping, impatient = _stop_on_signals()

    def on_fatal(reason: str) -> None:
        fatal.append(reason)
        stopping.set()

    def on_weights(directory: str) -> str:
        fleet.use_weights(directory)
        return fingerprint(Path(directory))

    http: HttpServer | None = None
    client = ClusterClient(on_fatal=on_fatal, disaggregation_threshold=served.disaggregation_threshold)
    fleet = Fleet(served.instances, client, max_restarts=options.max_restarts)
    instances = asyncio.create_task(fleet.run(), name="fleet")
    ending = _end_requests(client, stopping, impatient, options.shutdown_timeout_s)
    spawned = asyncio.create_task(fleet.spawned(), name="spawned")
    others = [
        spawned,
        asyncio.create_task(announce(plan, client, listener, started), name="announce"),
        asyncio.create_task(ending, name="end"),
    ]
    try:
        await asyncio.wait((spawned, instances), return_when=asyncio.FIRST_COMPLETED)
        http = _make_http(plan.served, client, stopping, on_weights, options)
        serving = asyncio.create_task(http.serve(sockets=[listener]), name="http")
        await asyncio.wait((serving, instances), return_when=asyncio.FIRST_COMPLETED)
        if instances.done():
            stopping.set()
        await serving
        if instances.done():
            await instances
        if fatal:
            raise InstanceFailed(fatal[0])
    finally:
        if http is not None:
            http.close()
        await client.close()  # first: what the instances say while they are stopped is no news
        if impatient.is_set():
            fleet.kill()
        for task in (*others, instances):
            task.cancel()
        await asyncio.gather(*others, instances, return_exceptions=True)


def _make_http(
    served: ServedModel,
    client: ClusterClient,
    stopping: asyncio.Event,
    on_weights: Callable[[str], str],
    options: ServerOptions,
) -> HttpServer:
    """While the instances load, on their cores.  Raises as `create_app`."""
    from baton.launch.http import make_http

    http = make_http(
        served,
        client,
        stopping,
        access=options.access,
        on_weights=on_weights,
        shutdown_timeout_s=options.shutdown_timeout_s,
    )
    gc.collect()
    gc.freeze()  # what has been loaded stays: the garbage collector need not walk it between requests
    return http


async def _end_requests(
    client: ClusterClient, stopping: asyncio.Event, impatient: asyncio.Event, timeout_s: float
) -> None:
    """Once the server stops: what still runs after `timeout_s` gets a clear error."""
    await stopping.wait()
    client.cluster.renew_no_more()  # instances that joined cannot register any more; their requests go on
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(impatient.wait(), timeout_s)
    if client.in_flight:
        log.info("ending %d sequences that have not finished", client.in_flight)
    await client.close()


def _stop_on_signals() -> tuple[asyncio.Event, asyncio.Event]:
    """(stopping, impatient): the first SIGINT or SIGTERM ends serving gracefully, a second one at once."""
    stopping, impatient = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        if stopping.is_set():
            impatient.set()
        stopping.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    return stopping, impatient


def _check(options: ServerOptions) -> None:
    check_range("--port", options.port, 0, 65535, "a number (0: any free one)")
    check_range("--shutdown-timeout", options.shutdown_timeout_s, 0, MAX_SECONDS, "seconds")
    check_range("--max-restarts", options.max_restarts, 0, 10**6, "a number")
    check_range("--min-priority", options.access.min_priority, -(2**31), 2**31 - 1, "an integer")
