"""The parent of the helpers.

    python -m baton.gateway.helpers.main CONTROL_FD SETTINGS_FD PARENT_PID

It forks a helper for each connection that comes over the control socket, and does nothing else; it has no
threads, which a fork would lose.  It ends with the gateway, and its children with it.  SIGINT and SIGTERM
are the gateway's to decide about: they may reach the whole group.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from functools import partial

import msgspec

from baton.gateway.helpers.child import Helper
from baton.gateway.reading.reader import Reader
from baton.gateway.reading.settings import Settings
from baton.gateway.text.encoding import Encoding
from baton.ipc.processes.process import ParentGone, die_with_parent

_HELLO = {"role": "user", "content": [{"type": "text", "text": "hello"}]}
_CALLED = [{"id": "call00001", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
_TURNS = [
    {"role": "assistant", "content": text, "reasoning": thought, "tool_calls": calls}
    for text in ("a", None)
    for thought in ("b", None)
    for calls in (_CALLED, None)
]
_CONVERSATIONS = [
    msgspec.json.encode(body)
    for body in (
        {"messages": [_HELLO]},
        {"messages": [_HELLO], "tools": [{"type": "function", "function": {"name": "f"}}]},
        *({"messages": [{**_HELLO, "role": role}, _HELLO]} for role in ("system", "developer")),
        *({"messages": [_HELLO, turn, _HELLO]} for turn in _TURNS),
        {"messages": [_HELLO, _TURNS[0], {**_HELLO, "role": "tool", "tool_call_id": "call00001"}]},
    )
]
"""Such that a template has been asked all that is asked of templates (`text/shapes.py`)."""


def warm_up(reader: Reader) -> None:
    """Renders conversations here, so that children begin with a compiled template that has been asked how it
    wants messages: without, the first conversation takes one 9 ms and more, and each request that exceeds a
    limit costs a child.  A child tries it before, as it may be more than a job may take."""
    parent = os.getpid()
    child = os.fork()
    if not child:
        code = 1
        try:
            die_with_parent(parent)
            with socket.socket() as nobody:
                helper = Helper(nobody, reader)
                healthy = all(helper.answer("chat", body)[1] for body in _CONVERSATIONS)
            code = 0 if healthy else 1
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if status == 0:
        for body in _CONVERSATIONS:
            reader.answer("chat", body)


def serve(control: socket.socket, reader: Reader) -> None:
    """Forks until the gateway closes the control socket."""
    while True:
        kind, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not kind:
            return
        connection = socket.socket(fileno=descriptors[0])
        _fork(partial(_help, connection, reader, kind), control)
        connection.close()


def _help(connection: socket.socket, reader: Reader, kind: bytes) -> None:
    Helper(connection, reader, kind).run()


def _fork(work: Callable[[], None], not_its: socket.socket) -> None:
    """A child that does this work, and ends.  It closes the socket that is not its own."""
    parent = os.getpid()
    if os.fork():
        return
    code = 1
    try:
        not_its.close()
        die_with_parent(parent)
        work()
        code = 0
    except (OSError, ParentGone):  # the gateway has gone, or has given this helper up
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(code)


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    control, settings, parent = map(int, sys.argv[1:])
    try:
        die_with_parent(parent)
    except ParentGone:
        return 1
    with open(settings, "rb") as file:
        read = msgspec.msgpack.decode(file.read(), type=Settings)
    reader = Reader(read, None if read.encoding is None else Encoding.of(read.encoding))
    if read.template is not None:
        warm_up(reader)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # (the kernel buries the children)
    del read
    gc.collect()
    gc.freeze()  # what has been imported stays, and its pages stay shared with the children
    serve(socket.socket(fileno=control), reader)
    return 0


if __name__ == "__main__":
    sys.exit(main())
