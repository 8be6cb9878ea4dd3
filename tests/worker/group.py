"""A stand-in for the engine: real rings and worker processes with the simulated executor."""

import signal
import subprocess
import time
from array import array

from baton.executor.simulated.executor import simulated_tokens
from baton.ipc.processes.process import wait_any
from baton.ipc.ring import RETRY_S
from baton.launch.planning.instance_config import instance_config
from baton.protocol.messages.commands import COMMANDS, TRANSFERS, CommandBatch, Control, TransferBatch
from baton.protocol.messages.reports import REPORTS, ControlDone, StepReport, WorkerFailed, WorkerReady
from baton.worker.wiring import GroupWiring, worker_argv

VOCAB = 1000
DEADLINE_S = 60.0


def make_config(**changes):
    values = {
        "model": "",
        "executor": "simulated",
        "max_model_len": 256,
        "block_size": 8,
        "num_blocks": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "vocab_size": VOCAB,
        "step_timeout_s": 60.0,
        "log_level": "warning",
    }
    return instance_config(**(values | changes))


class Group:
    """The engine's end of a worker group, with deadlines on every wait."""

    def __init__(self, config, argv=worker_argv):
        self.config = config
        self.wiring = GroupWiring(config, "")
        self.sequence = 0
        self.transfers = 0
        self.orders = 0
        self.reports = [[] for _ in range(config.tensor_parallel_size)]
        self.workers = []
        for rank in range(config.tensor_parallel_size):
            leader = self.workers[0].pid if rank else None
            wiring = self.wiring.worker(rank, leader)
            self.workers.append(subprocess.Popen(argv(wiring), pass_fds=wiring.descriptors()))
        self.wiring.close_worker_ends()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for worker in self.workers:
            if worker.poll() is None:
                worker.send_signal(signal.SIGKILL)
            worker.wait(DEADLINE_S)
        self.wiring.close()

    def send(self, *commands):
        self.sequence += 1
        self.write(COMMANDS.encode(CommandBatch(self.sequence, list(commands))))

    def transfer(self, *commands):
        """Through the ring of the transfer threads, as an engine sends fetches."""
        self.transfers += 1
        self.wiring.transfers.write(TRANSFERS.encode(TransferBatch(self.transfers, list(commands))))

    def write(self, record):
        self.wiring.commands.write(record)

    def poll(self, timeout_s=0.0):
        """Reads all reports that are there; returns those of this call as (rank, report)."""
        bell = self.wiring.doorbell
        if timeout_s:
            timeout_s = RETRY_S if self.wiring.commands.pending else timeout_s
            wait_any([bell.fileno()], timeout_s)
        bell.drain()
        self.wiring.commands.flush()
        if self.wiring.transfers is not None:
            self.wiring.transfers.flush()
        new = []
        for rank, reader in enumerate(self.wiring.reports):
            for record in reader.records():
                report = REPORTS.decode(record)
                self.reports[rank].append(report)
                new.append((rank, report))
        return new

    def wait(self, done, what):
        give_up = time.monotonic() + DEADLINE_S
        while not done():
            self.poll(0.2)
            for rank, worker in enumerate(self.workers):
                if worker.poll() not in (None, 0):
                    self.poll()
                    raise AssertionError(f"rank {rank} exited with {worker.returncode}: {self.failures()}")
            assert time.monotonic() < give_up, f"no {what} within {DEADLINE_S} s"

    def ready(self):
        self.wait(lambda: all(self.of_kind(WorkerReady, rank) for rank in range(len(self.workers))), "ready")
        return self

    def of_kind(self, kind, rank=0):
        return [report for report in self.reports[rank] if isinstance(report, kind)]

    def failures(self):
        return [
            report.message for rank in self.reports for report in rank if isinstance(report, WorkerFailed)
        ]

    def closings(self):
        return {
            (end.slot, end.epoch): end.reason.value
            for report in self.of_kind(StepReport)
            for end in report.closings
        }

    def tokens(self):
        """(slot, epoch) → tokens, in the order of the reports."""
        found = {}
        for report in self.of_kind(StepReport):
            columns = (array("i", packed) for packed in (report.slots, report.epochs, report.tokens))
            for slot, epoch, token in zip(*columns, strict=True):
                found.setdefault((slot, epoch), []).append(token)
        return found

    def wait_closed(self, *keys):
        self.wait(lambda: set(keys) <= set(self.closings()), f"closings of {keys}")

    def settle(self):
        """Until every rank has run the steps that rank 0 has reported: simulated ranks do not wait for each
        other within a step, as those of a model do.  (An order is answered after the steps before it.)"""
        self.orders += 1
        self.send(Control("stop_profile", id=self.orders))
        ranks = range(len(self.workers))
        self.wait(
            lambda: all(any(one.id == self.orders for one in self.of_kind(ControlDone, r)) for r in ranks),
            "answer to an order",
        )

    def shutdown(self):
        self.send(Control("shutdown"))
        give_up = time.monotonic() + DEADLINE_S
        while self.wiring.commands.pending and time.monotonic() < give_up:  # a small ring may be full
            self.poll(RETRY_S)
        codes = [worker.wait(give_up - time.monotonic()) for worker in self.workers]
        self.poll()
        return codes


def oracle(prompt, count):
    return simulated_tokens(prompt, count, VOCAB)
