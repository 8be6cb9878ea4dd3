"""The server's side of `--ray`: a child process with Ray's driver, and what it says of the instances.

Ray's absence costs no request: instances answer the gateway directly, so as long as they run they go on.  The
driver ends when Ray does not answer (`driver.py`); once Ray had been reached, another driver is started,
again and again, which takes over the instances that are still there and places the others anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import logging
import os
import signal
import socket
import sys
from typing import Any

import msgspec

from baton.gateway.cluster.member import Label
from baton.launch.instances.supervisor import InstanceFailed
from baton.launch.limits import OptionError
from baton.launch.options import EngineOptions, ServeOptions, flags_of
from baton.launch.placing.spec import Placed, Placing, Report, Standing
from baton.launch.planning.cluster_options import is_loopback
from baton.protocol.rules.cluster_secret import Secrets

log = logging.getLogger(__name__)

_MORE_S = 60.0
"""What the driver may take to end, beyond what its instances get: its own deadlines are shorter."""
_AGAIN_S = 5.0
"""Until a Ray that did not answer is asked again."""
_PASSED_ON = {one.name for one in flags_of(EngineOptions)} | {
    "transfer",
    "transfer_checksums",
    "transfer_encryption",
    "insecure_cluster",
    "max_preparing",
    "kv_lease",
    "log_level",
    "max_restarts",
    "shutdown_timeout",
    "served_model_name",
    "node_timeout",
    "collective_encryption",
}
_NOT = {"model", "config", "num_threads"}
"""Said by other means: by position, by every flag that the file has, by the resources."""


def check_ray(options: ServeOptions) -> None:
    """Raises `OptionError` if Ray is not installed or flags do not go together."""
    if importlib.util.find_spec("ray") is None:
        raise OptionError("--ray: Ray is not installed; pip install 'baton-llm[ray]'")
    if options.uds is not None:
        raise OptionError("--uds: instances on Ray's nodes join over TCP; give --host and --port with --ray")
    if not options.prefill and not options.decode and not options.mixed:
        raise OptionError("--ray: say how many to place, such as --prefill 2 --decode 4 or --mixed 3")


def arguments_of(options: ServeOptions) -> tuple[str, ...]:
    """The flags of each instance as the server was given them, on the command line or elsewhere."""
    found: list[str] = [] if options.model is None else [str(options.model)]
    for one in flags_of(ServeOptions):
        value = getattr(options, one.name)
        if one.name not in _PASSED_ON or one.name in _NOT or value == one.read(one.default):
            continue
        if one.is_switch:
            found.append(one.option if value else f"--no-{one.option[2:]}")
        else:
            for item in value if one.many else (value,):
                found += [one.option, str(item)]
    return tuple(found)


def make_placing(
    options: ServeOptions, instances: tuple[Placed, ...], port: int, secrets: Secrets
) -> Placing:
    """`port`: where the server listens."""
    loopback = is_loopback(options.host)
    host = options.host if options.host not in ("0.0.0.0", "::") else options.peer_host or _own_address()
    ranks = max(1, options.tensor_parallel_size // options.nodes)
    threads = options.num_threads or max(1, int(options.instance_cpus) // ranks)
    join = ("--join", f"{host}:{port}", "--num-threads", str(threads))
    return Placing(
        address=options.ray or "auto",
        cluster=f"baton-{socket.gethostname().split('.')[0]}-{port}",
        instances=instances,
        cpus=options.instance_cpus,
        gpus=options.instance_gpus,
        memory=options.instance_memory or 0,
        nodes=options.nodes,
        arguments=(*arguments_of(options), *join),
        loopback=loopback,
        secrets=tuple(one.file() for one in secrets.accepted),
        stop_after_s=options.shutdown_timeout + 10,
    )


class Placement:
    """The driver while `run` runs."""

    def __init__(self, placing: Placing) -> None:
        self._placing = placing
        self._away = ""
        """Why nothing is known of Ray, after it had been reached."""
        self._pipe: asyncio.StreamWriter | None = None
        """To the driver, while there is one."""
        self._names = {one.name for one in placing.instances}
        """That any instance ever had: they are not used again."""
        self.standing: tuple[Standing, ...] = ()
        """How the instances stand with Ray, as last told."""

    @property
    def names(self) -> set[str]:
        """Of the instances that are to be there."""
        return {one.name for one in self._placing.instances}

    def add(self, label: Label) -> str:
        """One more instance is to be there; returns its name."""
        number = next(number for number in itertools.count() if f"{label}-{number}" not in self._names)
        placed = Placed(f"{label}-{number}", label)
        self._names.add(placed.name)
        self._want((*self._placing.instances, placed))
        return placed.name

    def remove(self, name: str) -> None:
        """It is not to be there any more: it drains, and Ray gets its resources back."""
        self._want(tuple(one for one in self._placing.instances if one.name != name))

    def describe(self) -> list[dict[str, Any]]:
        """Those that have no node, or of which nothing is known, for `/cluster/instances`."""
        return [
            {
                "name": one.name,
                "label": one.label,
                "state": "unknown" if self._away else one.state,
                "needs": one.needs,
                "hosts": one.hosts,
            }
            for one in self.standing
            if self._away or one.state != "placed"
        ]

    def _want(self, instances: tuple[Placed, ...]) -> None:
        self._placing = msgspec.structs.replace(self._placing, instances=instances)
        if self._pipe is not None:
            self._pipe.write(msgspec.json.encode(self._placing) + b"\n")

    async def run(self) -> None:
        """Until cancelled; then the instances drain and end.  Raises `InstanceFailed` if Ray cannot be
        reached from the start."""
        ray = f"--ray {self._placing.address}"
        while True:
            why = await self._drive()
            if not self.standing:
                raise InstanceFailed(f"{ray}: {why}; is a Ray cluster there (`ray status`)?")
            if not self._away:
                log.error(
                    "%s: %s; instances that run go on, and Ray is asked again every %g s", ray, why, _AGAIN_S
                )
            self._away = why
            self._placing = msgspec.structs.replace(self._placing, adopt=True)
            try:
                await asyncio.sleep(_AGAIN_S)
            except asyncio.CancelledError:
                self._say_what_is_left()
                raise

    async def _drive(self) -> str:
        """One driver from start to end.  Returns why it ended."""
        driver = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "baton.launch.placing.driver",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            env={key: value for key, value in os.environ.items() if not key.startswith("BATON_")},
        )
        assert driver.stdin is not None
        assert driver.stdout is not None
        self._pipe = driver.stdin
        self._want(self._placing.instances)
        why = ""
        try:
            while line := await driver.stdout.readline():
                report = msgspec.json.decode(line, type=Report)
                why = report.error or why
                self._read(report)
            code = await driver.wait()
        finally:
            self._pipe = None
            driver.stdin.close()
            if driver.returncode is None:
                await self._end(driver)
        return why or _how_it_ended(code)

    async def _end(self, driver: asyncio.subprocess.Process) -> None:
        """The pipe is closed, so the driver ends what it placed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._placing.stop_after_s + _MORE_S):
                await asyncio.shield(driver.wait())
        if driver.returncode is None:
            driver.kill()
        if driver.returncode != 0:
            self._say_what_is_left()

    def _say_what_is_left(self) -> None:
        log.error(
            "--ray %s: Ray does not answer; what still runs of %s is ended by the next server on this host "
            "and port, or with its node",
            self._placing.address,
            ", ".join(one.name for one in self._placing.instances),
        )

    def _read(self, report: Report) -> None:
        if report.note:
            log.warning("%s", report.note)
        if not report.instances:
            return
        before = {one.name: one.state for one in self.standing}
        self._away = ""
        self.standing = report.instances
        for one in report.instances:
            if one.state == before.get(one.name):
                continue
            hosts = f"{one.hosts} nodes" if one.hosts > 1 else "node"
            if one.state == "placed":
                log.info(
                    "%s: placed by Ray on %s %s", one.name, hosts, ", ".join(node[:12] for node in one.nodes)
                )
            else:
                needs = ", ".join(f"{key} {amount:g}" for key, amount in one.needs.items())
                each = f"Ray has no {one.hosts} nodes that each have" if one.hosts > 1 else "no node has"
                why = "its node is lost; " if one.state == "moving" else ""
                log.warning("%s: %s%s %s free", one.name, why, each, needs)


def _how_it_ended(code: int) -> str:
    if code == -signal.SIGALRM:
        return "Ray does not answer"
    return f"Ray's driver ended with {code}"


def _own_address() -> str:
    """By which other machines reach this one, as the system's routes say.  Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])
