"""The sockets through which ranks of this host say and ask where ranks are met."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

from baton.relay.meeting import Meeting

_MAX_PACKET = 1 << 16


class MeetingSockets:
    """The other ends of the ranks of this host.  `say`: what the link, or the relay, does with it."""

    def __init__(
        self, sockets: Sequence[socket.socket], meeting: Meeting, say: Callable[[str, bytes], None]
    ) -> None:
        self._sockets = {one.fileno(): one for one in sockets}
        for one in sockets:
            one.setblocking(False)
        self._meeting = meeting
        self._say = say

    def descriptors(self) -> list[int]:
        """Of the ranks that are there."""
        return list(self._sockets)

    def turn(self) -> None:
        """Takes what was said and asked, and answers what is known."""
        for fd in list(self._sockets):
            self._read(fd)
        for who, value in self._meeting.answers():
            if who in self._sockets:
                self._sockets[who].send(value)

    def _read(self, fd: int) -> None:
        while True:
            try:
                packet = self._sockets[fd].recv(_MAX_PACKET)
            except BlockingIOError:
                return
            except ConnectionError:
                packet = b""
            if not packet:
                del self._sockets[fd]  # its rank has ended, or needs it no more
                return
            if packet[:1] == b"s":
                key, _, value = packet[1:].partition(b"\0")
                self._say(key.decode(), value)
            else:
                self._meeting.ask(fd, packet[1:].decode())
