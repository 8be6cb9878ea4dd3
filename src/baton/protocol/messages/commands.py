"""Engine to worker: the command log.

One ordered log, the same for all tensor-parallel ranks.  A record of the log is one `CommandBatch`;
its `sequence` is the record's number, counted from 1 without gaps.  Commands address a slot and its
*epoch*, a number that grows each time the engine reuses the slot, so that a command or a report can
never be taken for one of another request.

A worker applies a batch whole, between two steps, in order.

| command | meaning |
| --- | --- |
| `Admit`   | a request takes this slot, with these blocks |
| `Grow`    | append these blocks to the slot's block table |
| `Reprioritize` | what waits for this slot's prompt has changed: compute it earlier, or later |
| `Preempt` | close this epoch at the next step boundary with reason `preempted` |
| `Abort`   | the same with reason `aborted` |
| `Fetch`   | copy these pages of another instance into these blocks (hand-over) |
| `DropFetch` | stop copying; every fetch is reported as over all the same |
| `Pace` | what steps take: from now on they are composed by it |
| `Grant`, `Extend`, `Revoke` | who may fetch which pages of this instance, and until when |
| `Control` | pause or resume the step loop; new weights; profile; shut down |

A command for an epoch that the worker has already closed is ignored: the engine will read, or has
read, the `Closed` that says why.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from baton.protocol.codec import Codec
from baton.protocol.messages.handover import InstanceSource
from baton.protocol.params.sampling import Sampling, Stopping


class Admit(msgspec.Struct, tag="admit", array_like=True, frozen=True):
    slot: int
    epoch: int
    tokens: bytes
    """Packed int32: the prompt, then whatever was generated before a preemption."""
    num_prompt: int
    """How many of `tokens` are the prompt; the rest was already given to the client."""
    num_computed: int
    """How many leading tokens have their KV in `blocks` already (prefix hit); < len(tokens)."""
    blocks: bytes
    """Packed int32 block ids, in order of position.  Enough for `tokens` at least."""
    sampling: Sampling
    stopping: Stopping
    handover: bool = False
    """Close with reason `handed_over` after the first sampled token (unless it ends the request), and
    report the layers of the last chunk while it is computed."""
    patient: bool = False
    """As in `Submit`: a step of patient slots alone that closes none of them need not wake the engine.
    False if one that is not patient waits for this prompt's blocks."""
    priority: int = 0
    """As in `Submit`: smaller ones are computed first.  That of a request which waits for this prompt's
    blocks, if it is smaller."""
    waited: float = 0.0
    """Seconds since the request came."""
    salt: bytes = b""
    """A digest of the request's cache salt: its drafts may come from requests of the same one
    (`drafting/suffix.py`).  Empty: the instance drafts nothing."""


class Grow(msgspec.Struct, tag="grow", array_like=True, frozen=True):
    slot: int
    epoch: int
    blocks: bytes
    """Packed int32 block ids, appended to the slot's table."""


class Reprioritize(msgspec.Struct, tag="reprioritize", array_like=True, frozen=True):
    """The values of `Admit` change: requests began to wait for blocks that this prompt fills, or ended to."""

    slot: int
    epoch: int
    priority: int
    patient: bool


class Preempt(msgspec.Struct, tag="preempt", array_like=True, frozen=True):
    slot: int
    epoch: int


class Abort(msgspec.Struct, tag="abort", array_like=True, frozen=True):
    slot: int
    epoch: int


class Fetch(msgspec.Struct, tag="fetch", array_like=True, frozen=True):
    """Copy pages into blocks that no slot uses yet, outside the step loop.

    Every rank copies what its own heads need, from whichever of the source's ranks have them, and
    answers with exactly one `Fetched` in its own report ring.
    """

    id: int
    """Never used twice by the engine."""
    source: InstanceSource
    pages: bytes
    """Packed int32: block ids on the source."""
    blocks: bytes
    """Packed int32, aligned with `pages`: block ids here."""
    first_layer: int
    num_layers: int
    """Layers [first_layer, first_layer + num_layers); -1: all from `first_layer` on."""
    grant: bytes = b""
    """What is shown to the source: see `Grant`."""


class DropFetch(msgspec.Struct, tag="drop_fetch", array_like=True, frozen=True):
    ids: list[int]
    """One that is over already is ignored."""


class Grant(msgspec.Struct, tag="grant", array_like=True, frozen=True):
    """Another instance may fetch these pages of this one, besides what was granted under the token before.
    Concerns what a page server serves; memory of one host needs no grant."""

    token: bytes
    """16 bytes that only the reader has been told."""
    reader: str
    """The reader's incarnation, for people."""
    keys: list[bytes]
    """`PoolSource.reader_key` of each rank of the reader: who shows the token must have proved one of these.
    An empty key stands for a connection in clear; without any nobody is served."""
    pages: bytes
    """Packed int32: block ids here."""
    seconds: float
    """It ends by itself so long after it was given, or extended, last."""


class Extend(msgspec.Struct, tag="extend", array_like=True, frozen=True):
    """The readers still count on these grants."""

    tokens: list[bytes]
    seconds: float


class Revoke(msgspec.Struct, tag="revoke", array_like=True, frozen=True):
    """Nothing more is served under these."""

    tokens: list[bytes]


class Pace(msgspec.Struct, tag="pace", array_like=True, frozen=True):
    """What steps take, in seconds (`engine/workers/step_cost.py`)."""

    base: float
    """Of each step with prompts."""
    token: float
    """For each token of a prompt."""
    pair: float
    """For each position that such a token attends to."""
    row: float
    """For each row that decodes beside."""
    read: float
    """For each token of context that such a row reads, in any step."""
    alone: float
    """Of each step that only decodes."""
    alone_row: float
    """For each row of it."""
    shortest: float
    """Of the shortest step that only decodes, of those that came lately."""

    def with_prompts(self, tokens: int, start: int, rows: int, context: int) -> float:
        """Seconds of a step with so many tokens of a prompt, the first one at position `start`."""
        pairs = tokens * (start + tokens / 2)
        return self.base + tokens * self.token + pairs * self.pair + rows * self.row + context * self.read

    def decoding(self, rows: int, context: int) -> float:
        """Seconds of a step that only decodes."""
        return self.alone + rows * self.alone_row + context * self.read


class Control(msgspec.Struct, tag="control", array_like=True, frozen=True):
    """What concerns the whole worker, between two steps.

    | action | argument | what every rank does |
    | --- | --- | --- |
    | `pause`, `resume` | | composes no step until `resume`; closings still go out |
    | `check_weights` | directory | looks whether it could be loaded, and prepares it, beside the step loop |
    | `update_weights` | directory | has this checkpoint from now on; sent only while no epoch is open |
    | `release_weights` | | gives back what was prepared; nobody answers |
    | `start_profile` | directory | profiles its steps until `stop_profile` |
    | `stop_profile` | | writes the trace into that directory |
    | `shutdown` | | leaves the loop |
    """

    action: Literal[
        "pause",
        "resume",
        "shutdown",
        "check_weights",
        "update_weights",
        "release_weights",
        "start_profile",
        "stop_profile",
    ]
    argument: str = ""
    id: int = 0
    """Not 0: every rank answers with a `ControlDone` of this number."""


Grants = Grant | Extend | Revoke
"""For the transfer threads alone: they never stand in the log."""
Command = Admit | Grow | Reprioritize | Preempt | Abort | Fetch | DropFetch | Pace | Control


class CommandBatch(msgspec.Struct, array_like=True, frozen=True):
    sequence: int
    commands: list[Command]


class TransferBatch(msgspec.Struct, array_like=True, frozen=True):
    """A record of the ring to the transfer threads, which counts its own."""

    sequence: int
    commands: list[Fetch | DropFetch | Grants]


COMMANDS: Codec[CommandBatch] = Codec(CommandBatch)
TRANSFERS: Codec[TransferBatch] = Codec(TransferBatch)
