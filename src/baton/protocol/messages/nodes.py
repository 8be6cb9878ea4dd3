"""Leader ↔ node: the messages of an instance whose ranks are on several hosts.

The leader's host has the engine, ranks 0, 1, … and a *link* process; each other host, a *node*, has a
*relay*, which is the parent of the ranks there.  The link listens, relays connect.  First a relay's launcher
asks (`Hello` without an incarnation) what is to be computed; then the relay itself takes part in that
incarnation. From then on there are numbered frames in both directions, over one ordered connection:

| message | from → to | carries |
| --- | --- | --- |
| `Hello` | node → leader | who it is; which incarnation, "" to ask for it |
| `Welcome` | leader → node | the answer to a question: incarnation and configuration |
| `Refused` | leader → node | why not; "later" if it is worth asking again |
| `Down` | leader → node | records of both command rings; tickets; what ranks said to meet |
| `Up` | node → leader | reports of its ranks; what they said to meet |
| `Bye` | either | why this side ends; nothing follows |

A frame says its number, counted from 1, and the number of the last frame of the other side whose content has
gone into its ring (`ack`).  A frame that does not follow the one before means that the connection has lost
something: the incarnation ends.
"""

from __future__ import annotations

import msgspec

from baton.protocol.codec import Codec
from baton.protocol.config import InstanceConfig

VERSION = 1
"""Of these messages; a relay of another one is refused."""


class Hello(msgspec.Struct, tag="hello", array_like=True, frozen=True):
    node: int
    launcher: str
    """Random, of the process that starts relays on that host: another relay of it means that the one before
    is gone."""
    incarnation: str = ""
    version: int = VERSION


class Welcome(msgspec.Struct, tag="welcome", array_like=True, frozen=True):
    incarnation: str
    config: InstanceConfig
    """As the leader has it: its paths are those of the leader's host."""


class Refused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    reason: str
    later: bool = False
    """Asking again may help."""


class Down(msgspec.Struct, tag="down", array_like=True, frozen=True):
    number: int
    ack: int
    commands: list[bytes] = []
    """Records of the command log, as in the ring."""
    transfers: list[bytes] = []
    tickets: list[tuple[int, int]] = []
    """(round, sequence): never before the records up to that sequence."""
    met: list[tuple[str, bytes]] = []


class Up(msgspec.Struct, tag="up", array_like=True, frozen=True):
    number: int
    ack: int
    reports: list[tuple[int, bytes]] = []
    """(rank, record of its report ring)."""
    met: list[tuple[str, bytes]] = []


class Bye(msgspec.Struct, tag="bye", array_like=True, frozen=True):
    reason: str
    """"": as it should be."""
    rank: int = -1
    """Whose fault it is, if it is a rank's."""


FromNode = Hello | Up | Bye
FromLeader = Welcome | Refused | Down | Bye
FROM_NODE: Codec[FromNode] = Codec(FromNode)
FROM_LEADER: Codec[FromLeader] = Codec(FromLeader)
