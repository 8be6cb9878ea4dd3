"""The attempts of all departures: which there are, what each of them asks or owns, and until when.

This is the bookkeeping below `departures.py`, which decides what an event means for the request.  A decoder's
*window* is how many requests may be asking it at a time: all at first, one after it did not answer in time,
twice as many after each answer that came in time.

Over the network the workers serve pages only to readers with a *grant*: a request's decoder has one for its
pages, from when the first of them is named until the attempt is over.  It is bound to the keys that the
decoder has said its ranks prove (`Reserved.reader_keys`): no other member can use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.engine.handover.courier import Alarm, Courier
from baton.engine.handover.records import Attempt, Departure, Phase, Window
from baton.engine.scheduling.scheduler import Scheduler
from baton.protocol.codec import pack_int32
from baton.protocol.config import InstanceConfig
from baton.protocol.messages.commands import Extend, Grant, Grants, Revoke
from baton.protocol.messages.handover import Cancel, InstanceSource, Reserve, Reserved
from baton.protocol.messages.requests import Target
from baton.protocol.rules.passes import grant_token
from baton.protocol.rules.silence import Silence

_MAX_READER_KEYS = 1024
_READER_KEY_BYTES = 32


class Attempts:
    """Those of one engine."""

    def __init__(self, config: InstanceConfig, courier: Courier, scheduler: Scheduler, secret: bytes) -> None:
        """`secret`: the engine's, from which the tokens of grants are made."""
        self._grants: list[Grants] = []
        self._secret = secret
        self._revoked: list[bytes] = []
        self._config = config
        self._courier = courier
        self._scheduler = scheduler
        self._attempts: dict[tuple[int, int], Attempt] = {}
        self._windows: dict[str, Window] = {}
        self._alarm = Alarm()

    @property
    def next_deadline(self) -> float | None:
        return self._alarm.at

    def find(self, peer: str, number: int, attempt: int) -> Attempt | None:
        found = self._attempts.get((number, attempt))
        return found if found is not None and found.target.incarnation == peer else None

    def of(self, peer: str) -> list[Attempt]:
        return [attempt for attempt in self._attempts.values() if attempt.target.incarnation == peer]

    def alive(self, attempt: Attempt) -> bool:
        return self._attempts.get((attempt.departure.id, attempt.number)) is attempt

    def due(self, now: float) -> bool:
        """Whether some may be overdue."""
        return self._alarm.due(now)

    def overdue(self, now: float) -> list[Attempt]:
        """Those whose deadline has passed; what is done to one may end another."""
        return [attempt for attempt in self._attempts.values() if self._is_overdue(attempt, now)]

    def rearm(self) -> None:
        """All that were overdue have been seen to: the alarm is for the next one."""
        self._alarm.at = None
        for attempt in self._attempts.values():
            self._alarm.note(self.deadline(attempt))

    def deadline(self, attempt: Attempt) -> float | None:
        if attempt.phase is Phase.ASKING:
            return attempt.since + self._config.reserve_timeout_s
        if attempt.phase is Phase.CREDIT:
            return attempt.departure.credit_until
        return attempt.lease.deadline if attempt.lease is not None else None

    def _is_overdue(self, attempt: Attempt, now: float) -> bool:
        """A lease is over only if this engine was awake while D said nothing: to keep pages for longer is
        never wrong, and what D said meanwhile may not be read yet."""
        if attempt.lease is not None and attempt.phase not in (Phase.ASKING, Phase.CREDIT):
            return attempt.lease.look(now)
        deadline = self.deadline(attempt)
        return deadline is not None and now >= deadline

    def renew(self, attempt: Attempt, now: float) -> None:
        """D counts on the pages."""
        if attempt.lease is None:
            attempt.lease = Silence(self._config.lease_s, now)
        attempt.lease.heard(now)

    def wait_for_credit(self, departure: Departure, until: float) -> None:
        if departure.credit_until is None:
            departure.credit_until = until
        self._alarm.note(departure.credit_until)

    # -- windows

    def may_ask(self, target: Target) -> bool:
        window = self._windows.get(target.incarnation)
        return window is None or window.asking < window.size

    def answered(self, peer: str) -> None:
        """It has answered in time."""
        window = self._windows.setdefault(peer, Window(self._config.max_preparing))
        window.size = min(window.size * 2, self._config.max_preparing)

    def unanswered(self, peer: str) -> None:
        self._windows.setdefault(peer, Window(1)).size = 1

    def forget_window(self, peer: str) -> None:
        self._windows.pop(peer, None)

    # -- from the first to the last message

    def begin(self, departure: Departure, target: Target, source: InstanceSource, now: float) -> Attempt:
        """Asks a decoder."""
        request, tokens = departure.request, departure.request.tokens
        window = self._windows.setdefault(target.incarnation, Window(self._config.max_preparing))
        window.asking += 1
        departure.number += 1
        token = grant_token(self._secret, target.incarnation, departure.id, departure.number)
        attempt = Attempt(departure, departure.number, target, now, window=window, grant=token)
        departure.attempts[attempt.number] = departure.current = attempt
        self._attempts[departure.id, attempt.number] = attempt
        self._alarm.note(self.deadline(attempt))
        self._courier.know(target)
        self._courier.send(
            target,
            Reserve(
                departure.id,
                attempt.number,
                endpoint=self._courier.endpoint,
                gateway=request.gateway.name or "",
                request=request.id,
                name=request.name,
                prompt=pack_int32(tokens[: request.num_prompt]),
                generated=pack_int32(tokens[request.num_prompt : len(tokens) - len(departure.aside.tokens)]),
                sampling=request.sampling,
                stopping=request.stopping,
                priority=request.rank[0],
                cache_salt=request.cache_salt,
                source=source,
                lease_s=self._config.lease_s,
                flow=request.flow,
                plan_pass=target.plan_pass,
                grant=token,
                noted=request.notes is not None,
            ),
        )
        return attempt

    def reserved(self, attempt: Attempt, message: Reserved, now: float) -> str:
        """D holds room for it.  Returns what is wrong with the keys of its readers, "" if nothing: then no
        page server serves them, and D computes the request itself."""
        self.answered(attempt.target.incarnation)
        self.renew(attempt, now)
        self.enter(attempt, Phase.RESERVED, now)
        keys = message.reader_keys
        if len(keys) > _MAX_READER_KEYS or any(len(key) > _READER_KEY_BYTES for key in keys):
            return f"Reserved names {len(keys)} keys of readers, or one that is too long"
        attempt.reader_keys = keys
        return ""

    def grant(self, attempt: Attempt, blocks: Sequence[int]) -> None:
        """D may fetch these, all pages of the request, from now on."""
        if len(blocks) > attempt.granted:
            new = pack_int32(blocks[attempt.granted :])
            reader, lease_s = attempt.target.incarnation, self._config.lease_s
            self._grants.append(Grant(attempt.grant, reader, attempt.reader_keys, new, lease_s))
            attempt.granted = len(blocks)

    def extend(self, attempts: Sequence[Attempt]) -> None:
        """D has said that it counts on these."""
        tokens = [attempt.grant for attempt in attempts if attempt.granted]
        if tokens:
            self._grants.append(Extend(tokens, self._config.lease_s))

    def take_grants(self) -> list[Grants]:
        """What the workers are to be told of grants."""
        grants, self._grants = self._grants, []
        if self._revoked:
            grants.append(Revoke(self._revoked))
            self._revoked = []
        return grants

    def enter(self, attempt: Attempt, phase: Phase, now: float) -> None:
        self._not_asking(attempt)
        attempt.phase, attempt.since = phase, now
        self._alarm.note(self.deadline(attempt))

    def export(self, attempt: Attempt, count: int) -> None:
        """The first blocks of the request's slot stay as they are when it is released.  If D may read more of
        them, which is so where the attempt ends before all were named, it may read nothing any more: the
        others can be anybody's now, and D is only to say that it reads nothing."""
        slot = attempt.departure.request.slot
        if attempt.granted > count:
            self._revoked.append(attempt.grant)
            attempt.granted = 0
        attempt.kept = self._scheduler.ledger.export(slot, attempt.key, count)

    def tell(self, attempt: Attempt, reason: str) -> None:
        """This side of it is over."""
        cancel = Cancel(attempt.departure.id, attempt.number, by_p=True, reason=reason)
        self._courier.send(attempt.target, cancel)

    def end(self, attempt: Attempt, reason: str) -> None:
        """Ends the attempt: P tells D so, and D answers when it reads nothing any more."""
        if attempt.phase is Phase.ENDING:
            return
        self.tell(attempt, reason)
        if attempt.named:
            self.enter(attempt, Phase.ENDING, attempt.since)
            self._scheduler.ending[attempt.key] = None
            if attempt.departure.current is attempt:
                attempt.departure.current = None
        else:
            self.forget(attempt)

    def release(self, attempt: Attempt) -> None:
        """Nobody reads its pages."""
        self.forget(attempt)
        self._scheduler.give_up(attempt.key)

    def forget(self, attempt: Attempt) -> None:
        self._not_asking(attempt)
        departure = attempt.departure
        del self._attempts[departure.id, attempt.number], departure.attempts[attempt.number]
        if attempt.granted:
            self._revoked.append(attempt.grant)
        if departure.current is attempt:
            departure.current = None
        if not self._attempts:
            self._alarm.at = None

    def _not_asking(self, attempt: Attempt) -> None:
        """It takes its place out of the window in which it asked: there may be another one since, of which it
        never had a place."""
        if attempt.window is not None:
            attempt.window.asking -= 1
            attempt.window = None

    # -- for people

    def waits(self, now: float) -> list[dict[str, Any]]:
        """Who waits for what, and how long at most."""
        rows = []
        for attempt in self._attempts.values():
            request, deadline = attempt.departure.request, self.deadline(attempt)
            rows.append(
                {
                    "request": request.name or str(request.id),
                    "attempt": attempt.number,
                    "state": attempt.phase.value,
                    "peer": attempt.target.incarnation,
                    "pages": attempt.named,
                    "seconds": round(now - attempt.since, 3),
                    "seconds_left": None if deadline is None else round(deadline - now, 3),
                }
            )
        return rows

    def describe(self, key: tuple[str, int, int], now: float) -> str:
        """Of pages that are exported under this key."""
        attempt = self._attempts[key[1:]]
        request = attempt.departure.request
        left = attempt.lease.until - now if attempt.lease is not None else 0.0
        return (
            f"{request.name or request.id} to {attempt.target.incarnation}, attempt {attempt.number}, "
            f"{attempt.phase.value}, {left:.1f} s left"
        )

    def gauges(self) -> dict[str, int]:
        """Attempts by phase."""
        counts = dict.fromkeys((phase.value for phase in Phase), 0)
        for attempt in self._attempts.values():
            counts[attempt.phase.value] += 1
        return counts
