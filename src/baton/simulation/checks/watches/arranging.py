"""Labels that gateways change themselves: the rule `arrange`.

The watch keeps books of its own: when each gateway heard the last report of each instance, and when it
changed what.  At a change it looks whether

* `cool_down_s` has passed since the one before, and for each time in a row that one takes the other back,
  twice as long as for the time before;
* an instance that can prefill and one that can decode are left, of those that serve;
* each instance at which the gateway has requests has reported within `stale_s`;
* the instance of the change before has said that it has its label, or is not there any more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from baton.gateway.arranging.arranger import Rules
from baton.protocol.requests import FromEngine, Load, QueryReply, Welcome
from baton.simulation.checks.books import Violation

if TYPE_CHECKING:
    from baton.simulation.parties.gateway import GatewayProcess
    from baton.simulation.parties.instance import Instance

_NEARLY = 1e-9


@dataclass
class _Seen:
    reports: dict[str, float] = field(default_factory=dict)
    """By instance, on the gateway's clock."""
    changes: int = 0
    changed_at: float = float("-inf")
    before: tuple[str, ...] = ()
    """The labels before the last change, of the instances that served."""
    reverts: int = 0
    open: tuple[str, str] | None = None
    """The instance and label of the last change, until its engine has said so, or refused, or was lost."""


class ArrangingWatch:
    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}
        self.changes = 0

    def reads(self, gateway: GatewayProcess, instance: Instance, message: FromEngine) -> None:
        if gateway.cluster.roles.arranger is not None and isinstance(message, Load | Welcome):
            seen = self._seen.setdefault(gateway.cluster.name, _Seen())
            if isinstance(message, Load):
                seen.reports[instance.member] = gateway.now()
            elif seen.open == (instance.member, message.standing.label):
                seen.open = None
        elif isinstance(message, QueryReply) and "error" in message.body:
            self._seen.setdefault(gateway.cluster.name, _Seen()).open = None

    def after(self, gateway: GatewayProcess) -> None:
        arranger = gateway.cluster.roles.arranger
        if arranger is None:
            return
        seen = self._seen.setdefault(gateway.cluster.name, _Seen())
        if arranger.num_changes == seen.changes:
            return
        if arranger.num_changes > seen.changes + 1:
            raise Violation("arrange", f"{gateway.name} decided several changes at once")
        seen.changes += 1
        self.changes += 1
        now = gateway.now()
        self._check(gateway, seen, arranger.rules, arranger.describe(now)["changes"][0], now)

    def _check(
        self, gateway: GatewayProcess, seen: _Seen, rules: Rules, change: dict[str, Any], now: float
    ) -> None:
        what = f"{gateway.name} makes {change['name']} {change['to']}, which was {change['from']}"
        members = [member for member in gateway.cluster.members.values() if member.serves]
        old = {member.name: str(member.label) for member in members} | {change["name"]: change["from"]}
        labels = old | {change["name"]: change["to"]}
        reverts = seen.reverts + 1 if tuple(sorted(labels.values())) == seen.before else 0
        least = rules.cool_down_s * 2 ** max(reverts - 1, 0)
        passed = now - seen.changed_at
        if passed < min(least, rules.longest_cool_down_s) - _NEARLY:
            raise Violation("arrange", f"{what}, {passed:.4f} s after the last change; least: {least:.4f} s")
        if all(label == "prefill" for label in labels.values()):
            raise Violation("arrange", f"{what}: nobody is left that decodes")
        if all(label == "decode" for label in labels.values()):
            raise Violation("arrange", f"{what}: nobody is left that prefills")
        at = {request.at for request in gateway.cluster.requests.values()}
        for member in members:
            age = now - seen.reports.get(member.name, float("-inf"))
            if member.name in at and age > rules.stale_s + _NEARLY:
                raise Violation("arrange", f"{what}, though {member.name} reported {age:.3f} s ago")
        if seen.open is not None:
            last = gateway.cluster.members.get(seen.open[0])
            if last is not None and last.state == "ready":
                raise Violation("arrange", f"{what}, before {seen.open[0]} was {seen.open[1]}")
        seen.open = (change["name"], change["to"])
        seen.changed_at, seen.before, seen.reverts = now, tuple(sorted(old.values())), reverts
