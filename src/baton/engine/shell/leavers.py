"""Which gateways are gone: noticed when a connection ends, not when there is something to tell them.

Theory.  What a gateway that is gone had asked for holds blocks, or a place in the queue, until its requests
are cancelled.  ZeroMQ says that *a* connection of a listening socket has ended (its monitor), and not whose;
but a ROUTER with ROUTER_MANDATORY refuses what is sent to somebody who is not there.  So when a connection
has ended the loop sends an empty `Outputs` to each gateway, and who cannot be reached is gone.

ZeroMQ's thread tells the monitor a moment before it takes the connection from the ROUTER, so the loop asks
`AGAIN_S` later as well.  It asks when it has read what is in the sockets: a request that a gateway sent last
is known then, and is cancelled with the others.

When a connection ends:

| the gateway | the connection ends |
| --- | --- |
| exits, or is killed | at once: the kernel closes it |
| its host is gone, or the way to it | `HEARTBEAT_S + SILENT_S` later at most: ZeroMQ asks for it |
| the same, with something sent and not acknowledged | `SILENT_S` later (TCP_USER_TIMEOUT) |
| is stopped (SIGSTOP), on this host | never: the kernel keeps the connection |
| is stopped, and speaks TCP | as if its host were gone |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

from baton.engine.shell.sockets import Socket
from baton.ipc.sockets.curve import Doorkeeper
from baton.ipc.sockets.zeromq import has_messages
from baton.protocol.messages.requests import FromEngine, Outputs

HEARTBEAT_S = 3.0
"""Between two questions to a connection of TCP."""
SILENT_S = 9.0
"""Who has not answered for so long is gone."""
AGAIN_S = (0.05, 0.5)
_EVENTS = 64
"""Of one socket that are read in one turn."""


def keep_asking(router: Socket, heartbeat_s: float = HEARTBEAT_S, silent_s: float = SILENT_S) -> None:
    """Ends connections of TCP behind which nobody is any more.  Before it is bound."""
    router.setsockopt(zmq.HEARTBEAT_IVL, round(heartbeat_s * 1000))
    router.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(silent_s * 1000))
    router.setsockopt(zmq.TCP_MAXRT, round(silent_s * 1000))


class Leavers:
    """Of the listening sockets of one loop.  `door` reads the monitors of those that it guards."""

    def __init__(self, door: Doorkeeper, routers: Sequence[Socket]) -> None:
        self._half_open = door.half_open
        self._seen = 0
        self._routers = routers
        self._monitors = [
            router.get_monitor_socket(zmq.EVENT_DISCONNECTED) for router in routers if not door.guards(router)
        ]
        self._looks: list[float] = []
        """When to ask, the next time first."""
        self._asked_at = float("-inf")

    def descriptors(self) -> tuple[int, ...]:
        """Readable when `turn` has something to do; ask `busy` before sleeping on them."""
        return tuple(monitor.fileno() for monitor in self._monitors)

    def busy(self) -> bool:
        return any(map(has_messages, self._monitors))

    def turn(self, now: float) -> None:
        """After the door's."""
        ended, self._seen = self._half_open.disconnected != self._seen, self._half_open.disconnected
        for monitor in self._monitors:
            limit = _EVENTS
            while limit and has_messages(monitor):
                recv_monitor_message(monitor, zmq.NOBLOCK)
                ended = True
                limit -= 1
        if ended:  # (strangers who connect and leave cost each gateway a message in `AGAIN_S[0]`, not more)
            self._looks = [max(now, self._asked_at + AGAIN_S[0]), *(now + later for later in AGAIN_S)]

    def next_deadline(self) -> float | None:
        """When `gone` is to be called at the latest."""
        return self._looks[0] if self._looks else None

    def gone(
        self, now: float, gateways: Sequence[bytes], send: Callable[[bytes, FromEngine], bool]
    ) -> list[bytes]:
        """Those of `gateways` that are no more, after what they sent was read.  `send` returns false for such
        a one."""
        if not self._looks:
            return []
        all_read = not any(map(has_messages, self._routers))
        if now < self._looks[0 if all_read else -1]:
            return []
        self._looks = [at for at in self._looks if at > now]
        self._asked_at = now
        return [identity for identity in gateways if not send(identity, Outputs())]
