"""Tells which engine is behind each incoming connection.  No I/O.

Theory.  A connection names its maker in its routing id, `incarnation/number/session/proof`:

* `number` grows with every connection that the peer makes to us, so a new one says that the one before was
  lost, and maybe messages with it;
* the peer draws `session` for this engine alone, so only the maker of the first connection can make the next
  ones;
* `proof` shows that a gateway has introduced the two (`passes.link_proof`): the maker has it from the plan in
  which this engine decodes, or from a `Reserve` of this engine.

| connection | is |
| --- | --- |
| the first that is proven, of a peer that was not heard of | the peer's |
| the peer's session, a higher number | the peer's from now on; the one before is lost |
| the peer's session, not higher | stale: what is left of one that the peer has given up |
| anything else | a stranger's |

What comes on the connection of a stranger, or on a stale one, is not read; its sender is asked, once, to
close it.  Neither touches the connection that is the peer's.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from hmac import compare_digest
from typing import NamedTuple

from baton.protocol.rules.passes import derive, gateway_key, link_proof, pair_key

_MAX_PEERS = 4096
"""Peers that are remembered; each restart of one is another."""
_MAX_REFUSED = 4096
_MAX_KEYS = 4
"""By which one peer may prove itself: that of this engine aside, what gateways gave lately."""


class Identity(NamedTuple):
    """What a routing id says."""

    peer: str
    number: int
    session: str
    proof: bytes

    @classmethod
    def parse(cls, text: bytes) -> Identity | None:
        """None: it makes no sense."""
        try:
            peer, number, session, proof = text.decode("ascii").rsplit("/", 3)
            if not peer or not number.isdigit() or len(number) > 18 or not session:
                return None
            return cls(peer, int(number), session, bytes.fromhex(proof))
        except ValueError:
            return None


class Heard(NamedTuple):
    """What is to be done with a message."""

    peer: str = ""
    """Whose it is; "": nobody's, and it is dropped."""
    reconnected: bool = False
    """The connection that this peer had before is lost."""
    refusal: str = ""
    """Why the sender is to be asked to close its connection; "": it is not."""
    stranger: bool = False
    """Whom no peer of ours can be: worth a warning."""


_DROPPED = Heard()


class Callers:
    """Those of one engine."""

    def __init__(self, incarnation: str, secret: bytes) -> None:
        self._incarnation = incarnation
        self._secret = secret
        self._key = gateway_key(secret)
        self._told: dict[str, deque[bytes]] = {}
        """Peer → keys by which it may prove itself."""
        self._latest: OrderedDict[str, tuple[Identity, bytes]] = OrderedDict()
        """Peer → its connection."""
        self._refused: OrderedDict[bytes, None] = OrderedDict()
        """Connections that were asked to be closed."""

    def know(self, peer: str, key: bytes) -> None:
        """This engine speaks to that peer, which may answer."""
        keys = self._told.setdefault(peer, deque(maxlen=_MAX_KEYS))
        if key not in keys:
            keys.append(key)
            if len(self._told) > _MAX_PEERS:
                del self._told[next(iter(self._told))]

    def introduce(self, peer: str, key: bytes, number: int) -> bytes:
        """The routing id of this engine's connection number `number` to a peer; `key`: the pair's."""
        session = derive(self._secret, "session", peer).hex()
        proof = link_proof(key, self._incarnation, session).hex()
        return f"{self._incarnation}/{number}/{session}/{proof}".encode()

    def hear(self, routing_id: bytes) -> Heard:
        """A message came on this connection."""
        if routing_id in self._refused:
            return _DROPPED
        identity = Identity.parse(routing_id)
        if identity is None:
            return self.refuse(routing_id, "its id is not incarnation/number/session/proof", stranger=True)
        peer = identity.peer
        known = self._latest.get(peer)
        if known is not None:
            latest = known[0]
            if known[1] == routing_id:
                return Heard(peer)
            if not compare_digest(latest.session, identity.session):
                return self.refuse(routing_id, f"it is not the {peer} that connected before", stranger=True)
            if identity.number <= latest.number:
                return self.refuse(routing_id, "the peer has made another connection since")
        if not self._proven(identity):
            return self.refuse(routing_id, f"nothing shows that it is {peer}", stranger=True)
        self._latest[peer] = (identity, routing_id)
        self._latest.move_to_end(peer)
        if len(self._latest) > _MAX_PEERS:
            self._latest.popitem(last=False)
        return Heard(peer, reconnected=known is not None)

    def refuse(self, routing_id: bytes, why: str, *, stranger: bool = False) -> Heard:
        """Nothing more is read on this connection."""
        self._refused[routing_id] = None
        if len(self._refused) > _MAX_REFUSED:
            self._refused.popitem(last=False)
        return Heard(refusal=why, stranger=stranger)

    def _proven(self, identity: Identity) -> bool:
        keys = [pair_key(self._key, identity.peer), *self._told.get(identity.peer, ())]
        proofs = (link_proof(key, identity.peer, identity.session) for key in keys)
        return any(compare_digest(proof, identity.proof) for proof in proofs)
