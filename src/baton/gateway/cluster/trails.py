"""Brings notes of engines to the trails of their requests, also after these are gone.  No I/O.

P's word that a request was handed over comes with its notes, often after D's first tokens, and after the end
of a short answer; that of a cancelled request comes when nobody waits for it.  So the trails of the last ids
that were given up are kept for a while.
"""

from __future__ import annotations

from collections import OrderedDict

from baton.gateway.cluster.member import Member
from baton.gateway.cluster.request import EngineRequest
from baton.observe.events.trail import Trail
from baton.protocol.messages.requests import Finished

_MAX_RETIRED = 512


class Trails:
    """Of the requests of one gateway."""

    def __init__(self) -> None:
        self._retired: OrderedDict[int, Trail] = OrderedDict()

    def retired(self, request: EngineRequest) -> None:
        """The request is not known by its id any more."""
        if request.trail is not None:
            self._retired[request.id] = request.trail
            if len(self._retired) > _MAX_RETIRED:
                self._retired.popitem(last=False)

    def told(self, request: EngineRequest | None, sender: Member, finished: Finished, now: float) -> None:
        """An engine says that a request has ended with it; `request`: whose id that is now, if anybody's."""
        if finished.notes:
            trail = self._retired.get(finished.id) if request is None else request.trail
            if trail is not None:
                trail.tell(finished.id, sender.name, finished.notes, sender.clock, now)
