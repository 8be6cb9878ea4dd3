"""The gateways that an instance takes part in: those of each `--join`, and of each address of a name.

Theory.  Each gateway has a `Registrar` and a task that repeats its registration.  A name that resolves to
several addresses (a headless Service of Kubernetes, a record of several A) means as many gateways: it is
looked up again every `RESOLVE_S`, and each address is asked under that name (`Host`, certificate).

| what happens | what follows |
| --- | --- |
| an address is new | the instance registers there |
| an address is gone from the name | it stays registered there while the gateway answers: it may be draining |
| a gateway is away | it is asked again with growing pauses; the others do not notice |
| a gateway is started anew at its address | the next renewal registers the instance there |
| the name cannot be resolved | what is known stays |
| a gateway refuses the instance, and no other one has taken it | the instance ends, with the reason |
| the same, while another one has it | one line in the log; it is asked again |
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from baton.launch.instances.joining.asking import Refused, Server, ServerAway
from baton.launch.instances.joining.registration import Registrar, Registration
from baton.launch.planning.cluster_options import is_loopback
from baton.protocol.weights import Weights

log = logging.getLogger(__name__)

RESOLVE_S = 5.0
_LOOK_S = 0.1
MAX_GATEWAYS = 64
"""Addresses of one name; more are not asked."""

Resolve = Callable[[Server], list[Server]]


def resolve(server: Server) -> list[Server]:
    """One for each address of its name; itself, if that is one of this machine or an address.  Blocks;
    raises `OSError`."""
    host = server.host
    if is_loopback(host):
        return [server]
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    addresses = sorted({str(entry[4][0]) for entry in found})[:MAX_GATEWAYS]
    return [server] if addresses == [host] else [server.at(address) for address in addresses]


class Gateways:
    """Of one instance called `name`, until `leave`.  Belongs to one event loop."""

    def __init__(
        self, servers: Sequence[Server], name: str, ttl_s: float, resolve: Resolve = resolve
    ) -> None:
        self._servers = servers
        self._name = name
        self._ttl_s = ttl_s
        self._resolve = resolve
        self._registrars: dict[tuple[str, str], Registrar] = {}
        """By URL and address."""
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._unresolved: set[str] = set()

    @property
    def described(self) -> str:
        """For people."""
        return " and ".join(server.url for server in self._servers)

    @property
    def connected(self) -> list[Registrar]:
        """Those of gateways that use the instance."""
        return [one for one in self._registrars.values() if one.connected]

    @property
    def weights(self) -> tuple[Weights, str]:
        """The newest that a gateway has decided, and the checkpoint that it served when it was looked at."""
        newest = max(
            self._registrars.values(),
            key=lambda one: (one.weights.generation, one.weights.name),
            default=None,
        )
        return (Weights(), "") if newest is None else (newest.weights, newest.checkpoint)

    async def look(self) -> None:
        """Before anything is loaded: whether those that are there would take the name.  Raises `Refused`."""
        await self._find()
        await asyncio.gather(*map(self._look, self._registrars.values()))

    async def run(
        self,
        say: Callable[[], Awaitable[Registration]],
        changed: Callable[[Registration], Awaitable[None]],
        renewed: Callable[[Registrar], None],
    ) -> None:
        """Keeps the instance registered.  `say`: waits until there is something to register; `changed`:
        returns when that is not it any more; `renewed` is called after each renewal.  Raises `Refused` when
        nobody wants the instance."""
        try:
            while True:
                for key, registrar in list(self._registrars.items()):
                    if key not in self._tasks:
                        repeated = self._repeat(registrar, say, changed, renewed)
                        self._tasks[key] = asyncio.create_task(repeated, name=f"registration {key}")
                looked = asyncio.create_task(asyncio.sleep(RESOLVE_S))
                tasks = (looked, *self._tasks.values())
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)  # (the others end by an error)
                looked.cancel()
                for task in self._tasks.values():
                    if task.done():
                        task.result()
                await self._find()
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def drained(self) -> None:
        """Returns when nothing of the gateways that are there is at the instance, or may come to it."""
        await asyncio.gather(*map(self._drained, self.connected))

    async def leave(self) -> None:
        """After `run` has ended."""
        await asyncio.gather(*(one.leave() for one in self._registrars.values()))

    # -- inside

    async def _look(self, registrar: Registrar) -> None:
        try:
            await registrar.look()
        except Refused as error:
            raise _refused(registrar, error) from None

    async def _repeat(
        self,
        registrar: Registrar,
        say: Callable[[], Awaitable[Registration]],
        changed: Callable[[Registration], Awaitable[None]],
        renewed: Callable[[Registrar], None],
    ) -> None:
        refusal = ""
        while True:
            registration = await say()
            try:
                pause = await registrar.renew(registration)
            except Refused as error:
                registrar.registered = registrar.connected = False
                if not any(one.registered for one in self._registrars.values()):
                    raise _refused(registrar, error) from None
                if str(error) != refusal:
                    log.error("%s refuses the instance: %s; others have it", registrar.server.place, error)
                refusal, pause = str(error), self._ttl_s
            else:
                refusal = ""
                renewed(registrar)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await changed(registration)

    async def _drained(self, registrar: Registrar) -> None:
        try:
            while not await registrar.drained():
                await asyncio.sleep(_LOOK_S)
        except (Refused, ServerAway) as error:
            log.warning("leaving without %s: %s", registrar.server.place, error)

    async def _find(self) -> None:
        """Looks the names up; forgets what is no address of them any more, and away."""
        there: dict[tuple[str, str], Server] = {}
        for server in self._servers:
            try:
                found = await asyncio.to_thread(self._resolve, server)
                self._unresolved.discard(server.url)
            except OSError as error:
                if server.url not in self._unresolved:
                    self._unresolved.add(server.url)
                    log.warning("%s: %s; looking again until its name is known", server.url, _why(error))
                found = [one.server for one in self._registrars.values() if one.server.url == server.url]
            there |= {(one.url, one.address): one for one in found}
        for key, server in there.items():
            if key not in self._registrars:
                self._registrars[key] = Registrar(server, self._name, self._ttl_s)
        for key in [key for key, one in self._registrars.items() if key not in there and not one.registered]:
            del self._registrars[key]
            task = self._tasks.pop(key, None)
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                log.info("%s at %s is no gateway any more", *key)


def _refused(registrar: Registrar, error: Refused) -> Refused:
    return Refused(f"{registrar.server.place} refuses the instance: {error}")


def _why(error: OSError) -> Any:
    return error.strerror or error
