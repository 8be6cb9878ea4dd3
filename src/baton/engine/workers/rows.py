"""The rows of a step report: whose tokens it brings, and into which outboxes they go.

Theory.  Most reports have the rows of the report before, byte for byte, since most steps end no request and
begin none.  So whose rows they are is found out once (`steps.py`) and kept, until one of the requests leaves
its slot or its tokens are to go elsewhere (`Outboxes.redirect`).  What is left to do for each token is to
append it to its request; an outbox gets its tokens of a report in one piece.
"""

from __future__ import annotations

from array import array

from baton.engine.outbox import Outboxes
from baton.engine.request import Outbox, Request
from baton.protocol.codec import INT64
from baton.protocol.params.sampling import TokenLogprobs


class _Part:
    """The rows whose tokens go into one outbox."""

    __slots__ = ("ids", "outbox", "rows")

    def __init__(self, outbox: Outbox) -> None:
        self.outbox = outbox
        self.ids: array[int] = array(INT64)
        """Of their requests."""
        self.rows: list[int] = []


class Rows:
    """One request for each token of a report, all of them on a slot."""

    __slots__ = ("_parts", "_redirections", "requests")

    def __init__(self, requests: list[Request]) -> None:
        self.requests = requests
        self._parts: list[_Part] = []
        self._redirections = -1
        """When the parts were made, how many there had been."""

    def deliver(
        self, tokens: array[int], logprobs: list[tuple[int, TokenLogprobs]], outboxes: Outboxes
    ) -> None:
        """Puts the tokens, aligned with the requests, into their outboxes."""
        if self._redirections != outboxes.redirections:
            self._redirections = outboxes.redirections
            self._parts = self._divide()
        if logprobs:
            self._deliver_logprobs(logprobs)
        for part in self._parts:
            outbox = part.outbox
            outbox.ids.extend(part.ids)
            if len(self._parts) == 1:
                outbox.tokens.extend(tokens)
            else:
                outbox.tokens.extend([tokens[row] for row in part.rows])
            outboxes.touch(outbox)

    def _divide(self) -> list[_Part]:
        parts: dict[Outbox, _Part] = {}
        part: _Part | None = None
        for row, request in enumerate(self.requests):
            if part is None or request.outbox is not part.outbox:
                part = parts.get(request.outbox)
                if part is None:
                    part = parts[request.outbox] = _Part(request.outbox)
            part.ids.append(request.id)
            part.rows.append(row)
        return list(parts.values())

    def _deliver_logprobs(self, logprobs: list[tuple[int, TokenLogprobs]]) -> None:
        """Before the tokens: their places count from what the outboxes hold."""
        of_row = dict(logprobs)
        for part in self._parts:
            first = len(part.outbox.ids)
            for place, row in enumerate(part.rows, first):
                if row in of_row:
                    part.outbox.logprobs.append((place, of_row[row]))
