"""The parent of the helpers.

    python -m baton.gateway.helpers.main CONTROL_FD SETTINGS_FD PARENT_PID

It forks a helper for each connection that comes over the control socket, and does nothing else; it has no
threads, so its children are whole.  It ends with the gateway, and its children with it.  SIGINT and SIGTERM
are the gateway's to decide about: they may reach the whole group.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import traceback

import msgspec

from baton.gateway.helpers.child import Helper
from baton.gateway.helpers.wire import PATIENT
from baton.gateway.reading.reader import Reader, Settings
from baton.gateway.text.encoding import Encoding
from baton.ipc.process import ParentGone, die_with_parent


def serve(control: socket.socket, reader: Reader) -> None:
    """Forks until the gateway closes the control socket."""
    parent = os.getpid()
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        (descriptor,) = descriptors
        if os.fork():
            os.close(descriptor)
            continue
        control.close()
        code = 1
        try:
            die_with_parent(parent)
            Helper(socket.socket(fileno=descriptor), reader, patient=data == PATIENT).run()
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
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # (the kernel buries the children)
    control, settings, parent = map(int, sys.argv[1:])
    try:
        die_with_parent(parent)
    except ParentGone:
        return 1
    with open(settings, "rb") as file:
        read = msgspec.msgpack.decode(file.read(), type=Settings)
    reader = Reader(read, None if read.encoding is None else Encoding.of(read.encoding))
    del read
    gc.collect()
    gc.freeze()  # what has been imported stays, and its pages stay shared with the children
    serve(socket.socket(fileno=control), reader)
    return 0


if __name__ == "__main__":
    sys.exit(main())
