"""`baton serve` as a process: HTTP server, gateway and the supervisors of its instances on one event loop.

HTTP answers from the first moment (`/health` 200, `/ready` 503 with the reason) while the instances
load their model.  SIGINT and SIGTERM stop accepting and give running requests `shutdown_timeout_s` to end;
those that have not are then answered with an error, and the instances are stopped.  A second signal
does that at once and kills the instances.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import uvicorn
import uvloop

from baton.gateway.app import create_app
from baton.gateway.cluster_client import ClusterClient
from baton.launch.announce import announce
from baton.launch.checkpoint import fingerprint
from baton.launch.cluster_options import ClusterOptions, InstancePlan, check_cluster, plan_instances
from baton.launch.fleet import Fleet
from baton.launch.options import OptionError, Plan, ServeOptions, make_plan
from baton.launch.supervisor import InstanceFailed
from baton.observe.logs import configure_logging

log = logging.getLogger(__name__)

_ANSWERING_S = 5.0
"""What the last answers may take to be written."""


@dataclass(frozen=True)
class ServerOptions:
    """The flags of `baton serve` that concern HTTP and supervision."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
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
    started = time.monotonic() - _process_age_s()
    configure_logging(options.log_level, "gateway")
    plan = make_plan(options)
    if options.dtype == "auto" and cluster.runs_none:
        plan = replace(plan, served=replace(plan.served, dtype=""))  # "auto" is for the others' machines
    served = _Served(plan, plan_instances(plan, cluster), cluster.disaggregation_threshold)
    listener = _listen(server.host, server.port)
    with contextlib.closing(listener), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(served, server, listener, started))


def _listen(host: str, port: int) -> socket.socket:
    """Binds before anything is loaded, so that a taken port is known at once."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        if isinstance(error, socket.gaierror):
            raise OptionError(f"--host {host}: {error.strerror}; give an address of this machine") from None
        raise OptionError(f"cannot listen on {host}:{port}: {error.strerror}; give another --port") from None
    return listener


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handling, which would end the process before the instance is stopped, and
    without its ten looks a second at `should_exit`: `stop` wakes it, and once a second it updates the date
    header."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stopping = asyncio.Event()

    def stop(self) -> None:
        """Stops accepting and waits for requests to finish."""
        self.should_exit = True
        self.stopping.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.stopping.wait(), 1.0)


async def _serve(served: _Served, options: ServerOptions, listener: socket.socket, started: float) -> None:
    plan = served.plan
    fatal: list[str] = []

    def on_fatal(reason: str) -> None:
        fatal.append(reason)
        http.stop()

    client = ClusterClient(on_fatal=on_fatal, disaggregation_threshold=served.disaggregation_threshold)
    fleet = Fleet(served.instances, client, max_restarts=options.max_restarts)

    def on_weights(directory: str) -> str:
        fleet.use_weights(directory)
        return fingerprint(Path(directory))

    app = create_app(plan.served, client, api_keys=options.api_keys, on_weights=on_weights)
    http = _HttpServer(
        uvicorn.Config(
            app,
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=round(options.shutdown_timeout_s + _ANSWERING_S),
        )
    )
    impatient = _stop_on_signals(http)
    serving = asyncio.create_task(http.serve(sockets=[listener]), name="http")
    instances = asyncio.create_task(fleet.run(), name="fleet")
    others = [
        asyncio.create_task(announce(plan, client, listener, started), name="announce"),
        asyncio.create_task(_end_requests(http, client, impatient, options.shutdown_timeout_s), name="end"),
    ]
    try:
        await asyncio.wait((serving, instances), return_when=asyncio.FIRST_COMPLETED)
        if instances.done():
            http.stop()
        await serving
        if instances.done():
            await instances
        if fatal:
            raise InstanceFailed(fatal[0])
    finally:
        app.state.gateway.tokenizer.close()
        await client.close()  # first: what the instances say while they are stopped is no news
        if impatient.is_set():
            fleet.kill()
        for task in (*others, instances):
            task.cancel()
        await asyncio.gather(*others, instances, return_exceptions=True)


async def _end_requests(
    http: _HttpServer, client: ClusterClient, impatient: asyncio.Event, timeout_s: float
) -> None:
    """Once the server stops: what still runs after `timeout_s` gets a clear error."""
    await http.stopping.wait()
    client.cluster.renew_no_more()  # instances that joined cannot register any more; their requests go on
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(impatient.wait(), timeout_s)
    if client.in_flight:
        log.info("ending %d sequences that have not finished", client.in_flight)
    await client.close()


def _stop_on_signals(http: _HttpServer) -> asyncio.Event:
    """The first SIGINT or SIGTERM ends serving gracefully; a second one sets the event."""
    impatient = asyncio.Event()

    def on_signal() -> None:
        if http.stopping.is_set():
            impatient.set()
        http.stop()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    return impatient


def _check(options: ServerOptions) -> None:
    if not 0 <= options.port <= 65535:
        raise OptionError(f"--port {options.port}: give a number from 0 (any free one) to 65535")
    if not 0 <= options.shutdown_timeout_s < float("inf"):
        raise OptionError(f"--shutdown-timeout {options.shutdown_timeout_s}: give 0 or more seconds")
    if options.max_restarts < 0:
        raise OptionError(f"--max-restarts {options.max_restarts}: give 0 or more")


def _process_age_s() -> float:
    """Seconds since this process was started, imports included."""
    started = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
