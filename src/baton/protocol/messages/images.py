"""What workers and the keeper of weight images say to each other, over a unix socket of packets.

The worker asks once; the keeper answers `Fill` or `Map`, with the memory's descriptor, when it can.  A worker
that was told to fill says `Doing` now and then, and at last `Filled`, with a descriptor of its own if the
image is a file of the weight cache.  As long as the connection lives the worker uses the image.
"""

from __future__ import annotations

import msgspec


class Ask(msgspec.Struct, tag=True, frozen=True):
    """For the image of `key`."""

    key: str
    """All that the image is a function of."""
    place: str
    """The same without the checkpoint: images of one place take each other's place."""


class Filled(msgspec.Struct, tag=True, frozen=True):
    """The image that this worker was told to fill can be mapped by others."""


class Doing(msgspec.Struct, tag=True, frozen=True):
    """How far this worker is, for who waits for it."""

    instance: str
    what: str


class Fill(msgspec.Struct, tag=True, frozen=True):
    """Nobody has made it: fill this empty memory."""


class Map(msgspec.Struct, tag=True, frozen=True):
    """Here it is."""


FromWorker = Ask | Filled | Doing
FromKeeper = Fill | Map
MOST_BYTES = 1 << 16
"""Of a message."""
