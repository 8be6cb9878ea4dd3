"""`baton serve --instance --join HOST:PORT`: one instance, without HTTP, that takes part in another server.

Theory.  The process runs a supervisor for its instance, as a server does, and a gateway client that sends no
requests: it is how the supervisor sees that the engine is well.  The server connects to the engine by
itself, at the address that it is told when the instance registers: where both are on one host, and `--host`
names no address that others reach, that is the socket in a private directory, and so it is for other
instances. Then nothing of the instance listens for anybody but this user.

A registration (`registration.py`) is an HTTP request that is repeated each third of its time to live, and at
once when there is a new incarnation, at each gateway of the cluster (`gateways.py`).  With `--cluster-secret`
it is signed, and so is the answer (`asking.py`).  While a server is away it is repeated with growing pauses,
and what the instance computes goes on; when the server comes back, or another one at its address, it finds
the instance again.

How it ends:

| what happens | what the process does |
| --- | --- |
| SIGINT, SIGTERM | drains (below), leaves the cluster, stops the engine, exits with 0 |
| the same again | leaves the cluster, kills the engine, exits with 0 |
| the servers refuse the instance (other model, name taken, wrong key) | says so, exits with 1 |
| the instance cannot be started, or dies too often | leaves the cluster, says so, exits with 1 |

To drain is to tell the engine so, which tells all its gateways to send nothing more, and to wait until
nothing is there.  What still runs after `--shutdown-timeout` the gateways continue elsewhere.  The
registrations are renewed meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import signal
import socket
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import msgspec
import uvloop

from baton.gateway.cluster.member import INSTANCE_NAME
from baton.gateway.errors import ApiError, InstanceUnavailable
from baton.gateway.instances.client import ClusterClient
from baton.gateway.instances.connection import InstanceClient
from baton.ipc.sockets.curve import Place
from baton.launch.announce import say
from baton.launch.instances.joining.asking import Refused, Server
from baton.launch.instances.joining.gateways import Gateways
from baton.launch.instances.joining.registration import Registrar, Registration
from baton.launch.instances.probes import Probes
from baton.launch.instances.supervisor import InstanceFailed, Supervisor
from baton.launch.limits import OptionError
from baton.launch.options import ServeOptions
from baton.launch.planning.cluster_options import (
    bracketed,
    check_cluster,
    check_reachable,
    configure,
    is_loopback,
)
from baton.launch.planning.cluster_secret import check_open, read_secrets, warn_if_open
from baton.launch.planning.node_options import check_nodes, over_hosts
from baton.launch.planning.plan import ServerPlan, make_plan
from baton.observe.logs import configure_logging
from baton.protocol.rules.cluster_secret import REGISTRATION, Secrets
from baton.protocol.weights import Weights
from baton.version import __version__

log = logging.getLogger(__name__)

T = TypeVar("T")

_MOVING_S = 5.0
"""What the server may take to move the rest, after `--shutdown-timeout`."""
_LOOK_S = 0.1
_TTL_S = 10.0
"""A registration that is not renewed for so long is void."""


def run_joined(options: ServeOptions) -> None:
    """Runs until a signal.  Raises `ValueError` for wrong options, `InstanceFailed` when it cannot go on."""
    accepted = read_secrets(options.cluster_secret)
    servers = _check(options, accepted)
    private = is_loopback(options.host) and all(is_loopback(server.host) for server in servers)
    if not private:
        options = replace(options, peer_host=options.peer_host or options.host)
    check_cluster(options)
    check_open(options)
    check_nodes(options)
    configure_logging(options.log_level, "instance", options.log_format)
    warn_if_open(options)
    plan = over_hosts(make_plan(options, note_steps=options.events_keep > 0), options)
    name = options.name or f"{options.label}-{_host_name()}-{os.getpid()}"
    config = msgspec.structs.replace(configure(plan.instance, options, instances=1), name=name)
    plan = replace(plan, instance=config)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_Joined(plan, options, servers, accepted, private=private).run())


class _Joined:
    """The process, on its event loop."""

    def __init__(
        self,
        plan: ServerPlan,
        options: ServeOptions,
        servers: Sequence[Server],
        accepted: Secrets,
        *,
        private: bool,
    ) -> None:
        self._plan = plan
        self._options = options
        self._client = ClusterClient(on_fatal=self._on_fatal, watches=True)
        self._link: InstanceClient = self._client.add(plan.instance.name, options.label)
        salt = secrets.token_hex(16)
        proof = accepted.first.key(REGISTRATION, salt).hex() if accepted else secrets.token_hex(32)
        self._link.secret = proof
        self._supervisor = Supervisor(
            plan.instance,
            self._link,
            max_restarts=options.max_restarts,
            public="" if private else f"tcp://{bracketed(options.host)}:0",
            heartbeat_idle=True,
            secret=proof,
            cluster_secrets=accepted,
        )
        self._gateways = Gateways(servers, plan.instance.name, _TTL_S)
        self._told: set[str] = set()
        self._registration = Registration(
            incarnation="",
            endpoint="",
            label=options.label,
            model=plan.served.name if options.served_model_name else None,
            process=secrets.token_hex(8),
            secret="" if accepted else proof,
            salt=salt if accepted else "",
            checkpoint=plan.served.checkpoint,
            dtype=plan.served.dtype,
            angles=plan.served.angles,
        )
        self._weights = Weights()
        self._leaving = asyncio.Event()
        self._impatient = asyncio.Event()
        self._fatal: str | None = None
        self._probes: Probes | None = None
        if options.probe_port is not None:
            self._probes = Probes(
                options.host, options.probe_port, unhealthy=self._unhealthy, unready=self._unready
            )

    async def run(self) -> None:
        started = time.monotonic()
        self._stop_on_signals()
        if self._probes is not None:
            await self._probes.start()
        await self._unless_refused(self._gateways.look())
        weights, checkpoint = self._gateways.weights
        if weights.generation and checkpoint == self._plan.served.checkpoint:
            # The same weights, from a directory of its own: pages of them are of use to the others.
            self._weights = weights
            self._supervisor.name_weights(weights)
        say(f"Baton {__version__} loads {self._plan.served.name} for {self._gateways.described}")
        supervising = asyncio.create_task(self._supervisor.run(), name="supervisor")
        registering = asyncio.create_task(self._register(started), name="registration")
        leaving = asyncio.create_task(self._leaving.wait(), name="leaving")
        tasks: tuple[asyncio.Task[Any], ...] = (supervising, registering, leaving)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if leaving.done():
                await self._drain(supervising)
            for task in (supervising, registering):
                if task.done():
                    task.result()  # raises why
            if self._fatal is not None:
                raise InstanceFailed(self._fatal)
        finally:
            registering.cancel()
            await asyncio.gather(registering, return_exceptions=True)
            await self._gateways.leave()
            await self._client.close()
            if self._impatient.is_set():
                self._supervisor.kill()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._probes is not None:
                self._probes.close()

    def _unhealthy(self) -> str:
        return self._fatal or ""

    def _unready(self) -> str:
        if self._fatal or self._leaving.is_set():
            return self._fatal or "leaving the cluster"
        if self._link.state != "ready":
            return f"the instance is {self._link.state}"
        return "" if self._gateways.connected else f"{self._gateways.described}: nobody has taken it yet"

    async def _register(self, started: float) -> None:
        """Keeps the servers informed.  Raises `InstanceFailed` when none wants this instance."""
        await self._unless_refused(
            self._gateways.run(self._registered_as, self._restarted, partial(self._renewed, started))
        )

    async def _registered_as(self) -> Registration:
        link = self._link
        await self._client.wait_for(lambda: link.state == "ready")
        return self._registration._replace(
            incarnation=link.incarnation, endpoint=self._supervisor.public or link.endpoint
        )

    def _renewed(self, started: float, registrar: Registrar) -> None:
        self._use_weights(registrar.weights)
        place = registrar.server.place
        if not registrar.connected or place in self._told:
            return
        seconds, welcome, link = time.monotonic() - started, self._link.welcome, self._link
        reached = Place.parse(self._supervisor.public or link.endpoint).address
        if not self._told:
            say(f"  {self._plan.instance.name}  {welcome.detail if welcome else ''}")
        self._told.add(place)
        label = self._options.label
        say(f"  joined {place} as {label}; it is reached at {reached}  (ready in {seconds:.1f} s)")

    def _use_weights(self, weights: Weights) -> None:
        """The server has decided that all instances have other weights: later incarnations load them."""
        if weights.newer(self._weights):
            self._weights = weights
            self._supervisor.use_weights(weights)
            checkpoint = weights.name if weights.name != weights.path else ""
            self._registration = self._registration._replace(checkpoint=checkpoint)

    async def _unless_refused(self, asking: Coroutine[Any, Any, T]) -> T:
        try:
            return await asking
        except Refused as error:
            raise InstanceFailed(str(error)) from None

    async def _restarted(self, registration: Registration) -> None:
        """Returns when there is another incarnation than the one that was registered."""
        link, old = self._link, registration.incarnation
        await self._client.wait_for(lambda: link.state == "ready" and link.incarnation != old)

    async def _drain(self, supervising: asyncio.Task[None]) -> None:
        """Returns when nothing is there any more, or it has taken too long, or somebody is impatient."""
        patience = asyncio.create_task(self._impatient.wait())
        drained = asyncio.create_task(self._until_drained(self._options.shutdown_timeout))
        try:
            await asyncio.wait(
                (patience, drained, supervising),
                timeout=self._options.shutdown_timeout + _MOVING_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            patience.cancel()
            drained.cancel()
            await asyncio.gather(patience, drained, return_exceptions=True)

    async def _until_drained(self, move_after_s: float) -> None:
        if self._link.state != "ready":
            return
        try:
            await self._client.drain(self._link.name, move_after_s)
        except ApiError as error:
            log.warning("leaving without a drain: %s", error.message)
        await self._gateways.drained()
        # Servers that do not answer, and hand-overs that end here: the engine knows.
        while await self._occupied():
            await asyncio.sleep(_LOOK_S)

    async def _occupied(self) -> bool:
        try:
            stats = await self._link.query("stats")
        except InstanceUnavailable:
            return False
        blocks = stats.get("blocks", {})
        kept = (stats.get("running"), stats.get("waiting"), blocks.get("exported"), blocks.get("reserved"))
        return any(kept)

    def _on_fatal(self, reason: str) -> None:
        self._fatal = reason
        self._leaving.set()

    def _stop_on_signals(self) -> None:
        def on_signal() -> None:
            if self._leaving.is_set():
                self._impatient.set()
            self._leaving.set()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)


def _check(options: ServeOptions, accepted: Secrets) -> list[Server]:
    if not options.instance:
        raise OptionError("--join: only for a single instance without HTTP; give --instance as well")
    if not options.join:
        raise OptionError("--instance: give the server to take part in, --join HOST:PORT")
    if options.prefill or options.decode or options.mixed is not None:
        raise OptionError(
            "--prefill, --decode, --mixed: a server's; an instance that joins is one, give it a --label"
        )
    if options.name is not None and not INSTANCE_NAME.match(options.name):
        raise OptionError(
            f"--name {options.name}: give 1 to 63 letters, digits, '.', '_' or '-', a letter or digit first"
        )
    check_reachable("--host", options.host)
    key = options.admin_key[0] if options.admin_key else None
    return [Server.parse(text, key, accepted) for text in dict.fromkeys(options.join)]


def _host_name() -> str:
    return re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname().split(".")[0])[:32] or "host"
