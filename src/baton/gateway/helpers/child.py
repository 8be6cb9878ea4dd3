"""A helper: reads one body after the other, each with limits of time and memory.

A chat template is foreign code, and a body is foreign data.  So a job may use so much CPU time and so much
memory beyond what the process has, and a job that is not short gives way to everything else:

* after `GIVES_WAY_AFTER_S` of CPU time the process gives way (for good, so it ends after the answer); one for
  long bodies, a *patient* one, does so from the beginning;
* after `Settings.cpu_s`, and a little for each byte, a signal raises `OverTime` wherever the interpreter is,
  until it gets through;
* `HARD_S` later the kernel ends the process, if all that was within one native call;
* memory beyond the limit cannot be had: `MemoryError`.

CPU time, not time on the wall: a busy machine refuses nobody.

To give way is to take what the others leave (`SCHED_IDLE`): whatever wakes up goes before at once, and beside
something that computes such a process gets a turn in hundreds.  A nice one has its share instead, in turns of
up to a tick (4 ms): two of niceness 10 on two cores doubled the p99 between tokens of 16 streams, two of
`SCHED_IDLE` left it as it was.  On a machine without idle time that is nothing at all, so a job that starves
is done again by a *sharing* helper: nice from the beginning, and there is one of them (`pool.py`).

Linux may share a core between sessions first, and look at this inside of them (`CONFIG_SCHED_AUTOGROUP`), so
helpers are in the session of gateway and engines.  Sessions of their own of the lowest niceness did worse:
with several of them at work on two cores, Linux 6.18 let who woke up wait for tens of milliseconds, up to
300.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import socket
import time
from pathlib import Path
from typing import Any

import msgspec

from baton.gateway.helpers.wire import ANSWER, ENDS, GOES_ON, HELLO, JOB, PATIENT, PROMPT, SHARING
from baton.gateway.reading.failure import Failure
from baton.gateway.reading.jobs import CONVERSATIONS, JOBS, Job
from baton.gateway.reading.reader import Answer, Reader

GIVES_WAY_AFTER_S = 0.02
HARD_S = 2.0
_AGAIN_S = 0.5
_LARGE_BODY = 1 << 20
"""After a longer one the helper ends: what it has taken from the system goes back."""


class OverTime(BaseException):
    """The job has had its CPU time.  (No `Exception`: templates' errors are caught.)"""


class Helper:
    """Serves one connection until the gateway closes it."""

    def __init__(self, connection: socket.socket, reader: Reader, kind: bytes = PROMPT) -> None:
        """`kind`: as in `wire.py`."""
        self._connection = connection
        self._settings = reader.settings
        self._reader = reader
        self._memory = _address_space()
        self._kind = kind
        self._lowered = False
        """A job took long, and others should not wait for what comes next."""
        signal.signal(signal.SIGVTALRM, self._on_slow)
        signal.signal(signal.SIGPROF, _on_over_time)

    def run(self) -> None:
        self._connection.sendall(HELLO.pack(os.getpid()))  # (before: who is heard of is looked after)
        if self._kind == PATIENT:
            give_way(self._settings.nice)
        elif self._kind == SHARING:
            os.nice(self._settings.nice)
        while True:
            head = self._receive(JOB.size)
            if head is None:
                return
            number, size = JOB.unpack(head)
            body = self._receive(size)
            if body is None:
                return
            answer, healthy = self.answer(JOBS[number], bytes(body))
            ends = self._lowered or not healthy or size > _LARGE_BODY
            # (In one piece: the gateway wakes up once.)
            self._connection.sendall(ANSWER.pack(ENDS if ends else GOES_ON, len(answer)) + answer)
            if ends:
                return

    def answer(self, job: Job, body: bytes) -> tuple[bytes, bool]:
        """Within the limits.  (The answer, whether the process can go on.)"""
        settings = self._settings
        memory = settings.memory + settings.memory_per_byte * len(body)
        cpu_s = settings.cpu_s + settings.cpu_s_per_byte * len(body)
        try:
            try:
                self._limit(memory, cpu_s)
                return self._reader.answer(job, body), True
            finally:
                _no_limits()
        except OverTime:
            return _refused(f"reading them takes more than {cpu_s:.3g} s of CPU time", job), False
        except MemoryError:
            return _refused(f"reading them takes more than {memory >> 20} MiB of memory", job), False

    def _limit(self, memory: int, cpu_s: float) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (self._memory + memory, hard))
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + cpu_s + HARD_S), hard))
        gives_way = self._kind == PROMPT and not self._lowered
        signal.setitimer(signal.ITIMER_VIRTUAL, GIVES_WAY_AFTER_S if gives_way else 0.0)
        signal.setitimer(signal.ITIMER_PROF, cpu_s, _AGAIN_S)

    def _on_slow(self, *_: Any) -> None:
        if not self._lowered:
            give_way(self._settings.nice)
        self._lowered = True

    def _receive(self, size: int) -> bytearray | None:
        """So many bytes; None if the gateway has closed the connection."""
        data = bytearray(size)
        view, got = memoryview(data), 0
        while got < size:
            count = self._connection.recv_into(view[got:])
            if not count:
                return None
            got += count
        return data


def give_way(nice: int) -> None:
    """To everything else; 0: not at all."""
    if not nice:
        return
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError:  # (a sandbox may not know it)
        os.nice(nice)


def _no_limits() -> None:
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def _on_over_time(*_: Any) -> None:
    raise OverTime


def _refused(why: str, job: Job) -> bytes:
    field = {
        **dict.fromkeys(CONVERSATIONS, "messages"),
        "detokenize": "tokens",
        "embedding": "input",
        "rerank": "documents",
        "score": "text_2",
        "structure": "structured_outputs",
    }.get(job, "prompt")
    if job == "structure":
        message = f"{field}: {why}; give a smaller or simpler one"
        return msgspec.msgpack.encode(Answer(failure=Failure(message, field, "too_costly")))
    if field == "messages":
        why += " with the model's chat template"
    message = f"{field}: {why}; send fewer, or shorter ones"
    return msgspec.msgpack.encode(Answer(failure=Failure(message, field, "too_costly")))


def _address_space() -> int:
    """Bytes of this process's address space."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()
