"""What an engine tells all its gateways of itself: what it can hold, its weights, its label, whether it
stands still, and why it fails.  Pure.

Theory.  These facts belong to the engine, and every gateway hears of each change in a `Welcome` of its own.
So it does not matter which gateway an operator asks (`protocol/standing.py`), and a gateway that comes later
finds everything as it is.  A pause is the engine's too: the gateway that ordered it for some seconds may be
gone when they are over.

The gateway that is connected longest is the *first*: where one gateway is to act for all it is that one.
Supervisors, which watch and send nothing, do not count.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from baton.engine.outbox import Outboxes
from baton.engine.request import Outbox
from baton.protocol.messages.requests import Hello, Query, Welcome
from baton.protocol.standing import Stale, Stand, changed

log = logging.getLogger(__name__)

MAX_PAUSE_S = 1e9
UNHEARD_S = 5.0
"""An instance that fails before anybody has said `Hello` waits so long for somebody to tell why.  Its
supervisor learns through a pipe where the engine listens and says `Hello` at once; on a machine that is busy
with this very start that takes it a second or so."""


class LastWords:
    """When an instance that fails has told why.

    Whoever said `Hello` before is told when it fails, and it may leave at once.  What does not fit (a
    checkpoint) can make it fail before its supervisor is connected: then it stays until the first `Hello`,
    which is answered with the reason, and for `UNHEARD_S` at most.
    """

    def __init__(self) -> None:
        self.said = False
        """Somebody is or was there, or nobody is waited for any longer."""
        self.deadline: float | None = None
        """When nobody is waited for any longer; None: nobody is waited for."""

    def wait(self, now: float) -> None:
        """The instance has failed."""
        if not self.said and self.deadline is None:
            self.deadline = now + UNHEARD_S

    def end(self) -> None:
        """Somebody said `Hello`, or the instance is told to leave."""
        self.said, self.deadline = True, None

    def give_up(self, failure: str) -> None:
        """Nobody came in time."""
        log.critical("the instance failed, and nobody came to be told why: %s", failure)
        self.end()


class Announcements:
    """To the gateways of one engine."""

    def __init__(self, outboxes: Outboxes) -> None:
        self._outboxes = outboxes
        self._welcome: Welcome | None = None
        self._line: dict[Outbox, None] = {}
        """The gateways, in the order of their first `Hello`."""
        self.resumes_at: float | None = None
        """When a pause ends by itself."""

    @property
    def welcome(self) -> Welcome | None:
        """None until the workers are ready."""
        return self._welcome

    def begin(self, welcome: Welcome) -> None:
        """The workers are ready."""
        self._welcome = welcome
        self._tell_all()

    def change(self, **facts: Any) -> None:
        """Something that a `Welcome` says is another thing now; nothing happens before `begin`."""
        if self._welcome is not None:
            changed_ = msgspec.structs.replace(self._welcome, **facts)
            if changed_ != self._welcome:
                self._welcome = changed_
                self._tell_all()

    def hello(self, outbox: Outbox, hello: Hello) -> bool:
        """A gateway says who it is.  False: there is nothing to answer yet."""
        if not hello.watches:
            self._line.setdefault(outbox)
        if self._welcome is None:
            return False
        self._tell(outbox, self._welcome)
        return True

    def left(self, outbox: Outbox) -> None:
        """The connection to it is no more."""
        if outbox not in self._line:
            return
        first = next(iter(self._line))
        del self._line[outbox]
        if outbox is first and self._welcome is not None:
            for heir in self._line:
                self._tell(heir, self._welcome)
                break

    def stand(self, query: Query) -> dict[str, Any]:
        """Orders about its label and whether it drains; returns what is answered."""
        welcome = self._welcome
        if welcome is None:
            return {"error": "the instance is still loading", "code": "loading"}
        try:
            standing = changed(welcome.standing, query.stand or Stand())
        except Stale as error:
            return {"error": str(error), "code": "stale"}
        if standing != welcome.standing:
            log.info(
                "standing %d: %s%s",
                standing.generation,
                standing.label or "label as registered",
                ", draining" if standing.draining else "",
            )
        self.change(standing=standing)
        return {"generation": standing.generation, "label": standing.label, "draining": standing.draining}

    def pause(self, query: Query, now: float) -> bool:
        """Whether it is to stand still from now on."""
        paused = query.what == "pause"
        self.resumes_at = None
        if paused and query.argument:
            try:
                self.resumes_at = now + min(max(float(query.argument), 0.0), MAX_PAUSE_S)
            except ValueError:
                log.warning("a pause of %r seconds: no number; it lasts until it is ended", query.argument)
        self.change(paused=paused)
        return paused

    # -- inside

    def _tell_all(self) -> None:
        assert self._welcome is not None
        for outbox in self._outboxes.all_named():
            self._tell(outbox, self._welcome)

    def _tell(self, outbox: Outbox, welcome: Welcome) -> None:
        if next(iter(self._line), None) is outbox:
            welcome = msgspec.structs.replace(welcome, first=True)
        self._outboxes.reply(outbox, welcome)
