"""What both ends of a connection ask of ZeroMQ: is there something to read, and an end in bounded time.

`zmq_ctx_term` waits until every closed socket has sent what it had, or its linger time is over, and it has no
deadline of its own.  A connection that is not re-made (RECONNECT_IVL -1) and breaks while its socket is
being closed can keep libzmq 4.3.5 waiting for ever: seen twice in some thirty deaths of a worker under
load, with all descriptors closed and no timer left.  A process that waits for that never ends, so nobody
starts it again.
"""

from __future__ import annotations

import logging
import threading
from typing import Any, cast

import zmq

log = logging.getLogger(__name__)

_POLLIN = int(zmq.POLLIN)  # (an operation on an enum costs as much as asking the socket)


def has_messages(socket: zmq.Socket[bytes]) -> bool:
    """Asks without taking.  It also makes the socket look at its connections, which may consume the edge of
    its descriptor: call it before sleeping on the descriptor."""
    return bool(cast(int, socket.getsockopt(zmq.EVENTS)) & _POLLIN)


def terminate(context: zmq.Context[Any], deadline_s: float, linger_ms: int = 0) -> bool:
    """Closes what sockets there are and ends the context; False if that takes longer than `deadline_s`.

    The caller uses its sockets no more: they are closed on another thread.  If it takes longer, the context
    is left to the end of the process, which is near: its threads do not keep it alive.
    """
    over = threading.Event()

    def end() -> None:
        context.destroy(linger_ms)
        over.set()

    threading.Thread(target=end, name="zmq-term", daemon=True).start()
    if over.wait(deadline_s):
        return True
    log.info("ZeroMQ still waits for a connection that is closed; leaving without it")
    return False
