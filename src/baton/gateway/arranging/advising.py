"""The decision as advice: somebody else adds, drains and labels instances, or does not.

Theory.  The arranger waits for what it decided.  Here nobody promises to do it.  A label is waited for as
long as for an engine that does not answer; an instance that was to be drained serves on, which reads as an
operator's no, and is advised again when it has been too many for as long as the first time.  One that was to
be added has no name before it comes: the next one that nobody knew is taken for it.

Where the gateway changes labels itself, such a change is none of the reader's: it is passed over, and what
is advised is the number of instances.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from baton.gateway.arranging.arranger import Arranger, Change, Rules
from baton.gateway.arranging.described import Described
from baton.gateway.arranging.measured import Label, Snapshot, Traffic
from baton.gateway.arranging.slo import Slo


class Advisor:
    """Of one cluster, as one of its gateways shows it."""

    def __init__(self, rules: Rules, slo: Slo | None = None) -> None:
        """`slo`: what is promised, if that is not what the gateway counts by."""
        self._rules = rules
        self._slo = slo
        self._known: dict[str, Label] = {}
        """The instances that served when something was advised last."""
        self._traffic = Traffic()
        self.arranger = Arranger(rules if slo is None else replace(rules, slo=slo))
        self.counts: Counter[Label] = Counter()
        """Instances of each label that serve."""

    def look(self, shown: Described) -> Change | None:
        """What to do now, once for each decision."""
        seen, arranger = self._counted(shown), self.arranger
        serving = {one.name: one.label for one in seen.instances if one.serves}
        self.counts = Counter(serving.values())
        pending = arranger.pending
        if pending is not None and pending.kind == "add" and not pending.name:
            new = sorted(serving.keys() - self._known.keys())
            if new:
                arranger.named(new[0])
        change = arranger.look(seen)
        if change is None:
            return None
        if change.kind == "label" and shown.changes_labels:
            arranger.refused(change)
            return None
        self._known = serving
        return change

    def wanted(self, change: Change) -> dict[Label, int]:
        """Instances of each label that will serve after it, which `look` has just returned."""
        after = Counter(self.counts)
        if change.kind != "add":
            after[self._known[change.name]] -= 1
        if change.kind != "drain":
            after[change.label] += 1
        return {label: count for label, count in after.items() if count}

    # -- inside

    def _counted(self, shown: Described) -> Snapshot:
        """A gateway that was started anew counts from 0; what it counts late by another promise says
        nothing."""
        promised = self._slo or shown.slo
        if promised != self.arranger.rules.slo:
            self.arranger = Arranger(replace(self._rules, slo=promised))
        seen = shown.seen
        if shown.slo != promised:
            seen = seen._replace(traffic=seen.traffic._replace(late=0, slow=0))
        if any(now < before for now, before in zip(seen.traffic, self._traffic, strict=True)):
            self.arranger.begin_anew(seen.now)
        self._traffic = seen.traffic
        return seen
