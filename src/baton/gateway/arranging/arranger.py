"""The decision: whether an instance gets another label, one is added, or one is drained, and why.

Theory.  `look` is given what is known, at most every `look_s`, and gives at most one change.  Of all
arrangements that are one change away the best has the least of the larger of the two pressures
(`pressure.py`).  A change is made when it is worth it, has been so for some looks in a row, and the last one
has had its effect:

| rule | why |
| --- | --- |
| one change in flight: the engine answered, what is added serves, what is drained is gone | not known yet |
| `cool_down_s` between two changes | what is measured is from before |
| back to what an instance was takes twice as long each time | two arrangements that are as good |
| the larger pressure is above `calm`, and falls by `gain` at least | noise is no reason |
| one instance that can prefill and one that can decode stay | else nobody would be served well |
| nothing while the report of an instance that has work is older than `stale_s` | how it is, nobody knows |
| after a pause in looking, counters start anew | a mean over the pause is not the load of now |

The number of instances follows the best arrangement of that number: one more when even that is above
`crowded`, one less when that of one fewer would be below `roomy`, for longer.  None is added while another
one is still to come, be it new or one that was lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from baton.gateway.arranging.measured import InstanceView, Label, Snapshot, Window
from baton.gateway.arranging.pressure import Load, Pressures, StepFit, load_of, pools
from baton.gateway.arranging.slo import Slo

Kind = Literal["label", "add", "drain"]
LABELS: tuple[Label, ...] = ("prefill", "decode", "mixed")
_HISTORY = 20


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What may be decided, and how fast.  Seconds unless the name says otherwise."""

    slo: Slo
    labels: bool = True
    """Labels may change."""
    bounds: tuple[int, int] | None = None
    """Fewest and most instances; None: their number is not this function's affair."""
    look_s: float = 1.0
    window_s: float = 10.0
    looks: int = 3
    """In a row, that want the same."""
    cool_down_s: float = 10.0
    longest_cool_down_s: float = 160.0
    calm: float = 0.8
    gain: float = 0.1
    stale_s: float = 5.0
    crowded: float = 0.95
    roomy: float = 0.6
    fewer_s: float = 60.0
    """For which one instance less must have been enough."""
    adding_s: float = 900.0
    """After which an instance that was asked for and did not come is asked for again."""
    answer_s: float = 60.0
    """After which an engine that was given a label and did not answer is not waited for."""


class Change(NamedTuple):
    kind: Kind
    name: str
    """Of the instance; of one that is added: the name that it shall have."""
    label: Label
    """That it gets; of one that is drained: that it had."""
    why: str

    def __str__(self) -> str:
        if self.kind == "label":
            return f"{self.name} becomes {self.label}"
        return f"{'add' if self.kind == 'add' else 'drain'} {self.name} ({self.label})"


class _Moment(NamedTuple):
    at: float
    change: Change
    before: Label
    all_before: tuple[Label, ...]
    """Labels of the instances that served, in order."""
    cool_down_s: float
    """Until this change: what had to pass before one that takes the last one back."""


class Arranger:
    """Of one gateway."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.pressures: Pressures | None = None
        """At the last look."""
        self.waits_for = "reports"
        """Why nothing is decided, for people."""
        self.num_changes = 0
        self._fit = StepFit()
        self._window = Window(rules.window_s)
        self._looked_at: float | None = None
        self._wanted: tuple[Kind, Label] | None = None
        self._wanted_looks = 0
        self._wanted_since = 0.0
        self._changed_at = float("-inf")
        self._cool_down_s = rules.cool_down_s
        self._pending: tuple[Change, float] | None = None
        """What was decided and is not so yet, and since when."""
        self._history: deque[_Moment] = deque(maxlen=_HISTORY)

    @property
    def next_look(self) -> float:
        return float("-inf") if self._looked_at is None else self._looked_at + self.rules.look_s

    def look(self, seen: Snapshot) -> Change | None:
        """What to change now; the caller does it.  A call before `next_look` changes nothing."""
        if seen.now < self.next_look:
            return None
        self._note(seen)
        serving = [one for one in seen.instances if one.serves]
        reason = self._too_early(seen, serving)
        load = None
        if not reason:
            traffic, seconds = self._window.sum(), self._window.seconds
            load = load_of(serving, traffic, seconds, self.rules.slo, self._fit)
        if load is None:
            self.waits_for = reason or "figures: nothing was computed yet"
            self._wanted = None
            return None
        self.waits_for = ""
        self.pressures = _floored(load.pressures(*pools([one.label for one in serving])), load.floor)
        change = self._best(load, serving, seen.coming)
        if not self._lasts(change, seen.now):
            return None
        assert change is not None
        if seen.now < self._changed_at + self._cool_down(change, serving):
            self.waits_for = "the last change to have its effect"
            return None
        self._decided(change, serving, seen.now)
        return change

    def describe(self, now: float) -> dict[str, Any]:
        """For people and programs."""
        rules = self.rules
        return {
            "slo": str(rules.slo),
            "labels": rules.labels,
            "bounds": None if rules.bounds is None else list(rules.bounds),
            "pressure": None
            if self.pressures is None
            else {"prefill": round(self.pressures.prefill, 3), "decode": round(self.pressures.decode, 3)},
            "waits_for": self.waits_for,
            "changes": [
                {
                    "ago_s": round(now - moment.at, 1),
                    "what": moment.change.kind,
                    "name": moment.change.name,
                    "from": moment.before,
                    "to": moment.change.label,
                    "why": moment.change.why,
                }
                for moment in reversed(self._history)
            ],
        }

    # -- inside: looking

    def _note(self, seen: Snapshot) -> None:
        paused = self._looked_at is not None and seen.now - self._looked_at > self.rules.window_s
        if paused and seen.traffic != self._window.last:
            self._window.clear()
            self._wanted = None
        self._looked_at = seen.now
        self._window.add(seen.now, seen.traffic)
        for one in seen.instances:
            if one.serves and one.label != "prefill" and one.decode_step_s > 0 and one.decoding:
                self._fit.add(one.decoding, one.decode_step_s)

    def _too_early(self, seen: Snapshot, serving: list[InstanceView]) -> str:
        """Why nothing can be decided now; "": it can."""
        if not serving:
            return "an instance that serves"
        if self._pending is not None and not self._settled(seen):
            change, _ = self._pending
            if change.kind == "label":
                return f"{change.name} to be {change.label}"
            return f"{change.name or 'one more'} to {'come' if change.kind == 'add' else 'go'}"
        stale = [one.name for one in serving if one.age_s > self.rules.stale_s]
        if stale:
            return f"a report of {', '.join(stale)}"
        if self._window.seconds < self.rules.look_s:
            return "a second look"
        return ""

    def _settled(self, seen: Snapshot) -> bool:
        assert self._pending is not None
        change, since = self._pending
        found = {one.name: one for one in seen.instances}
        one = found.get(change.name)
        patience_s = self.rules.adding_s
        if change.kind == "label":
            done = one is None or not one.ready or one.label == change.label
            patience_s = self.rules.answer_s
        elif change.kind == "add":
            done = (one is not None and one.serves) or change.name in seen.coming
        else:
            done = one is None or one.serves  # (an operator took it back)
        if done or seen.now > since + patience_s:
            self._pending = None
            return True
        return False

    # -- inside: choosing

    def _best(self, load: Load, serving: list[InstanceView], coming: Sequence[str]) -> Change | None:
        best = self._best_label(load, serving)
        if self.rules.bounds is None:
            return best
        least, most = self.rules.bounds
        labels = [one.label for one in serving]
        if len(serving) + len(coming) < least:
            label = _label_of_more(load, labels)
            return Change("add", "", label, f"fewer than {least} instances are there")
        assert self.pressures is not None
        reached = self.pressures.worst if best is None else _after(load, serving, best).worst
        if reached > self.rules.crowded and coming:
            self.waits_for = f"{', '.join(coming)} to come"
        elif reached > self.rules.crowded and len(serving) < most:
            label = _label_of_more(load, labels)
            after = load.pressures(*pools([*labels, label]))
            if after.worst < self.pressures.worst:
                return Change("add", "", label, f"{_clients(load, self.pressures)}; with one more: {after}")
        if best is None and len(serving) > least:
            return self._one_less(load, serving)
        return best

    def _best_label(self, load: Load, serving: list[InstanceView]) -> Change | None:
        assert self.pressures is not None
        if not self.rules.labels or self.pressures.worst < self.rules.calm:
            return None
        found: list[tuple[float, float, InstanceView, Label]] = []
        for one in serving:
            for label in LABELS:
                if label == one.label or not _allowed(serving, one, label):
                    continue
                after = load.pressures(*pools([label if o is one else o.label for o in serving]))
                work = one.queued_tokens if one.label == "prefill" else one.decoding
                found.append((after.worst, work, one, label))
        if not found:
            return None
        worst, _, one, label = min(found, key=lambda entry: entry[:2])
        if worst > (1.0 - self.rules.gain) * self.pressures.worst:
            return None
        after = load.pressures(*pools([label if o is one else o.label for o in serving]))
        return Change("label", one.name, label, f"{_clients(load, self.pressures)}; after it: {after}")

    def _one_less(self, load: Load, serving: list[InstanceView]) -> Change | None:
        assert self.pressures is not None
        found = []
        for one in serving:
            rest = [other for other in serving if other is not one]
            if not one.removable or not _serve_all(rest):
                continue
            after = load.pressures(*pools([other.label for other in rest]))
            if after.worst < self.rules.roomy:
                found.append((after.worst, one.decoding + one.in_flight, one))
        if not found:
            return None
        worst, _, one = min(found, key=lambda entry: entry[:2])
        return Change("drain", one.name, one.label, f"{self.pressures}; with one less: {worst:.2f} at most")

    def _lasts(self, change: Change | None, now: float) -> bool:
        """The same was wanted for some looks in a row."""
        wanted = None if change is None else (change.kind, change.label)
        if wanted != self._wanted:
            self._wanted, self._wanted_looks, self._wanted_since = wanted, 0, now
        self._wanted_looks += 1
        if change is None:
            return False
        if change.kind == "drain":
            return now - self._wanted_since >= self.rules.fewer_s
        return self._wanted_looks >= self.rules.looks

    def _cool_down(self, change: Change, serving: list[InstanceView]) -> float:
        """What must have passed since the last change."""
        return self._cool_down_s if self._reverts(change, serving) else self.rules.cool_down_s

    def _reverts(self, change: Change, serving: list[InstanceView]) -> bool:
        """It takes back what was decided last, with this instance or another one."""
        return bool(self._history) and _labels_after(serving, change) == self._history[-1].all_before

    def _decided(self, change: Change, serving: list[InstanceView], now: float) -> None:
        rules, cool_down_s = self.rules, self._cool_down_s
        if self._reverts(change, serving):
            self._cool_down_s = min(2 * self._cool_down_s, rules.longest_cool_down_s)
        else:
            self._cool_down_s = rules.cool_down_s
        before = next((one.label for one in serving if one.name == change.name), change.label)
        self._changed_at = now
        self.num_changes += 1
        self._wanted, self._wanted_looks = None, 0
        labels = _in_order([one.label for one in serving])
        self._history.append(_Moment(now, change, before, labels, cool_down_s))
        self._pending = (change, now)

    @property
    def pending(self) -> Change | None:
        """What was decided and is not so yet."""
        return None if self._pending is None else self._pending[0]

    def done(self, change: Change) -> None:
        """The engine has carried out what was decided; what others do to it from now on is their affair."""
        if self._pending is not None and self._pending[0] == change:
            self._pending = None

    def refused(self, change: Change) -> None:
        """What was decided last was not done: somebody else was faster, or the instance is not there."""
        if self._pending is not None and self._pending[0] == change:
            self._pending = None
            self._cool_down_s = self._history.pop().cool_down_s

    def begin_anew(self, now: float) -> None:
        """It did not decide for a while, and others may have."""
        self._window.clear()
        self._wanted = None
        self._changed_at = now

    def named(self, name: str) -> None:
        """The instance that was asked for last will have this name."""
        if self._pending is not None:
            change, since = self._pending
            self._pending = (change._replace(name=name), since)
            moment = self._history[-1]
            self._history[-1] = moment._replace(change=moment.change._replace(name=name))


def _in_order(labels: list[Label]) -> tuple[Label, ...]:
    return tuple(sorted(labels))


def _labels_after(serving: list[InstanceView], change: Change) -> tuple[Label, ...]:
    labels = [one.label for one in serving if one.name != change.name]
    return _in_order(labels if change.kind == "drain" else [*labels, change.label])


def _floored(pressures: Pressures, floor: Pressures) -> Pressures:
    return Pressures(max(pressures.prefill, floor.prefill), max(pressures.decode, floor.decode))


def _after(load: Load, serving: list[InstanceView], change: Change) -> Pressures:
    labels = [change.label if one.name == change.name else one.label for one in serving]
    return load.pressures(*pools(labels))


def _allowed(serving: list[InstanceView], one: InstanceView, label: Label) -> bool:
    return _serve_all([other._replace(label=label) if other is one else other for other in serving])


def _serve_all(instances: list[InstanceView]) -> bool:
    """One can prefill, one can decode."""
    labels = [one.label for one in instances]
    return any(label != "decode" for label in labels) and any(label != "prefill" for label in labels)


def _label_of_more(load: Load, labels: list[Label]) -> Label:
    """That of one more instance."""
    return min(LABELS, key=lambda label: load.pressures(*pools([*labels, label])).worst)


def _clients(load: Load, pressures: Pressures) -> str:
    """What presses, in words."""
    if pressures.prefill >= pressures.decode:
        return f"prompts press more than streams ({pressures})"
    return f"streams press more than prompts ({pressures})"
