"""Engine to engine: the hand-over of a request from the instance that prefills to the one that decodes.

P is the prefilling engine, D the decoding one; an engine can be P of one request and D of another at the
same time.  Each engine listens on one peer socket (ROUTER) and keeps one connection (DEALER) to each peer
that it speaks to, whose routing id begins with its own incarnation and proves it
(`engine/handover/callers.py`): so every message comes with the incarnation of its sender, and a restarted
peer is another peer.  Messages of one sender arrive in order, or the connection is lost, which ends every
hand-over between the two (`peer lost` in the tables below).

A hand-over is (P's incarnation, `id`, `attempt`).  P counts ids and never uses one twice; `attempt` grows
with every `Reserve` of the same request.  Nothing that names another attempt than the current one has any
effect but an answer: `Cancel` to what the receiver does not know (so that the sender frees), nothing to a
`Cancel` of something unknown but its `Cancelled`.

| message | from → to | meaning |
| --- | --- | --- |
| `Reserve`   | P → D | may this request decode with you?  Answered by `Reserved` or `Refused`, at once |
| `Reserved`  | D → P | D holds blocks for it, and has so many leading blocks already |
| `Refused`   | D → P | why not, and whether D will send `Credit` |
| `Credit`    | D → P | there would be room now; answered by `Reserve` (next attempt) or `Cancel` |
| `Progress`  | P → D | which pages are computed, and where they are; grants the lease on first sending |
| `Routed`    | P → D | before `Handoff`, if the request asked: the experts that its tokens went to at P |
| `Handoff`   | P → D | the first token(s): from here on the request is D's |
| `Taken`     | D → P | the request stays with D and needs no page any more: P may free them |
| `Cancel`    | either | over on this side.  D sends it, and answers P's, only when its fetches are closed |
| `Cancelled` | either | the answer to every `Cancel`: nothing of this attempt is held here any more |
| `Renew`     | D → P | D still counts on these; P's leases and D's reservations live on |
| `Renewed`   | P → D | the stamp of that `Renew`, and which of them P does not know |

**Who may hand over.**  D takes a `Reserve` only with proof that a gateway planned this request at this P
(`plan_pass`), and so it fetches pages only from there.

**Leases.**  A lease is a duration on each side's own monotonic clock.  P counts it from when it *received*
the last `Renew` (first: `Reserved`) of the hand-over and frees its pages only when it is over, or on
`Taken`, `Cancel` or `Cancelled` from D, or when D's process is known to be dead.  D counts from when it
*sent* the last `Renew` (first: `Reserved`) that it knows P received (`Renewed` brings the stamp back; any
`Progress` says that `Reserved` was received). Sent is before received, so D's view ends first.  What a fetch
has copied is used only if D's lease still holds when the completion is read.  No clock is compared with
another's.

**Whose is the request?**  P's until it has sent `Handoff`, D's when it has received it.  Only the owner
streams to the gateway: P no token before it knows that the request stays, D all of them, the first
included.  From then on a `Cancel` of P's takes the pages away, not the request: D computes it again.  When P
has sent `Handoff` and can never know whether it arrived (peer lost, lease over), it tells
the gateway `Finished(lost)`; a gateway that has heard of the request from D ignores it, any other one
continues the request elsewhere under a new id and cancels the old id on D.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from baton.protocol.codec import Codec
from baton.protocol.params.sampling import Sampling, Stopping, TokenLogprobs
from baton.protocol.routes import Routes
from baton.protocol.rules.fair_queue import EVERYBODY, Flow

RefusalCode = Literal[
    "no_room",
    "incompatible",
    "unknown_gateway",
    "not_named",
    "never_fits",
    "shutting_down",
    "bad_request",
]


class PoolSource(msgspec.Struct, array_like=True, frozen=True):
    """Where the pages of one worker rank can be fetched.  Written by `transfer`, opaque to engines."""

    rank: int
    host: str
    """Names the machine (its boot) and the pid namespace: equal means that shared memory can be used."""
    num_blocks: int
    block_bytes: int
    num_layers: int
    kv_heads: int
    """KV heads of this rank."""
    head_start: int
    """Index of its first KV head among those of the whole model."""
    total_kv_heads: int
    """Of the whole model.  Ranks may replicate heads when there are more ranks than heads."""
    shared_memory: str = ""
    """How to open the pool on the same host; "" if it cannot be."""
    tcp: str = ""
    """host:port of the page server; "" if there is none."""
    nixl: bytes = b""
    """NIXL agent metadata; empty if there is none."""
    reader_key: bytes = b""
    """What this rank proves to page servers that it reads from: SHA-256 of the certificate that it drew;
    empty: it reads in clear, and proves nothing."""

    def without_places(self) -> PoolSource:
        """Its sizes alone: for who compares instances and fetches nothing."""
        return msgspec.structs.replace(self, host="", shared_memory="", tcp="", nixl=b"", reader_key=b"")


class InstanceSource(msgspec.Struct, array_like=True, frozen=True):
    """The pages of an instance: the same block id on every rank."""

    tile: str
    """Layout inside a tile; both sides must name the same."""
    block_size: int
    ranks: list[PoolSource]
    weights: str = ""
    """The checkpoint that `update_weights` put in place, "" while there are those of the start: KV of other
    weights is of no use."""

    def without_places(self) -> InstanceSource:
        return msgspec.structs.replace(self, ranks=[rank.without_places() for rank in self.ranks])


class Reserve(msgspec.Struct, tag="reserve", array_like=True, frozen=True):
    id: int
    attempt: int
    endpoint: str
    """Where P's peer socket listens: D answers there."""
    gateway: str
    """The name in the gateway's `Hello`."""
    request: int
    """The gateway's id of the request: D streams its output under it."""
    name: str
    prompt: bytes
    """Packed int32."""
    generated: bytes
    """Packed int32: tokens that the client already has from an earlier life of the request."""
    sampling: Sampling
    stopping: Stopping
    priority: int
    cache_salt: str
    source: InstanceSource
    lease_s: float
    """P's lease, the same for each page; D uses this duration."""
    flow: Flow = EVERYBODY
    plan_pass: bytes = b""
    """Shows that the gateway named P in the plan of this request (`passes.plan_pass`)."""
    grant: bytes = b""
    """With which D can fetch the pages that will be named, from P's page servers (`commands.Grant`); of no
    use to others, as D also has to prove a key (`Reserved.reader_keys`)."""
    noted: bool = False
    """As in `Submit`."""


class Reserved(msgspec.Struct, tag="reserved", array_like=True, frozen=True):
    id: int
    attempt: int
    num_cached_blocks: int
    """Leading full blocks that D has already and will not fetch."""
    reader_keys: list[bytes] = []
    """`PoolSource.reader_key` of each rank of D: P's page servers serve the pages to these alone."""


class Refused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    id: int
    attempt: int
    code: RefusalCode
    message: str
    credit: bool = False
    """D remembers the request and will send `Credit` when there is room."""


class Credit(msgspec.Struct, tag="credit", array_like=True, frozen=True):
    id: int
    attempt: int
    """The attempt that was refused."""


class Progress(msgspec.Struct, tag="progress", array_like=True, frozen=True):
    """Cumulative: a later one says at least what the earlier ones said."""

    id: int
    attempt: int
    first: int
    """Page (block index by position) of the first entry of `blocks`; pages before were named earlier."""
    blocks: bytes
    """Packed int32: P's block ids of the pages first, first+1, …"""
    complete: int
    """Pages [0, complete) hold their final content in all layers."""
    layers: int = 0
    """Of every later page of the tokens: the first so many layers are final (during the last chunk)."""


class Routed(msgspec.Struct, tag="routed", array_like=True, frozen=True):
    """For D to send to the gateway, before the tokens of the `Handoff` that follows."""

    id: int
    attempt: int
    routes: Routes


class Handoff(msgspec.Struct, tag="handoff", array_like=True, frozen=True):
    """All pages of prompt and `generated` are final (this implies `Progress` of everything)."""

    id: int
    attempt: int
    first: int
    blocks: bytes
    """As in `Progress`: the pages that were not named yet."""
    tokens: bytes
    """Packed int32: what P sampled, at least one token; none of them was sent to the gateway."""
    logprobs: list[TokenLogprobs]
    """Aligned with `tokens`, or empty."""
    num_cached: int
    """Prompt tokens from P's prefix cache."""
    queued_s: float
    """Seconds from P's receiving the request to its admission there."""


class Taken(msgspec.Struct, tag="taken", array_like=True, frozen=True):
    id: int
    attempt: int


class Cancel(msgspec.Struct, tag="cancel", array_like=True, frozen=True):
    id: int
    attempt: int
    by_p: bool
    """Which side's hand-over is meant: true from P to D, false from D to P (ids are P's in both cases)."""
    reason: str = ""


class Cancelled(msgspec.Struct, tag="cancelled", array_like=True, frozen=True):
    id: int
    attempt: int
    by_p: bool
    """That of the `Cancel` that this answers."""


class Renew(msgspec.Struct, tag="renew", array_like=True, frozen=True):
    stamp: float
    """D's clock when it sent this; P gives it back unread."""
    handovers: list[tuple[int, int]]
    """(id, attempt) of every arrival from this P whose pages are not all taken."""


class Renewed(msgspec.Struct, tag="renewed", array_like=True, frozen=True):
    stamp: float
    unknown: list[tuple[int, int]] = []
    """Those that P holds nothing for: D gives them up."""


PeerMessage = (
    Reserve
    | Reserved
    | Refused
    | Credit
    | Progress
    | Routed
    | Handoff
    | Taken
    | Cancel
    | Cancelled
    | Renew
    | Renewed
)

PEER: Codec[PeerMessage] = Codec(PeerMessage)
