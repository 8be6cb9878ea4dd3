"""`baton serve` as a process: HTTP server, gateway and the supervisors of its instances on one event loop.

The instances are started first.  While they load their model this process imports and makes the application;
then HTTP answers (`/health` 200, `/ready` 503 with the reason), and connections that came earlier have
waited.  SIGTERM is a notice of `--drain-delay`: `/ready` answers 503, all else goes on.  Then, and with
SIGINT at once, new requests are answered 503 and running ones get `--shutdown-timeout` to end; those that
have not are then answered with an error, and the instances are stopped.  A further signal does that at once
and kills the instances.  From the notice on the next server can listen on the same port (`listening.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import msgspec
import uvloop

from baton.gateway.access import Access
from baton.gateway.instances.client import ClusterClient
from baton.gateway.sharing import SharingOptions, WeightsError, read_weights
from baton.ipc.processes.process import process_age_s
from baton.ipc.sockets.curve import Encryption
from baton.launch import status
from baton.launch.announce import announce
from baton.launch.descriptors import raise_descriptor_limit
from baton.launch.http.listening import listen_all, listen_unix
from baton.launch.http.tls import tls_context
from baton.launch.instances.fleet import Fleet
from baton.launch.instances.supervisor import InstanceFailed
from baton.launch.limits import OptionError
from baton.launch.options import ClusterOptions, RightsOptions, ServeOptions, UserOptions
from baton.launch.options.sources import Chosen
from baton.launch.placing.placement import Placement, check_ray, make_placing
from baton.launch.placing.scaling import begin_scaling
from baton.launch.placing.spec import Placed
from baton.launch.planning.arranging import check_autoscale, make_arranger, promised
from baton.launch.planning.cluster_options import InstancePlan, bracketed, check_cluster, plan_instances
from baton.launch.planning.cluster_secret import check_open, read_secrets, warn_if_open
from baton.launch.planning.node_options import check_nodes, over_hosts
from baton.launch.planning.plan import ServerPlan, make_plan
from baton.observe.logs import configure_logging
from baton.protocol.rules.cluster_secret import NO_SECRETS

if TYPE_CHECKING:
    from baton.launch.http.http_server import HttpServer

log = logging.getLogger(__name__)

_TRACES_S = 5.0
"""What is left of traces gets so long to be sent at the end."""


def make_access(options: RightsOptions, members: ClusterOptions | None = None) -> Access:
    """The flags about rights, with real paths.  Raises `OptionError`."""
    profile_dir, weights_dir = options.profile_dir, options.weights_dir
    if profile_dir is not None:
        try:
            os.makedirs(profile_dir, mode=0o700, exist_ok=True)
        except OSError as error:
            reason = f"cannot make this directory: {error.strerror}"
            raise OptionError(f"--profile-dir {profile_dir}: {reason}") from None
        profile_dir = os.path.realpath(profile_dir)
    if weights_dir is not None:
        if not os.path.isdir(weights_dir):
            raise OptionError(f"--weights-dir {weights_dir}: no such directory")
        weights_dir = os.path.realpath(weights_dir)
    secrets = read_secrets(members.cluster_secret) if members else NO_SECRETS
    try:
        return Access(
            api_keys=options.api_key,
            admin_keys=options.admin_key,
            allowed_hosts=options.allowed_host,
            allowed_origins=options.allowed_origins,
            min_priority=options.min_priority,
            profile_dir=profile_dir,
            weights_dir=weights_dir,
            cluster_secrets=secrets,
            insecure_cluster=members is not None and members.insecure_cluster,
            host_name=socket.gethostname(),
        )
    except ValueError as error:
        raise OptionError(f"--api-key, --admin-key: {error}") from None


def make_sharing(options: UserOptions, access: Access) -> SharingOptions:
    """The flags about users.  Raises `OptionError`, before anything is loaded."""
    if options.salt_by_key and not access.api_keys:
        raise OptionError("--salt-by-key: without --api-key all clients are one; give keys, or leave it out")
    if options.fair_weights is not None:
        if not options.fair_queuing:
            raise OptionError(f"--fair-weights {options.fair_weights}: not with --no-fair-queuing; drop one")
        try:
            read_weights(options.fair_weights, access)
        except WeightsError as error:
            raise OptionError(f"--fair-weights {error}") from None
    return SharingOptions(
        fair_queuing=options.fair_queuing,
        fair_weights=options.fair_weights,
        salt_by_key=options.salt_by_key,
    )


@dataclass(frozen=True)
class _Served:
    """What one server serves."""

    chosen: Chosen[ServeOptions]
    plan: ServerPlan
    instances: tuple[InstancePlan, ...]
    access: Access
    sharing: SharingOptions
    descriptors: int
    tls: ssl.SSLContext | None = None
    placed: tuple[Placed, ...] = ()
    """By Ray; then `instances` are none."""


class Guest(Protocol):
    """What is done with a server beside it, and ends it."""

    async def run(self) -> None:
        """From when HTTP answers."""

    def on_signal(self) -> bool:
        """The process was told to end; whether `run` will end therefore."""


def run_server(chosen: Chosen[ServeOptions], guest: Guest | None = None) -> None:
    """Serves until a signal, or until the guest has ended, and says nothing on stdout then.  Raises
    `ValueError` for wrong options, `InstanceFailed` when it gives up, and what the guest raises."""
    options = chosen.options
    access = make_access(options, options)
    sharing = make_sharing(options, access)
    check_cluster(options)
    check_open(options)
    check_nodes(options)
    started = time.monotonic() - process_age_s()
    configure_logging(options.log_level, "gateway", options.log_format)
    warn_if_open(options)
    descriptors = raise_descriptor_limit()
    plan = over_hosts(make_plan(options, note_steps=options.events_keep > 0), options)
    if options.dtype == "auto" and options.runs_none:
        plan = replace(plan, served=replace(plan.served, dtype=""))  # "auto" is for the others' machines
    instances = plan_instances(plan, options)
    check_autoscale(options, len(instances))
    placed: tuple[Placed, ...] = ()
    if options.ray is not None:
        check_ray(options)
        placed = tuple(Placed(one.config.name, one.label) for one in instances)
        instances = ()
    served = _Served(chosen, plan, instances, access, sharing, descriptors, placed=placed)
    tls = tls_context(options.ssl_certfile, options.ssl_keyfile)
    served = replace(served, tls=tls)
    uds = options.uds
    listeners = listen_all(options.host, options.port) if uds is None else [listen_unix(uds)]
    with contextlib.ExitStack() as stack, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for listener in listeners:
            stack.enter_context(contextlib.closing(listener))
        runner.run(_serve(served, listeners, started, guest))


async def _serve(
    served: _Served, listeners: Sequence[socket.socket], started: float, guest: Guest | None = None
) -> None:
    listener = listeners[0]
    options, plan = served.chosen.options, served.plan
    fatal: list[str] = []
    end = _End(options.drain_delay, guest)
    stopping, impatient = end.stopping, end.impatient

    def on_fatal(reason: str) -> None:
        fatal.append(reason)
        stopping.set()

    http: HttpServer | None = None
    cluster_secrets = served.access.cluster_secrets
    encrypts = cluster_secrets and options.transfer_encryption == "on"
    client = ClusterClient(
        on_fatal=on_fatal,
        disaggregation_threshold=options.disaggregation_threshold,
        encryption=Encryption(cluster_secrets) if encrypts else None,
    )
    fleet = Fleet(
        served.instances, client, max_restarts=options.max_restarts, cluster_secrets=cluster_secrets
    )
    client.on_weights = fleet.use_weights
    client.cluster.table.traffic.slo = promised(options)
    placement = _placement(served, listener)
    arranger = make_arranger(options)
    if arranger is not None:
        client.cluster.roles.arrange(arranger, None if placement is None else lambda: placement.names)
    running = fleet.run() if placement is None else placement.run()
    instances = asyncio.create_task(running, name="fleet")
    ending = _end_requests(client, stopping, impatient, options.shutdown_timeout)
    spawned = asyncio.create_task(fleet.spawned(), name="spawned")
    others = [
        spawned,
        asyncio.create_task(ending, name="end"),
    ]
    if placement is not None and options.autoscale is not None:
        others.append(begin_scaling(client, placement, on_fatal))
    if guest is None:
        placed, address = len(served.placed), _address(listener, served)
        announced = announce(plan, client, fleet.processes, address, started, placed=placed)
        announcing = asyncio.create_task(announced, name="announce")
        others.append(announcing)
    visit: list[asyncio.Task[None]] = []
    try:
        await asyncio.wait((spawned, instances), return_when=asyncio.FIRST_COMPLETED)
        http = _make_http(served, client, fleet, stopping, placement)
        end.on_notice(http.leave)
        if options.fair_weights is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _reload, http)
        if guest is None:
            others.append(asyncio.create_task(status.show(client, http.totals, announcing), name="status"))
        serving = asyncio.create_task(http.serve(sockets=list(listeners)), name="http")
        if guest is not None:
            visit.append(asyncio.create_task(guest.run(), name="guest"))
        await asyncio.wait((serving, instances, *visit), return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            stopping.set()
        await serving
        if instances.done():
            await instances
        if fatal:
            raise InstanceFailed(fatal[0])
        for task in visit:
            await task
    finally:
        if http is not None:
            http.close()
        await client.close()  # first: the client need not hear of instances that stop
        if impatient.is_set():
            fleet.kill()
        for task in (*others, *visit, instances):
            task.cancel()
        last = [] if http is None else [asyncio.to_thread(http.tell_traces, _TRACES_S)]
        await asyncio.gather(*others, *visit, instances, *last, return_exceptions=True)


def _placement(served: _Served, listener: socket.socket) -> Placement | None:
    """Of the instances that Ray places."""
    if not served.placed:
        return None
    port, secrets = listener.getsockname()[1], served.access.cluster_secrets
    return Placement(make_placing(served.chosen.options, served.placed, port, secrets))


def _make_http(
    served: _Served,
    client: ClusterClient,
    fleet: Fleet,
    stopping: asyncio.Event,
    placement: Placement | None,
) -> HttpServer:
    """While the instances load, on their cores.  Raises as `create_app`."""
    from baton.launch.http.http_server import make_http

    options = served.chosen.options
    config = served.instances[0].config if served.instances else served.plan.instance
    http = make_http(
        served.plan.served,
        client,
        stopping,
        access=served.access,
        limits=options,
        descriptors=served.descriptors,
        sharing=served.sharing,
        shutdown_timeout_s=options.shutdown_timeout,
        processes=fleet.processes,
        placing=None if placement is None else placement.describe,
        tls=served.tls,
        root_path=options.root_path,
        log_requests=options.enable_log_requests,
        events_keep=options.events_keep,
        otlp_traces_endpoint=options.otlp_traces_endpoint,
        started_with={**served.chosen.as_dict(), "instance": msgspec.to_builtins(config)},
    )
    gc.collect()
    gc.freeze()  # what has been loaded stays: the garbage collector need not walk it between requests
    return http


def _address(listener: socket.socket, served: _Served) -> str:
    """Where the server answers, for people."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"http{'' if served.tls is None else 's'}://{bracketed(host)}:{port}"


def _reload(http: HttpServer) -> None:
    """SIGHUP."""
    try:
        http.reload()
    except ValueError as error:
        log.error("SIGHUP: --fair-weights %s; what was read before stays", error)
    else:
        log.info("SIGHUP: weights were read again")


async def _end_requests(
    client: ClusterClient, stopping: asyncio.Event, impatient: asyncio.Event, timeout_s: float
) -> None:
    """Once the server stops: what still runs after `timeout_s` gets a clear error."""
    await stopping.wait()
    if client.in_flight:
        said = "stopping: %d sequences have %g s to end; another signal ends them now"
        log.info(said, client.in_flight, timeout_s)
    client.cluster.renew_no_more()  # instances that joined cannot register any more; their requests go on
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(impatient.wait(), timeout_s)
    if client.in_flight:
        log.info("ending %d sequences that have not finished", client.in_flight)
    await client.close()


class _End:
    """How the process is told to end.

    SIGTERM, which a supervisor of services sends, is a notice of `delay_s` at first: load balancers need a
    while to look for another server.  SIGINT ends serving gracefully at once, and so does any further signal;
    the next one stops waiting for what runs.
    """

    def __init__(self, delay_s: float, guest: Guest | None = None) -> None:
        self._guest = guest
        self.stopping, self.impatient = asyncio.Event(), asyncio.Event()
        self._delay_s = delay_s
        self._notified = False
        self._on_notice: Callable[[], None] = lambda: None
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._on_signal, number)

    def on_notice(self, call: Callable[[], None]) -> None:
        """Called when the server has been told to stop, or now if it has."""
        self._on_notice = call
        if self._notified:
            call()

    def _on_signal(self, number: int) -> None:
        if self._guest is not None and self._guest.on_signal():
            return
        if self.stopping.is_set() or self._guest is not None:
            self.stopping.set()
            self.impatient.set()
        elif self._notified or number == signal.SIGINT or not self._delay_s:
            self.stopping.set()
        else:
            log.info("stopping in %g s; not ready any more", self._delay_s)
            self._loop.call_later(self._delay_s, self.stopping.set)
        if not self._notified:
            self._notified = True
            self._on_notice()
