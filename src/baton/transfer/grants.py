"""Who may read which pages: the grants of a rank, as its engine has given them.  No I/O, the clock an
argument.

Theory.  The engine of P grants the pages of one attempt of a hand-over to one reader, D, when it names them
to it.  D shows the grant's token, which only P and D know, on a connection on which it has proved a key that
the grant names (`transports/encryption.py`): to another member that has got hold of the token nothing is
served.  (In clear nobody proves anything.)  There is no token for the whole pool.  A grant ends when P's
engine revokes it, which it does when the attempt is over and before the blocks can belong to another request,
or `seconds` after it was given or extended last: so it ends also if the engine cannot revoke it any more.

A token may be shown before it was heard of, because commands and requests take different ways: that is
`EARLY`, and to be looked at again a moment later.  One that was revoked is `OVER`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from baton.protocol.codec import unpack_int32
from baton.protocol.messages.commands import Extend, Grant, Grants

EARLY = "no such grant: what it was for is another process's, or it was never given"
OVER = "the grant is over"
FOREIGN = "the grant is another reader's"
_MAX_OVER = 4096
"""Revoked grants that are remembered, to answer at once."""


@dataclass(slots=True)
class _Granted:
    keys: set[bytes]
    until: float
    pages: set[int] = field(default_factory=set)


class GrantBook:
    """Those of one rank.  `look()` is called before each answer: it applies what has been commanded until now
    and nobody was woken for."""

    def __init__(self, look: Callable[[], None] = lambda: None) -> None:
        self._look = look
        self._of: dict[bytes, _Granted] = {}
        self._over: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._of)

    def apply(self, command: Grants, now: float) -> None:
        """Raises `MalformedMessage` for pages that are no numbers."""
        if isinstance(command, Grant):
            pages = unpack_int32(command.pages)
            granted = self._of.get(command.token)
            if granted is None:
                granted = self._of[command.token] = _Granted(set(), 0.0)
            granted.keys.update(command.keys)
            granted.pages.update(pages)
            granted.until = now + command.seconds
        elif isinstance(command, Extend):
            for token in command.tokens:
                if token in self._of:
                    self._of[token].until = now + command.seconds
        else:
            for token in command.tokens:
                self._end(token)

    def why_not(self, token: bytes, key: bytes, now: float, pages: Iterable[int] = ()) -> str:
        """Why these pages may not be read by who shows this token and has proved this key (empty: it has
        proved none, in clear); "" if they may."""
        self._look()
        granted = self._of.get(token)
        if granted is None:
            return OVER if token in self._over else EARLY
        if now >= granted.until:
            self._end(token)
            return OVER
        if key not in granted.keys:
            return FOREIGN
        foreign = next((page for page in pages if page not in granted.pages), None)
        return "" if foreign is None else f"page {foreign} is not among those of the grant"

    def _end(self, token: bytes) -> None:
        if self._of.pop(token, None) is not None:
            self._over[token] = None
            if len(self._over) > _MAX_OVER:
                self._over.popitem(last=False)
