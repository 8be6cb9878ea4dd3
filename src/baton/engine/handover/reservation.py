"""Checks a `Reserve` before it gets room: each refusal says why.

A request that passes can run on this instance with the other one's pages: only the transfer of the pages can
still fail.
"""

from __future__ import annotations

from collections.abc import Callable
from hmac import compare_digest

from baton.engine.outbox import Outboxes
from baton.engine.request import NEVER, Request
from baton.engine.scheduling.prefix import root_key
from baton.engine.states import State
from baton.engine.validation import Limits, Rejected, check_submit
from baton.protocol.messages.handover import InstanceSource, RefusalCode, Reserve
from baton.protocol.messages.requests import Submit
from baton.protocol.notes import Notes
from baton.protocol.rules.passes import plan_pass

_MIN_LEASE_S, _MAX_LEASE_S = 0.01, 86_400.0


class Refusal(Exception):
    def __init__(self, code: RefusalCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Checker:
    """`number()` counts the requests of this engine; `key`: what it gives to its gateways; `caching`: it has
    a prefix index."""

    def __init__(
        self, limits: Limits, outboxes: Outboxes, number: Callable[[], int], key: bytes, *, caching: bool
    ) -> None:
        self._limits = limits
        self._outboxes = outboxes
        self._number = number
        self._key = key
        self._caching = caching

    def check(self, peer: str, message: Reserve, mine: InstanceSource | None, now: float) -> Request:
        """Returns the request as it would be here.  Raises `Refusal`.

        `peer`: who asks, by its incarnation; `mine`: where this instance's pages are; None: it takes part in
        no hand-over.
        """
        why = _incompatible(mine, message.source)
        if why:
            raise Refusal("incompatible", why)
        outbox = self._outboxes.named(message.gateway)
        if outbox is None:
            raise Refusal("unknown_gateway", f"gateway {message.gateway!r} is not connected here")
        wanted = plan_pass(self._key, message.gateway, message.request, peer)
        if not compare_digest(wanted, message.plan_pass):
            what = f"request {message.request} of {message.gateway!r}"
            raise Refusal("not_named", f"no gateway has named {peer} in the plan of {what}")
        if message.request in outbox.requests:
            raise Refusal("bad_request", f"request {message.request} of {message.gateway!r} is here already")
        if not _MIN_LEASE_S <= message.lease_s <= _MAX_LEASE_S:
            bounds = f"{_MIN_LEASE_S:g} to {_MAX_LEASE_S:g}"
            raise Refusal("bad_request", f"lease_s: {message.lease_s} must be from {bounds} seconds")
        submit = Submit(
            message.request,
            message.name,
            message.prompt,
            message.sampling,
            message.stopping,
            message.priority,
            message.cache_salt,
            message.generated,
            flow=message.flow,
        )
        try:
            tokens = check_submit(submit, self._limits)
        except Rejected as refusal:
            code: RefusalCode = "never_fits" if refusal.code == "never_fits" else "bad_request"
            raise Refusal(code, refusal.message) from None
        request = Request(
            outbox,
            message.request,
            message.name,
            tokens,
            message.sampling,
            message.stopping,
            priority=message.priority,
            number=self._number(),
            arrived=now,
            num_prompt=len(message.prompt) // 4,
            cache_salt=message.cache_salt,
            root=root_key(message.cache_salt) if self._caching else b"",
            flow=message.flow,
            state=State.ARRIVING,
        )
        request.prompt_logprobs_sent = request.num_prompt  # P has sent them, or nobody wants them
        request.routes_sent = NEVER  # P computes them, and sends them before `Handoff`
        if message.noted:
            request.notes = Notes()
            request.notes.add(now, "reserved", message.attempt, len(tokens), text=peer)
        return request


def _incompatible(mine: InstanceSource | None, theirs: InstanceSource) -> str:
    """Why pages of one cannot be used by the other, or ""."""
    if mine is None or not mine.ranks:
        return "this instance fetches no pages"
    if not theirs.ranks:
        return "the source has no ranks"
    for name in ("tile", "block_size", "weights"):
        ours, other = getattr(mine, name), getattr(theirs, name)
        if ours != other:
            return f"{name} is {other!r} there and {ours!r} here"
    one, two = mine.ranks[0], theirs.ranks[0]
    for name in ("num_layers", "total_kv_heads"):
        if getattr(one, name) != getattr(two, name):
            return f"{name} is {getattr(two, name)} there and {getattr(one, name)} here"
    return ""
