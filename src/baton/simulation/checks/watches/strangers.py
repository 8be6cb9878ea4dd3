"""What is checked of who may do what between engines: plans, connections, and who may read which pages.

An engine keeps room only for a request and an engine that a gateway has named in a plan, reads as an engine's
only what comes on its newest connection, and lets nobody read but those whom it has granted pages, as long as
these are that attempt's.  The watch keeps plans, connections and grants for itself, from what passes on the
wires.  Strangers, who differ from others by nothing but what these rules look at, come by the faults
`strange_peer`, `strange_link` and `strange_reader`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.engine.handover.callers import Heard
from baton.engine.handover.records import Attempt, Phase
from baton.protocol.codec import unpack_int32
from baton.protocol.messages.commands import Extend, Grant, Grants, Revoke
from baton.protocol.messages.handover import PeerMessage, Refused, Renew, Reserve
from baton.protocol.messages.requests import Submit, Target, ToEngine
from baton.simulation.checks.books import Violation
from baton.simulation.checks.looks import arrivals_of, attempts_of, owns, well

if TYPE_CHECKING:
    from baton.simulation.parties.gateway import GatewayProcess
    from baton.simulation.parties.instance import EngineProcess
    from baton.simulation.parties.worker import RankProcess
    from baton.simulation.wires.peers import Link, Stranger
    from baton.simulation.world import World

_GOES_ON = frozenset((Phase.RESERVED, Phase.HANDED))
PlanKey = tuple[str, str, int, str]
"""(D's incarnation, the gateway's name, its id of the request, P's incarnation)."""


class PassWatch:
    """The rule `pass`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._asked: dict[tuple[str, str, int, int], tuple[str, int]] = {}
        """(D, P, id, attempt) → gateway and its id of the request."""
        self.plans: dict[PlanKey, bytes] = {}
        """With the pass that the gateway made."""

    def gateway_sends(self, gateway: GatewayProcess, to: str, message: ToEngine) -> None:
        connection = gateway.connections.get(to)
        if not isinstance(message, Submit) or not message.decoders or connection is None:
            return
        prefiller = connection.engine.instance.name
        for target in message.decoders:
            self.plans[target.incarnation, gateway.cluster.name, message.id, prefiller] = target.plan_pass

    def reads(self, engine: EngineProcess, peer: str, message: PeerMessage) -> None:
        if isinstance(message, Reserve):
            key = (engine.instance.name, peer, message.id, message.attempt)
            self._asked[key] = (message.gateway, message.request)

    def has_read(self, engine: EngineProcess, peer: str, message: PeerMessage) -> None:
        """D has room or a place in line for who is in a plan."""
        if not isinstance(message, Reserve) or not well(engine):
            return
        name, arrivals = engine.instance.name, arrivals_of(engine)
        reserved = (peer, message.id, message.attempt) in arrivals._arrivals
        if not reserved and (peer, message.id) not in arrivals.credits._waiting:
            return
        if (name, message.gateway, message.request, peer) not in self.plans:
            raise Violation(
                "pass",
                f"{name} keeps {'room' if reserved else 'a place in line'} for request {message.request} of "
                f"{message.gateway!r} and {peer}, which is in no plan of it",
            )

    def sends(self, engine: EngineProcess, to: str, message: PeerMessage) -> None:
        """Who is in a plan is not refused for want of one."""
        if not isinstance(message, Refused) or message.code != "not_named":
            return
        name = engine.instance.name
        gateway, request = self._asked.get((name, to, message.id, message.attempt), ("", 0))
        if (name, gateway, request, to) in self.plans:
            raise Violation(
                "pass",
                f"{name} refuses {to} request {request} of {gateway!r}, which has named it in its plan",
            )


class LinkWatch:
    """The rule `link`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._newest: dict[tuple[str, str], int] = {}
        """(reader, peer) → number of the newest connection of which something was read."""
        self._told: set[tuple[str, bytes]] = set()
        """(reader, connection) that were refused."""

    def heard(self, engine: EngineProcess, link: Link | Stranger, heard: Heard) -> None:
        """A message came on a connection, and the production code says whose it is."""
        name, peer, number = engine.instance.name, link.claims, link.number
        told = (name, link.routing_id)
        if heard.refusal:
            self._told.add(told)
        newest = self._newest.get((name, peer), 0)
        if heard.peer and link.strange:
            raise Violation("link", f"{name} takes what a stranger sends for {heard.peer}'s")
        if not heard.peer:
            if told not in self._told:
                raise Violation("link", f"{name} drops what comes on {link.wire.name} and tells nobody")
            if not link.strange and number > newest:
                raise Violation("link", f"{name} does not read {link.wire.name}, the newest of {peer}")
            return
        if heard.peer != peer:
            raise Violation("link", f"{name} takes what {peer} sends for {heard.peer}'s")
        if number < newest:
            raise Violation(
                "link", f"{name} reads connection {number} of {peer} after its connection {newest}"
            )
        if heard.reconnected != (0 < newest < number):
            says = "takes another connection for lost" if heard.reconnected else "does not see one lost"
            raise Violation("link", f"{name} {says} at connection {number} of {peer}, after {newest}")
        self._newest[name, peer] = number


@dataclass
class _Granted:
    """What a rank was told of a grant."""

    reader: str = ""
    """Whose ranks alone may read: the decoder's incarnation."""
    pages: set[int] = field(default_factory=set)
    until: float = 0.0


class GrantWatch:
    """The rule `grant`: what engines grant, and what page servers serve between hosts.  (On one host pages
    need no grant.)"""

    def __init__(self, world: World) -> None:
        self._world = world
        self._renewed: dict[str, set[bytes]] = {}
        """Engine → tokens of what a `Renew` that it read in this turn names."""
        self._served: dict[str, dict[bytes, _Granted]] = {}
        """Rank → token → what it may serve."""

    def reads(self, engine: EngineProcess, peer: str, message: PeerMessage) -> None:
        if isinstance(message, Renew) and well(engine):
            attempts = attempts_of(engine)
            named = (attempts.get(key) for key in message.handovers)
            mine = {
                one.grant
                for one in named
                if one is not None and one.target.incarnation == peer and one.phase in _GOES_ON
            }
            self._renewed.setdefault(engine.instance.name, set()).update(mine)

    def given(self, engine: EngineProcess, grants: Sequence[Grants]) -> None:
        """An engine tells its ranks."""
        if not well(engine):
            return
        attempts = {attempt.grant: attempt for attempt in attempts_of(engine).values()}
        ended = {token for one in grants if isinstance(one, Revoke) for token in one.tokens}
        for command in grants:
            if isinstance(command, Grant) and command.token not in ended:
                self._check_grant(engine, command, attempts.get(command.token))
            elif isinstance(command, Extend):
                for token in command.tokens:
                    if token not in ended:
                        self._check_extended(engine, token, attempts.get(token))
            if not isinstance(command, Revoke) and command.seconds > engine.instance.config.lease_s:
                raise Violation(
                    "grant", f"{engine.instance.name} grants pages for longer than a lease: {command}"
                )

    def _check_grant(self, engine: EngineProcess, command: Grant, attempt: Attempt | None) -> None:
        name = engine.instance.name
        if attempt is None or attempt.phase not in (*_GOES_ON, Phase.ENDING):
            state = "unknown" if attempt is None else attempt.phase.value
            raise Violation("grant", f"{name} grants {command.reader} pages of an attempt that is {state}")
        what = f"{attempt.departure.request.name}, attempt {attempt.number}"
        if command.reader != attempt.target.incarnation:
            raise Violation("grant", f"{name} grants {command.reader} pages of {what}")
        reader = self._world.engine_of(command.reader)
        ranks = reader.instance.ranks if reader is not None else []
        if command.keys != sorted(rank.transfers.source().reader_key for rank in ranks):
            raise Violation("grant", f"{name} grants {command.keys} pages of {what}, for {command.reader}")
        pages = unpack_int32(command.pages)
        if attempt.phase is not Phase.ENDING and not owns(engine, attempt, pages):
            raise Violation("grant", f"{name} grants pages {list(pages)}, which are not all of {what}")

    def _check_extended(self, engine: EngineProcess, token: bytes, attempt: Attempt | None) -> None:
        name = engine.instance.name
        if attempt is None:
            raise Violation("grant", f"{name} extends a grant of an attempt that is over")
        what = f"{attempt.departure.request.name}, attempt {attempt.number}, {attempt.phase.value}"
        if token not in self._renewed.get(name, ()):
            raise Violation(
                "grant",
                f"{name} extends the grant of {what}, which {attempt.target.incarnation} did not renew",
            )

    def applied(self, rank: RankProcess, command: Grants, now: float) -> None:
        """A rank's page server hears of it."""
        served = self._served.setdefault(rank.name, {})
        if isinstance(command, Grant):
            granted = served.setdefault(command.token, _Granted(command.reader))
            granted.pages.update(unpack_int32(command.pages))
            granted.until = now + command.seconds
            return
        for token in command.tokens:
            if isinstance(command, Revoke):
                served.pop(token, None)
            elif token in served:
                served[token].until = now + command.seconds

    def tokens(self, rank: RankProcess) -> list[bytes]:
        """Of grants that stand, or did not end by being revoked."""
        return list(self._served.get(rank.name, ()))

    def serves(self, rank: RankProcess, token: bytes, key: bytes, pages: Iterable[int], now: float) -> None:
        """A page server is about to serve these to who has proved this key."""
        granted = self._served.get(rank.name, {}).get(token)
        foreign = [page for page in pages if granted is None or page not in granted.pages]
        if granted is None or now >= granted.until or foreign:
            why = (
                ""
                if granted is None
                else f", though {foreign or 'it'} " + ("is not in it" if foreign else "ended")
            )
            raise Violation(
                "grant", f"{rank.name} serves pages under {'no' if granted is None else 'a'} grant{why}"
            )
        if key.decode().rpartition("/")[0] != granted.reader:
            raise Violation(
                "grant", f"{rank.name} serves {key!r} pages that were granted to {granted.reader}"
            )

    def after_turn(self, engine: EngineProcess) -> None:
        """While nothing is on its way to its page servers they serve only what belongs to attempts."""
        self._renewed.pop(engine.instance.name, None)
        if self._world.plan.one_host or not well(engine):
            return
        now, attempts = self._world.events.now, None
        for rank in engine.instance.ranks:
            granted = self._served.get(rank.name)
            if not granted or not rank.alive or rank.transfers.granting:
                continue
            if attempts is None:
                attempts = {attempt.grant: attempt for attempt in attempts_of(engine).values()}
            for token, one in granted.items():
                attempt = attempts.get(token)
                if now < one.until and attempt is None:
                    raise Violation(
                        "grant", f"{rank.name} serves {sorted(one.pages)} of an attempt that is over"
                    )
                if now < one.until and attempt is not None and not owns(engine, attempt, one.pages):
                    raise Violation(
                        "grant",
                        f"{rank.name} serves {sorted(one.pages)} for {attempt.departure.request.name}, "
                        f"attempt {attempt.number}, which are not all its own",
                    )


class StrangerWatch:
    """All three."""

    def __init__(self, world: World) -> None:
        self.passes = PassWatch(world)
        self.links = LinkWatch(world)
        self.grants = GrantWatch(world)

    def reads(self, engine: EngineProcess, peer: str, message: PeerMessage) -> None:
        self.passes.reads(engine, peer, message)
        self.grants.reads(engine, peer, message)

    def sends(self, engine: EngineProcess, to: Target, message: PeerMessage) -> None:
        self.passes.sends(engine, to.incarnation, message)
