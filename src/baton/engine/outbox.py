"""Collects what the engine sends to its gateways between two flushes.

Each gateway has one `Outbox` (`request.py`); what it holds leaves as one `Outputs`.
"""

from __future__ import annotations

from collections import OrderedDict

from baton.engine.request import Outbox, Request
from baton.protocol.messages.requests import FromEngine, Routed

_MAX_UNNAMED = 256
PROGRESS_S = 0.5
"""Between two words about how far a prompt is."""


class Outboxes:
    """Those of all gateways, and which of them hold something."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        """When the last thing happened to this engine, on its clock."""
        self._of: dict[bytes, Outbox] = {}
        self._unnamed: OrderedDict[bytes, None] = OrderedDict()
        """Of the last senders that were heard of; those that say no `Hello` are forgotten in the end."""
        self._touched: dict[Outbox, None] = {}
        self._replies: list[tuple[bytes, FromEngine]] = []
        self._farewells: list[tuple[bytes, FromEngine]] = []
        self.redirections = 0
        """How often `redirect` was called."""
        self.nowhere = Outbox(b"")
        """Where the tokens of cancelled requests go."""

    def __len__(self) -> int:
        return len(self._of)

    def of(self, identity: bytes) -> Outbox:
        """The outbox of a gateway; a new one for one that was never heard of."""
        outbox = self._of.get(identity)
        if outbox is None:
            outbox = self._of[identity] = Outbox(identity)
            self._unnamed[identity] = None
            if len(self._unnamed) > _MAX_UNNAMED:
                self._forget(self._unnamed.popitem(last=False)[0])
        return outbox

    def _forget(self, identity: bytes) -> None:
        """One that was heard of long ago, if it never said who it is and wants nothing."""
        outbox = self._of.get(identity)
        if outbox is not None and outbox.name is None and not outbox.requests:
            del self._of[identity]

    def named(self, name: str) -> Outbox | None:
        """That of the gateway which called itself so, the latest if there are several."""
        found = None
        for outbox in self._of.values():
            if outbox.name == name:
                found = outbox
        return found

    def drop(self, identity: bytes) -> Outbox | None:
        """Forgets a gateway and what was to be told to it."""
        self._unnamed.pop(identity, None)
        return self._of.pop(identity, None)

    def touch(self, outbox: Outbox) -> None:
        """The outbox got something.  What goes into a dropped one or `nowhere` is never sent."""
        self._touched[outbox] = None

    def redirect(self, request: Request, outbox: Outbox) -> None:
        """From now on the request's tokens go there."""
        request.outbox = outbox
        self.redirections += 1

    def tell_progress(self, request: Request, computed: int) -> None:
        """So many leading tokens of the prompt are computed: its client is told, if it asked, not often."""
        due, now, through = request.progress_at, self.now, computed >= request.num_prompt
        if due is None or request.num_generated or request.outbox is self.nowhere:
            return
        if now < due and not through:
            return
        request.progress_at = now + PROGRESS_S
        since = now if request.first_admitted is None else request.first_admitted
        milliseconds = round(1000 * max(0.0, now - since))
        request.gateway.progress.append((request.id, min(computed, request.num_prompt), milliseconds))
        self.touch(request.gateway)

    def reply(self, outbox: Outbox, message: FromEngine) -> None:
        """To this gateway, if it was not dropped meanwhile."""
        if self._of.get(outbox.identity) is outbox:
            self._replies.append((outbox.identity, message))

    def all_named(self) -> list[Outbox]:
        """Of every gateway that has said `Hello`, in the order of their coming."""
        return [outbox for outbox in self._of.values() if outbox.name is not None]

    def heard_of(self) -> list[bytes]:
        """Identities of gateways that have said `Hello`, or have requests here."""
        return [one.identity for one in self._of.values() if one.name is not None or one.requests]

    def tell_all(self, message: FromEngine) -> None:
        """To every gateway that has said `Hello`."""
        self._replies += self._to_all(message)

    def tell_all_last(self, message: FromEngine) -> None:
        """As `tell_all`, after everything else: what was computed is not lost because somebody leaves."""
        self._farewells += self._to_all(message)

    def _to_all(self, message: FromEngine) -> list[tuple[bytes, FromEngine]]:
        return [(outbox.identity, message) for outbox in self.all_named()]

    def take(self) -> list[tuple[bytes, FromEngine]]:
        """Everything to be sent: replies in order, for each gateway one `Routed` and one `Outputs` if it has
        any, farewells."""
        messages, self._replies = self._replies, []
        for outbox in self._touched:
            if outbox.aside:
                continue
            if outbox.routes:
                runs, outbox.routes = outbox.routes, []
                if self._of.get(outbox.identity) is outbox:
                    messages.append((outbox.identity, Routed(runs)))
            outputs = outbox.take()
            if outputs is not None and self._of.get(outbox.identity) is outbox:
                messages.append((outbox.identity, outputs))
        self._touched.clear()
        messages += self._farewells
        self._farewells = []
        return messages
