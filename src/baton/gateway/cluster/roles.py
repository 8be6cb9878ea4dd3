"""The cluster and what arranges it (`gateway/arranging`): gives it what is known, does what it decides.

It looks when an instance reports (`Load`), at most once in `look_s`, so a cluster that nobody uses costs
nothing; only one with more instances than it must have is looked at once a minute, until it has as few.
Of several gateways the one that leads decides (`Cluster.leads`); its order holds only if nobody has changed
the instance since it was decided, and the next decision waits until the engine has answered.
Labels and draining are done here; that an instance is to be added or ended is for the shell (`take_wanted`,
`launch/placing/scaling.py`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, Protocol

from baton.gateway.arranging.arranger import Arranger, Change
from baton.gateway.arranging.measured import InstanceView, Snapshot
from baton.gateway.cluster.member import Answer, Label, Member
from baton.gateway.cluster.table import RequestTable
from baton.gateway.errors import ApiError

log = logging.getLogger(__name__)

IDLE_LOOK_S = 60.0
"""Between two looks at a cluster without work, that may become smaller."""
_MOVE_AFTER_S = 30.0
"""What runs on an instance that is drained gets to end there."""


class Arranged(Protocol):
    """What of a cluster is needed."""

    members: dict[str, Member]
    table: RequestTable

    @property
    def leads(self) -> bool: ...

    def set_label(
        self, name: str, label: Label, now: float, only_if: int | None = None, *, answer: Answer = ...
    ) -> int: ...

    def drain(
        self, name: str, now: float, move_after_s: float | None = None, *, answer: Answer = ...
    ) -> int: ...


class Roles:
    """Of one gateway.  Without an arranger nothing is decided."""

    def __init__(self, cluster: Arranged) -> None:
        self.arranger: Arranger | None = None
        self._cluster = cluster
        self._placed: Callable[[], Collection[str]] = tuple
        self._wanted: list[Change] = []
        self._led = False

    def arrange(self, arranger: Arranger, placed: Callable[[], Collection[str]] | None = None) -> None:
        """From now on this decides.  `placed`: the names of the instances that the shell has had started and
        starts again when they are lost, and that it may end; whether they have joined yet or not."""
        self.arranger = arranger
        if placed is not None:
            self._placed = placed
        self._cluster.table.traffic.slo = arranger.rules.slo

    def look(self, now: float) -> None:
        """An instance has reported, or it is time."""
        arranger = self.arranger
        if arranger is None or now < arranger.next_look:
            return
        leads = self._cluster.leads
        if leads != self._led:
            self._led = leads
            arranger.begin_anew(now)
        if not leads:
            return
        change = arranger.look(self.snapshot(now))
        if change is None:
            return
        log.info("%s: %s", change, change.why)
        if change.kind == "label":
            self._relabel(arranger, change, now)
        else:
            if change.kind == "drain":
                self._cluster.drain(change.name, now, _MOVE_AFTER_S)
            self._wanted.append(change)

    def on_clock(self, now: float) -> None:
        due = self.next_deadline()
        if due is not None and now >= due:
            self.look(now)

    def snapshot(self, now: float) -> Snapshot:
        in_flight, decoding = Counter[str](), Counter[str]()
        table, members = self._cluster.table, self._cluster.members
        placed = self._placed()
        for request in table.running.values():
            in_flight[request.at] += 1
            decoding[request.at] += request.heard
        coming = tuple(
            name
            for name in placed
            if name not in members or not (members[name].serves or members[name].draining)
        )
        instances = tuple(
            view_of(
                member,
                now,
                decoding=decoding[name],
                in_flight=in_flight[name],
                removable=name in placed,
            )
            for name, member in members.items()
        )
        return Snapshot(now, instances, table.traffic.now(), coming)

    @property
    def wants(self) -> bool:
        """`take_wanted` has something."""
        return bool(self._wanted)

    def take_wanted(self) -> list[Change]:
        """Instances that are to be added, or to be ended when they have drained; each once."""
        wanted, self._wanted = self._wanted, []
        return wanted

    def named(self, change: Change, name: str) -> None:
        """The instance that `take_wanted` said is to be added has this name."""
        log.info("%s: it will be %s", change, name)
        if self.arranger is not None and self.arranger.pending == change:
            self.arranger.named(name)

    def next_deadline(self) -> float | None:
        """When to look although nobody reports."""
        bounds = None if self.arranger is None else self.arranger.rules.bounds
        if self.arranger is None or bounds is None or not self._led:
            return None
        serving = sum(member.serves for member in self._cluster.members.values())
        return self.arranger.next_look + IDLE_LOOK_S if serving > bounds[0] else None

    def describe(self, now: float) -> dict[str, Any] | None:
        """For people and programs; None: nothing is decided here."""
        if self.arranger is None:
            return None
        described = self.arranger.describe(now)
        return described if self._cluster.leads else described | {"waits_for": "another gateway, which leads"}

    def _relabel(self, arranger: Arranger, change: Change, now: float) -> None:
        def answered(answer: dict[str, Any] | ApiError) -> None:
            if isinstance(answer, ApiError) or "error" in answer:
                log.info("%s: it was not done, and is thought about again", change)
                arranger.refused(change)
            else:
                arranger.done(change)

        generation = self._cluster.members[change.name].standing.generation
        self._cluster.set_label(change.name, change.label, now, generation, answer=answered)


def view_of(
    member: Member, now: float, *, decoding: int, in_flight: int, removable: bool = False
) -> InstanceView:
    """What is known of an instance.  `decoding`, `in_flight`: as the table of requests says."""
    load, welcome = member.load, member.welcome
    return InstanceView(
        name=member.name,
        label=member.label,
        serves=member.serves,
        ready=member.state == "ready",
        age_s=now - member.loaded_at if in_flight else 0.0,
        queued_tokens=member.queued_tokens,
        decoding=decoding,
        reported=load.running + load.waiting if load else 0,
        in_flight=in_flight,
        slots=welcome.max_num_seqs if welcome else 1,
        num_blocks=welcome.num_blocks if welcome else 1,
        free_blocks=load.free_blocks if load else welcome.num_blocks if welcome else 1,
        prefill_tokens_per_s=load.prefill_tokens_per_s if load else 0.0,
        decode_step_s=load.decode_step_s if load else 0.0,
        removable=removable,
    )
