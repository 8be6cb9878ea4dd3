"""Labels that gateways change themselves: the rule `arrange`.

The watch keeps books of its own: when each gateway heard the last report of each instance, and when it
changed what.  At a change it looks whether

* `cool_down_s` has passed since the one before, and for each time in a row that one takes the other back,
  twice as long as for the time before;
* an instance that can prefill and one that can decode are left, of those that serve;
* each instance at which the gateway has requests has reported, or come, within `stale_s`;
* the instance of the change before has said that it has its label, or was lost since, or an operator has
  given it the same label: a gateway holds to an operator's order at once.

Once the engine has answered an order, or was lost with it, the gateway's next look must not wait for that
order: what others did to the instance meanwhile is no reason to stop deciding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from baton.gateway.arranging.arranger import Arranger, Rules
from baton.protocol.messages.requests import FromEngine, Load, Query, QueryReply, ToEngine, Welcome
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
    name: str = ""
    """The instance of the last change."""
    open: tuple[str, str] | None = None
    """The instance and label of the last change, until its engine has said so, or refused, or was lost."""
    asked: int | None = None
    """The number of the order that is not answered yet."""
    answered_at: float = float("inf")
    """When it was, or was lost."""
    undone: tuple[tuple[str, ...], int] = ((), 0)
    """`before` and `reverts` of the change before, which hold again if this one is refused."""

    def ends(self, now: float, *, refused: bool) -> None:
        """The order was answered, or went with its connection."""
        self.open, self.asked, self.answered_at = None, None, now
        if refused:
            self.before, self.reverts = self.undone


class ArrangingWatch:
    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}
        self.changes = 0

    def sends(self, gateway: GatewayProcess, to: str, message: ToEngine) -> None:
        if isinstance(message, Query) and message.stand is not None and message.stand.how == "only_if":
            self._of(gateway).asked = message.id
        elif isinstance(message, Query) and message.stand is not None and message.stand.how == "order":
            seen = self._of(gateway)
            if seen.open == (to, message.stand.label):
                seen.open = None

    def reads(self, gateway: GatewayProcess, instance: Instance, message: FromEngine) -> None:
        if gateway.cluster.roles.arranger is None:
            return
        seen = self._of(gateway)
        if isinstance(message, Load):
            seen.reports[instance.member] = gateway.now()
        elif isinstance(message, Welcome):
            if gateway.cluster.members[instance.member].state != "ready":  # (the first on a connection)
                seen.reports[instance.member] = gateway.now()
            if seen.open == (instance.member, message.standing.label):
                seen.open = None
        elif isinstance(message, QueryReply) and message.id == seen.asked:
            seen.ends(gateway.now(), refused="error" in message.body)

    def after(self, gateway: GatewayProcess) -> None:
        arranger = gateway.cluster.roles.arranger
        if arranger is None:
            return
        seen = self._of(gateway)
        if arranger.num_changes == seen.changes:
            self._look_whether_it_goes_on(gateway, seen, arranger)
            return
        if arranger.num_changes > seen.changes + 1:
            raise Violation("arrange", f"{gateway.name} decided several changes at once")
        seen.changes += 1
        self.changes += 1
        now = gateway.now()
        self._check(gateway, seen, arranger.rules, arranger.describe(now)["changes"][0], now)

    def _of(self, gateway: GatewayProcess) -> _Seen:
        return self._seen.setdefault(gateway.cluster.name, _Seen())

    def _look_whether_it_goes_on(self, gateway: GatewayProcess, seen: _Seen, arranger: Arranger) -> None:
        if seen.name:
            member = gateway.cluster.members.get(seen.name)
            if seen.asked is not None and (member is None or member.state != "ready"):
                seen.ends(gateway.now(), refused=True)
        looked_at = arranger.next_look - arranger.rules.look_s
        if arranger.pending is not None and looked_at > seen.answered_at + _NEARLY:
            raise Violation(
                "arrange",
                f"{gateway.name} waits for {arranger.pending}, about which it was answered "
                f"{looked_at - seen.answered_at:.4f} s before its last look",
            )

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
            raise Violation("arrange", f"{what}, before {seen.open[0]} was {seen.open[1]}")
        seen.name, seen.open, seen.answered_at = change["name"], (change["name"], change["to"]), float("inf")
        seen.undone = seen.before, seen.reverts
        seen.changed_at, seen.before, seen.reverts = now, tuple(sorted(old.values())), reverts
