"""The transfer thread of a worker rank: fetches what its engine asks for, and serves its own pages.

Theory.  One thread runs all transfers of a rank as tasks (`tasks.py`), beside the token loop.  Commands
come from the engine through a ring of the thread's own, or from callers of `fetch`, `drop` and `grant`.
The thread reports each `Fetched` itself, in the middle of a step if it must be: a hand-over does not wait for
the step to end. What the thread waits for always has a limit, so `close` ends it soon, with every fetch
that is under way stopped.

If the thread fails, `failure` says why and `on_failure` is called from it: the worker must not go on, because
its engine would wait for ever for fetches that nobody runs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from baton.ipc.doorbell import Doorbell
from baton.ipc.ring import RingReader
from baton.protocol.config import InstanceConfig
from baton.protocol.messages.commands import TRANSFERS, DropFetch, Fetch, Grants
from baton.protocol.messages.handover import PoolSource
from baton.protocol.messages.reports import Fetched, StrangersRefused
from baton.protocol.rules.cluster_secret import NO_SECRETS, Secrets
from baton.transfer.base import PoolView, Transport
from baton.transfer.fetcher import Fetcher
from baton.transfer.grants import GrantBook
from baton.transfer.refusals import Refusals
from baton.transfer.tasks import READ, TaskGenerator, Tasks, Wait
from baton.transfer.transports.channel import Encryption
from baton.transfer.transports.nixl import NixlTransport
from baton.transfer.transports.shared_memory import SharedMemoryTransport
from baton.transfer.transports.tcp import TcpTransport

log = logging.getLogger(__name__)

_TICK_S = 1.0
_RETRY_S = 0.001
_IDLE_S = 3600.0
_CLOSE_S = 10.0


class TransferFailed(RuntimeError):
    """The transfer thread of a worker ended without being told to."""


class TransferService:
    """Runs from `start` to `close`.  `fetch`, `drop`, `grant` and `close` are for the token loop's thread."""

    def __init__(
        self,
        rank: int,
        pool: PoolView,
        config: InstanceConfig,
        report: Callable[[Fetched | StrangersRefused], None],
        on_failure: Callable[[], None] = lambda: None,
        *,
        ring: RingReader | None = None,
        doorbell: Doorbell | None = None,
        secrets: Secrets = NO_SECRETS,
    ) -> None:
        """`report` and `on_failure` are called from the transfer thread.  `ring` holds command batches for
        it, `doorbell` is rung when there are new ones.  `secrets`: with which pages are encrypted on their
        way to other instances; without any they are not.

        Raises `ValueError` for a setting that cannot work.
        """
        self._tasks = Tasks()
        self._commands: deque[Fetch | DropFetch | Grants] = deque()
        self._ring = ring
        self._read = 0  # batches of the ring
        self._grants = GrantBook(self._look_for_grants)
        self._transports = make_transports(
            pool, config, self._tasks, self._grants, Refusals(rank, self._tasks, report), secrets
        )
        self._fetcher = Fetcher(rank, pool, self._transports, self._tasks, report)
        self.source: PoolSource | None = self._export(rank, pool)
        """How others fetch this rank's pages; None: they cannot."""
        self.failure: Exception | None = None
        self._on_failure = on_failure
        self._doorbell = doorbell or Doorbell.create()
        self._closing = False
        self._thread = threading.Thread(target=self._main, name=f"transfer-{rank}")

    def start(self) -> None:
        self._thread.start()

    def fetch(self, command: Fetch) -> None:
        """Exactly one `Fetched` will be reported for it."""
        self._commands.append(command)
        self._doorbell.ring()

    def drop(self, command: DropFetch) -> None:
        self._commands.append(command)
        self._doorbell.ring()

    def grant(self, command: Grants) -> None:
        """Who may fetch pages of this rank over the network."""
        self._commands.append(command)
        self._doorbell.ring()

    def check(self) -> None:
        """Raises `TransferFailed` if the thread has failed."""
        if self.failure is not None:
            raise TransferFailed(f"the transfer thread failed: {self.failure!r}") from self.failure

    def close(self) -> None:
        """Ends the thread and everything that it runs.  Idempotent."""
        if not self._closing:
            self._closing = True
            if self._thread.ident is not None:
                self._doorbell.ring()
                self._thread.join(_CLOSE_S)
                if self._thread.is_alive():
                    log.error("the transfer thread did not end within %.0f s", _CLOSE_S)
                    return
            else:
                self._close_all()
            self._doorbell.close()

    def _export(self, rank: int, pool: PoolView) -> PoolSource | None:
        source = plain = pool.source(rank)
        try:
            for transport in self._transports:
                source = transport.export(source)
        except BaseException:
            self._close_all()
            raise
        return None if source == plain else source

    def _main(self) -> None:
        try:
            self._tasks.start(self._take_commands(), self._commands_ended)
            while not self._closing:
                self._tasks.run_once(None)
        except Exception as error:
            log.exception("the transfer thread failed")
            self.failure = error
            self._on_failure()
        finally:
            self._close_all()

    def _take_commands(self) -> TaskGenerator:
        """The task that takes commands, and lets transports clean up."""
        while not self._closing:
            self._doorbell.drain()
            hurry = self._catch_up()
            keeping = [transport.tick() for transport in self._transports]
            seconds = _RETRY_S if hurry else _TICK_S if any(keeping) else _IDLE_S
            yield Wait(self._doorbell.fileno(), READ, seconds)

    def _catch_up(self) -> bool:
        """Does what was commanded until now.  Returns whether there is more that is not visible yet."""
        hurry = self._ring is not None and self._read_ring(self._ring)
        while self._commands:
            command = self._commands.popleft()
            if isinstance(command, Fetch):
                self._fetcher.fetch(command)
            elif isinstance(command, DropFetch):
                self._fetcher.drop(command.ids)
            else:
                self._grants.apply(command, time.monotonic())
        return hurry

    def _look_for_grants(self) -> None:
        """Nobody is woken by grants, and by the end of one."""
        if self._commands or (self._ring is not None and self._ring.has_news()):
            self._catch_up()

    def _read_ring(self, ring: RingReader) -> bool:
        """Queues what the ring holds.  Returns whether something is published but not visible yet."""
        for record in ring.records():
            batch = TRANSFERS.decode(record)
            self._read += 1
            if batch.sequence != self._read:
                raise TransferFailed(
                    f"batch {batch.sequence} of the transfer ring came as number {self._read}"
                )
            self._commands += batch.commands
        return ring.has_news()

    def _commands_ended(self, _result: Any, error: Exception | None) -> None:
        if error is not None:
            raise error

    def _close_all(self) -> None:
        self._tasks.close()
        for transport in self._transports:
            transport.close()


def make_transports(
    pool: PoolView,
    config: InstanceConfig,
    tasks: Tasks,
    grants: GrantBook,
    refusals: Refusals,
    secrets: Secrets = NO_SECRETS,
) -> list[Transport]:
    """Those that the configuration allows, in the order in which they are to be tried."""
    checksums, chosen = config.transfer_checksums, config.transfer
    found: list[Transport] = []
    if chosen in ("auto", "shared_memory"):
        found.append(SharedMemoryTransport(pool, checksums=checksums))
    if chosen == "nixl" or (chosen == "auto" and pool.memory is None and not checksums):
        found.extend(_nixl(pool, config))
    if chosen in ("auto", "tcp"):
        encryption = _encryption(secrets) if config.transfer_encryption else None
        host = config.transfer_host
        found.append(
            TcpTransport(pool, tasks, grants, refusals, host=host, checksums=checksums, encryption=encryption)
        )
    return found


def _encryption(secrets: Secrets) -> Encryption | None:
    if not secrets:
        return None
    from baton.transfer.transports.encryption import PageEncryption  # (some 50 ms, of clusters alone)

    return PageEncryption(secrets)


def _nixl(pool: PoolView, config: InstanceConfig) -> list[Transport]:
    """NIXL if it is installed and works; raises `ValueError` if it does not and was asked for."""
    asked = config.transfer == "nixl"
    if asked and config.transfer_checksums:
        raise ValueError("transfer_checksums: NIXL has none; give transfer tcp, or leave checksums off")
    try:
        return [NixlTransport(pool)]
    except ImportError as error:
        if asked:
            raise ValueError(f"transfer nixl: {error}") from None
    except Exception as error:
        if asked:
            raise ValueError(f"transfer nixl: it does not work here: {error}") from None
        log.warning("NIXL is installed but does not work here, so pages cannot be moved: %s", error)
    return []
