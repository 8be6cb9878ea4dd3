"""The process of one worker rank: `python -m baton.worker.main WIRING`, started by the engine.

`WIRING` is a `WorkerWiring` as JSON; the descriptors that it names are inherited.  In order: die with the
engine; load the executor; start the transfer thread if the instance takes part in hand-overs; report
`WorkerReady`; run the loop.

| what happens | what the worker does |
| --- | --- |
| `Control(shutdown)`, SIGTERM | finishes the round, sends its reports, exits with 0 |
| SIGINT | nothing: a terminal sends it to the whole group, and the supervisor decides |
| any exception, a malformed record included | `WorkerFailed`, the traceback in the log, exits with 1 |
| the engine or the leader rank dies | says so in the log, exits with 1 (or is killed with the engine) |
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

import msgspec

from baton.executor.base import Executor
from baton.executor.loading import create_executor, import_executor
from baton.ipc.doorbell import Doorbell
from baton.ipc.locked import LockedRingWriter
from baton.ipc.processes.process import ParentGone, die_with_parent, open_pidfd, process_age_s
from baton.ipc.ring import RingReader
from baton.ipc.ticket import PeerDied, TicketReader, TicketWriter
from baton.observe.logs import configure_logging, unless_shown
from baton.protocol.messages.reports import (
    REPORTS,
    ControlDone,
    Fetched,
    StrangersRefused,
    WorkerFailed,
    WorkerReady,
)
from baton.protocol.rules.cluster_secret import NO_SECRETS, Secrets
from baton.transfer.service import TransferService
from baton.worker.command_log import CommandLog
from baton.worker.late_loop import loop_of, slots_of
from baton.worker.loop import Observer, WorkerLoop, flush_reports
from baton.worker.rounds import FollowerRounds, LeaderRounds, Rounds
from baton.worker.slots.composition import composition_of
from baton.worker.wiring import WorkerWiring, rendezvous_of

log = logging.getLogger(__name__)

_FAREWELL_S = 1.0
"""So long the last reports may take when the engine is behind."""
_MAX_REASON = 500


class Worker:
    """Everything of one rank that exists before its executor does: channels and pidfds."""

    def __init__(self, wiring: WorkerWiring, secrets: Secrets = NO_SECRETS) -> None:
        self._wiring = wiring
        self._secrets = secrets
        self.doorbell = Doorbell(wiring.doorbell)
        self._engine_doorbell = Doorbell(wiring.engine_doorbell)
        # The token loop and the transfer thread report in the same ring.
        self.reports = LockedRingWriter(wiring.report_ring, [self._engine_doorbell], self.doorbell)
        self._loop: WorkerLoop | None = None
        self._transfers: TransferService | None = None

    def _beside(self, work: Callable[[], ControlDone]) -> None:
        """Runs it in a thread of its own, which ends with it, or with the process; here, between two steps,
        if there is no room for a thread."""

        def run() -> None:
            self.reports.write_from_helper(REPORTS.encode(work()))

        try:
            threading.Thread(target=run, name="check", daemon=True).start()
        except RuntimeError as error:
            log.warning("checking new weights stops the steps: %s", error)
            run()

    def serve(self, observer: Observer | None = None) -> int:
        """Loads, reports ready, runs until the end.  Returns the exit code; raises nothing."""
        executor: Executor | None = None
        try:
            began_s = process_age_s()
            import_executor(self._wiring.config)
            imported_s = process_age_s()
            executor = create_executor(self._wiring.config, self._wiring.rank, rendezvous_of(self._wiring))
            if self._wiring.config.peer_endpoint:
                self._transfers = self._make_transfers(executor)
            self._loop = self._build(executor, observer)
            info = executor.info
            self._loop.emit(
                WorkerReady(
                    rank=self._wiring.rank,
                    num_blocks=info.num_blocks,
                    block_size=info.block_size,
                    tile=info.tile,
                    block_bytes=info.block_bytes,
                    vocab_size=info.vocab_size,
                    source=None if self._transfers is None else self._transfers.source,
                    detail=info.detail,
                )
            )
            log.log(
                unless_shown(logging.INFO),
                "started in %.2f s: interpreter %.2f, imports %.2f, model and KV pool %.2f",
                process_age_s(),
                began_s,
                imported_s - began_s,
                process_age_s() - imported_s,
            )
            # What has been loaded stays: the garbage collector need not walk it in the middle of a step.
            gc.collect()
            gc.freeze()
            if self._transfers is not None:
                self._transfers.start()
            self._loop.run()
            if self._transfers is not None:
                self._transfers.check()
                self._transfers.close()
            if not flush_reports(self.reports, self.doorbell, _FAREWELL_S):
                log.warning("left with %d bytes of reports unread by the engine", self.reports.bytes_queued)
            return 0
        except PeerDied as error:
            log.error("%s; leaving", error)
            if error.who != "engine":
                self._say_failed(str(error))
            return 1
        except Exception as error:
            if self._loop is None and isinstance(error, ValueError):
                # The user has to mend a model that cannot be loaded: one line, which the engine passes on.
                log.debug("the worker cannot start", exc_info=True)
                self._say_failed(" ".join(str(error).split())[:_MAX_REASON])
            else:
                log.exception("the worker failed")
                self._say_failed(_one_line(error))
            return 1
        finally:
            if self._transfers is not None:
                self._transfers.close()
            if executor is not None:
                executor.close()

    def leave(self) -> None:
        """From the SIGTERM handler."""
        if self._loop is None:
            raise SystemExit(0)  # still loading: nothing to finish
        self._loop.leave()

    def _say_failed(self, reason: str) -> None:
        self.reports.append(REPORTS.encode(WorkerFailed(self._wiring.rank, reason)))
        if not flush_reports(self.reports, self.doorbell, _FAREWELL_S):
            log.warning("the engine did not take the report of this failure in time")

    def _make_transfers(self, executor: Executor) -> TransferService:
        wiring = self._wiring

        def report(found: Fetched | StrangersRefused) -> None:
            self.reports.write_from_helper(REPORTS.encode(found))

        ring = doorbell = None
        if wiring.transfer_ring is not None and wiring.transfer_doorbell is not None:
            doorbell = Doorbell(wiring.transfer_doorbell)
            ring = RingReader(wiring.transfer_ring, wiring.reader, self._engine_doorbell)
        return TransferService(
            wiring.rank,
            executor.pool,
            wiring.config,
            report,
            on_failure=self.leave,
            ring=ring,
            doorbell=doorbell,
            secrets=self._secrets,
        )

    def _build(self, executor: Executor, observer: Observer | None) -> WorkerLoop:
        wiring, config = self._wiring, self._wiring.config
        reader = RingReader(wiring.command_ring, wiring.reader, self._engine_doorbell)
        commands = CommandLog(reader)
        return loop_of(executor)(
            rank=wiring.rank,
            slots=slots_of(
                executor,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                composition=composition_of(config),
                max_model_len=config.max_model_len,
            ),
            executor=executor,
            commands=commands,
            rounds=self._rounds(commands),
            reports=self.reports,
            transfers=self._transfers,
            observer=observer,
            note_steps=config.note_steps,
            beside=self._beside,
        )

    def _rounds(self, commands: CommandLog) -> Rounds:
        wiring, timeout_s = self._wiring, self._wiring.config.step_timeout_s
        engine = open_pidfd(wiring.engine_pid)
        if wiring.rank == 0:
            bells = [Doorbell(fd) for fd in wiring.follower_doorbells]
            tickets = None if wiring.tickets is None else TicketWriter(wiring.tickets, bells)
            return LeaderRounds(
                commands,
                self.reports,
                self.doorbell,
                engine,
                tickets=tickets,
                follower_doorbells=bells,
                timeout_s=timeout_s,
            )
        if wiring.tickets is None or wiring.leader_pid is None or wiring.leader_doorbell is None:
            raise ValueError(f"the wiring of rank {wiring.rank} lacks tickets, leader_pid or leader_doorbell")
        ticket_reader = TicketReader(
            wiring.tickets,
            wiring.follower,
            self.doorbell,
            {engine: "engine", open_pidfd(wiring.leader_pid): "leader rank"},
            Doorbell(wiring.leader_doorbell),
        )
        return FollowerRounds(commands, self.reports, ticket_reader, timeout_s=timeout_s)


def run_worker(wiring: WorkerWiring, observer: Observer | None = None) -> int:
    """The whole life of a worker process.  Returns its exit code."""
    secrets = Secrets.taken_from(os.environ)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    configure_logging(
        wiring.config.log_level, f"{wiring.config.name}/{wiring.rank}", wiring.config.log_format
    )
    try:
        die_with_parent(wiring.engine_pid)
    except ParentGone as error:
        log.error("the engine (process %d) is gone: %s", wiring.engine_pid, error)
        return 1
    worker = Worker(wiring, secrets)

    def on_sigterm(_signal: int, _frame: FrameType | None) -> None:
        worker.leave()

    signal.signal(signal.SIGTERM, on_sigterm)
    log.debug("process %d serves rank %d", os.getpid(), wiring.rank)
    return worker.serve(observer)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:_MAX_REASON]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m baton.worker.main WIRING (JSON; the engine starts its workers itself)")
    sys.exit(run_worker(msgspec.json.decode(sys.argv[1], type=WorkerWiring)))
