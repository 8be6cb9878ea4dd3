"""Worker to engine: what each rank reports.

Each rank has its own report ring.  Rank 0's carries the tokens and closings of the group, in one
order; every rank's carries its own `WorkerReady`, its `ControlDone`s and `Fetched`s, of the others also
when they ran steps, and, when it fails, `WorkerFailed`.

The rules (each one a property test and a simulator invariant):

1. Exactly one `Closed` for each `Admit`, whatever crosses on the wire.
2. Every token of an epoch precedes its `Closed` in the stream (within one `StepReport`: tokens are
   read before closings).  There is no sentinel token id.
3. `Closed` is sent even when no step runs.
4. The engine frees or reuses a slot and its blocks only on `Closed`.
5. A prefix block enters the prefix index only when a report says that it was computed.
6. Tokens are what the client gets, each exactly once, in order.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from baton.protocol.codec import Codec
from baton.protocol.messages.handover import PoolSource
from baton.protocol.params.sampling import TokenLogprobs
from baton.protocol.routes import Routes


class CloseReason(StrEnum):
    """Why a worker closed an epoch."""

    STOP = "stop"
    """A stop token was sampled (it is the last token reported)."""
    LENGTH = "length"
    """`max_tokens` were generated."""
    PREEMPTED = "preempted"
    ABORTED = "aborted"
    HANDED_OVER = "handed_over"
    """The first token of an `Admit` with `handover` was sampled (it is the last token reported)."""
    POOLED = "pooled"
    """The prompt is computed, and `Closed.pooled` is what was wanted of it (`Sampling.pooling`)."""
    ERROR = "error"
    """The executor could not run this request; `Closed.message` says why."""


class Closed(msgspec.Struct, array_like=True, frozen=True):
    slot: int
    epoch: int
    reason: CloseReason
    message: str = ""
    pooled: bytes = b""
    """Packed float32, with reason `pooled`."""


class PromptLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Of the prompt positions first, first+1, … (never 0) of one epoch, in order."""

    slot: int
    epoch: int
    first: int
    positions: list[TokenLogprobs]


EXPERT_LOADS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""What an expert took, over what an expert of its layer took on average."""


class StepReport(msgspec.Struct, tag="step", array_like=True, frozen=True):
    """What one step did.  Arrays are packed int32, aligned with each other.

    A token at index i belongs to (slots[i], epochs[i]).  A slot may get a run of tokens in a step, which
    stand one after the other.  That a token is reported says that the KV of every earlier position of the
    slot is computed.
    """

    step: int
    """Counts from 1; 0 for a report without a step (closings while nothing runs)."""
    applied: int
    """The command log had been applied up to this sequence when the step was composed."""
    slots: bytes = b""
    epochs: bytes = b""
    tokens: bytes = b""
    prefill_slots: bytes = b""
    """Slots that computed a chunk of their prompt in this step, the last chunk included."""
    prefill_epochs: bytes = b""
    prefill_computed: bytes = b""
    """Leading tokens of the slot whose KV is computed now."""
    logprobs: list[tuple[int, TokenLogprobs]] = []
    """(index into `tokens`, log-probabilities) for those that asked."""
    prompt_logprobs: list[PromptLogprobs] = []
    closings: list[Closed] = []
    seconds: float = 0.0
    """Wall time of the step as the leader saw it, from composing it to its tokens."""
    context: int = 0
    """Tokens of context that the rows that decode read, together."""
    expert_tokens: list[int] = []
    """Of a mixture of experts, once in so many tokens: tokens since the last time, once for each expert that
    they went to, by that expert's load: up to each of `EXPERT_LOADS`, and more."""
    speculation: list[int] = []
    """Of a step with drafts: slots that had any, drafts, then the slots whose first draft was right, whose
    first two were, and so on; empty without drafts."""
    began: float = 0.0
    """When the step began, on the clock of the leader's host, which is the engine's; 0: not known."""


class LayersDone(msgspec.Struct, tag="layers", array_like=True, frozen=True):
    """Rank 0, while a step computes the last chunk of slots that are to be handed over: the KV of the first
    `layers` layers is final, on every rank, for all tokens of these slots."""

    slots: bytes
    """Packed int32."""
    epochs: bytes
    layers: int


class StepRoutes(msgspec.Struct, tag="routes", array_like=True, frozen=True):
    """Rank 0, right before the `StepReport` of the same step: the experts that tokens of the step went to, of
    requests that asked (`Sampling.routes_from`)."""

    runs: list[tuple[int, int, Routes]]
    """(slot, epoch, rows)."""


class StepsRan(msgspec.Struct, tag="ran", array_like=True, frozen=True):
    """Of the other ranks, if `InstanceConfig.note_steps`: when they ran steps (`protocol/step_notes.py`)."""

    written: float
    """When this was sent, on the clock of the rank's host."""
    first: int
    """The number of the first of these steps; the others follow it without gaps."""
    began: list[float]
    """Of each, on that clock."""
    seconds: list[float]


class Fetched(msgspec.Struct, tag="fetched", array_like=True, frozen=True):
    """A `Fetch` is over on this rank: it touches its blocks no more.  Exactly one for each `Fetch`."""

    rank: int
    id: int
    error: str = ""
    """Why not all pages were copied; "" if all were."""
    dropped: bool = False
    """It was stopped by `DropFetch` before it was complete."""
    num_bytes: int = 0
    seconds: float = 0.0
    transport: str = ""
    """The last one that copied some of the pages; "" if none did."""


class StrangersRefused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    """What the rank's page server, or the link to it, has refused since its last report of this kind; one a
    second at most."""

    rank: int
    strangers: int = 0
    """Of the page server: connections that have not shown in time that they belong to the cluster."""
    grants: int = 0
    """Questions of pages without a grant of them that stands."""
    handshakes: int = 0
    """Of the link: of those who have no key of the cluster."""
    half_open: int = 0
    """Connections that waited too long, or made room."""
    messages: int = 0
    """Messages that make no sense."""


class WorkerReady(msgspec.Struct, tag="ready", array_like=True, frozen=True):
    """The rank has loaded its model and allocated its KV pool."""

    rank: int
    num_blocks: int
    block_size: int
    tile: str
    """Name of the layout inside a (block, layer, K/V, head) tile; instances compare it."""
    block_bytes: int
    vocab_size: int
    source: PoolSource | None = None
    """Where other instances fetch this rank's pages; None: they cannot."""
    detail: str = ""
    """One line for people: kernels, threads, bytes of weights."""


class ControlDone(msgspec.Struct, tag="done", array_like=True, frozen=True):
    """The rank has applied the `Control` of this number, or refused it and stayed as it was."""

    rank: int
    id: int
    error: str = ""
    """Why it was refused; "" if it was done."""
    value: str = ""
    """Of `check_weights`: what tells the checkpoint apart from others; "" if nothing does."""


class WorkerFailed(msgspec.Struct, tag="failed", array_like=True, frozen=True):
    """The rank cannot go on; it exits after this."""

    rank: int
    message: str


Report = (
    StepReport
    | StepRoutes
    | StepsRan
    | LayersDone
    | Fetched
    | StrangersRefused
    | WorkerReady
    | ControlDone
    | WorkerFailed
)

REPORTS: Codec[Report] = Codec(Report)
