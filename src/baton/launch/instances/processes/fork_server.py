"""The fork server: a process that has imported what instances need, and forks them on request.

    python -P -m baton.launch.instances.processes.fork_server CONTROL_FD PARENT_PID EXECUTOR ROOM

What an instance's restart takes is mostly importing PyTorch, by processes that all import the same.  This one
imports it once, makes no thread (it looks, and leaves with `CANNOT` if a library has made one), has no locks,
sockets or memory of an instance, and waits.  A request comes over the control socket as one byte and
descriptors: a memfd with a `Request`, the child's end of an answering socket, then the child's own.

The child is forked as a child of the *server's parent* (`ipc/processes/forking.py`), which waits for it and
with which it dies.  It says its process id over the answering socket and begins when it gets a byte back; if
that socket is closed instead, its parent has given it up, and it ends.  So when this process dies in the
middle, or is too slow, and the parent starts the instance in another way, it is never started twice.

ROOM is there to be overwritten: a forked process shows its own command line in `ps`.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import signal
import socket
import sys
from typing import NoReturn

import msgspec

from baton.ipc.processes.forking import (
    become,
    fork_for_parent,
    leave,
    leaving,
    num_threads,
    place_descriptors,
    set_command_line,
)
from baton.ipc.processes.process import ParentGone, die_with_parent
from baton.observe.logs import configure_logging

log = logging.getLogger(__name__)

CANNOT = 3
"""Exit status: forking is not possible here, and another server would not help."""
MOST_DESCRIPTORS = 200
"""That a child may be given (the kernel takes 253 in one message)."""
ROOM = 32 << 10
PRELOAD = {
    "torch": (
        "baton.launch.instances.processes.instance",
        "baton.engine.shell.loop",
        "baton.worker.main",
        "baton.relay.link_process",
        "baton.relay.relay_process",
        "baton.executor.torch_executor",
    ),
    "simulated": (
        "baton.launch.instances.processes.instance",
        "baton.engine.shell.loop",
        "baton.worker.main",
        "baton.relay.link_process",
        "baton.relay.relay_process",
        "baton.executor.simulated.executor",
    ),
}
"""What the instances of an executor import.  (Tests name modules instead of one.)"""


class Request(msgspec.Struct, frozen=True):
    """What is to be started: as `python -P -m MODULE ARGUMENT` would."""

    command: list[str]
    """As `ps` is to show it."""
    module: str
    """Has a function `main(forked: bool) -> int`, which finds its argument in `sys.argv`."""
    argument: str
    environment: dict[str, str]
    directory: str
    mask: int
    """That of new files."""
    cores: list[int]
    """On which it may run."""
    numbers: list[int]
    """The descriptors' numbers in the child, in the order in which they are sent."""


def serve(control: socket.socket) -> None:
    """Forks until the other end is closed."""
    while True:
        kind, descriptors, _, _ = socket.recv_fds(control, 1, 2 + MOST_DESCRIPTORS)
        if not kind:
            return
        what, answering, *given = descriptors
        try:
            pid = fork_for_parent()
        except OSError as error:
            os.write(answering, f"!{error.strerror}".encode())
            pid = -1
        if pid == 0:
            with leaving():
                control.detach()  # (this object's descriptor is about to be another one's)
                _run(what, answering, given)
        for one in descriptors:
            os.close(one)


def _run(what: int, answering: int, given: list[int]) -> NoReturn:
    """The child."""
    os.setpgid(0, 0)
    with open(what, "rb") as file:
        request = msgspec.msgpack.decode(file.read(), type=Request)
    with socket.socket(fileno=answering) as asker:
        asker.sendall(str(os.getpid()).encode())
        if not asker.recv(1):
            leave(0)
    place_descriptors(given, request.numbers)
    become(request.command, request.environment)
    os.chdir(request.directory)
    os.umask(request.mask)
    os.sched_setaffinity(0, request.cores)
    sys.argv = [request.module, request.argument]
    leave(importlib.import_module(request.module).main(forked=True))


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):  # they may reach a whole group; who asked decides
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # (`stty tostop` would stop who logs in the background)
    control, parent, executor = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    configure_logging("warning", "fork server", sys.argv[4])
    try:
        die_with_parent(parent)
    except ParentGone:
        return 1
    set_command_line(
        [sys.executable, "-P", "-m", "baton.launch.instances.processes.fork_server", *sys.argv[1:5]]
    )
    for module in PRELOAD.get(executor) or executor.split(","):
        importlib.import_module(module)
    threads = num_threads()
    if threads != 1:
        log.error(
            "a library has made threads (%d) while it was imported, so nothing can be forked", threads - 1
        )
        return CANNOT
    gc.collect()
    gc.freeze()  # the garbage collectors of the children leave it alone, so that its pages stay shared
    serve(socket.socket(fileno=control))
    return 0


if __name__ == "__main__":
    sys.exit(main())
