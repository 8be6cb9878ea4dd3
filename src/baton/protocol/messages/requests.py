"""Gateway to engine and back, over ZeroMQ (the gateway a DEALER, the engine a ROUTER).

A request is known on this channel by an integer that its gateway chose and never uses again, also
not for a retry: so an answer can never be taken for another attempt's.  The engine knows a request as
(gateway identity, id).

| message | direction | meaning |
| --- | --- | --- |
| `Hello`     | gateway → engine | first message on a connection; answered by `Welcome` |
| `Submit`    | gateway → engine | one sequence to generate |
| `Cancel`    | gateway → engine | no more output wanted; answered by `Finished(aborted)` if still alive |
| `Query`     | gateway → engine | statistics, ledger; or an order: pause, resume, new weights, … |
| `Welcome`   | engine → gateway | who the engine is and what it can hold |
| `Outputs`   | engine → gateway | new tokens of many requests, and which have finished |
| `Routed`    | engine → gateway | the experts that tokens went to, of requests that asked |
| `Load`      | engine → gateway | how busy the instance is, and changes of its prefix index |
| `QueryReply`| engine → gateway | the answer to `Query` |
| `Failing`   | engine → gateway | the instance goes down and says why; nothing follows |

Every `Submit` is answered by exactly one `Finished`, or by the loss of the instance.  When the request is
handed over (`handover.py`) it is the decoding instance that answers, and the first thing heard of the
request from there says that it is there now.  A cancelled one may be answered by both.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from baton.protocol.codec import Codec
from baton.protocol.messages.handover import InstanceSource
from baton.protocol.messages.reports import PromptLogprobs
from baton.protocol.notes import Note
from baton.protocol.params.sampling import Sampling, Stopping, TokenLogprobs
from baton.protocol.routes import Routes
from baton.protocol.rules.fair_queue import EVERYBODY, Flow
from baton.protocol.standing import Stand, Standing
from baton.protocol.weights import Weights

FinishReason = Literal["stop", "length", "aborted", "error", "rejected", "lost", "handed_over", "pooled"]


QueryKind = Literal[
    "stats",
    "ledger",
    "reset_prefix_cache",
    "pause",
    "resume",
    "check_weights",
    "release_weights",
    "update_weights",
    "start_profile",
    "stop_profile",
    "stand",
]


MAX_NAME = 256
"""Characters of a name; what is longer makes no message."""
Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]


class Hello(msgspec.Struct, tag="hello", array_like=True, frozen=True):
    gateway: Name
    nonce: bytes = b""
    """To an instance that joined: what it has to prove itself with (`proof.py`)."""
    claim: bytes = b""
    """That the gateway itself knows the secret of the registration."""
    watches: bool = False
    """It is the supervisor of an instance, which asks and never sends a request."""


class Target(msgspec.Struct, array_like=True, frozen=True):
    """An instance that a request may be handed over to."""

    incarnation: str
    endpoint: str
    """Of its peer socket."""
    key: bytes = b""
    """With which connections between the two of them are proven (`passes.pair_key`)."""
    plan_pass: bytes = b""
    """Shows it that a gateway named the sender in the plan of this request (`passes.plan_pass`)."""


class Submit(msgspec.Struct, tag="submit", array_like=True, frozen=True):
    id: int
    """Unique among all instances: after a hand-over another one answers under it."""
    name: Name
    """The client-visible request id, for logs."""
    prompt: bytes
    """Packed int32 token ids, at least one."""
    sampling: Sampling
    stopping: Stopping
    priority: int = 0
    """Lower is served earlier (as in vLLM)."""
    cache_salt: str = ""
    """Prefix blocks are shared only among requests of the same salt."""
    generated: bytes = b""
    """Packed int32: tokens that the client already has from an instance that was lost.  They count as
    generated (`max_tokens`, `min_tokens`, penalties, positions), and are not sent again."""
    decoders: tuple[Target, ...] = ()
    """Where to hand the request over after its prefill, the best first; empty: it stays."""
    patient: bool = False
    """Its consumer looks at the end alone: tokens may come some steps late, in fewer messages.  The end comes
    at once, and all tokens with it."""
    flow: Flow = EVERYBODY
    """Whose it is: requests of one priority are served fairly by flow."""
    noted: bool = False
    """Its gateway wants to know its way (`protocol/notes.py`)."""
    progress: bool = False
    """Its client wants to know how far its prompt is computed (`Outputs.progress`)."""


class Cancel(msgspec.Struct, tag="cancel", array_like=True, frozen=True):
    id: int


class Query(msgspec.Struct, tag="query", array_like=True, frozen=True):
    """Asks or orders; see `QueryReply`.  `check_weights` is answered when all ranks have looked whether a
    checkpoint could take the place of theirs, and locks the instance for its asker
    (`engine/workers/controls.py`), until `update_weights`, `release_weights` or a deadline.
    `update_weights` is answered when all ranks have the new weights, `start_profile` and `stop_profile`
    when all ranks have done it; all others at once."""

    id: int
    what: QueryKind
    argument: str = ""
    """Of `check_weights`, `update_weights`: the directory of a checkpoint; of `start_profile`: where traces
    go; of `pause`: after how many seconds it ends by itself ("": it does not); of `stats`: "steps", to get a
    `Load` before the answer, with the steps up to now."""
    weights: Weights | None = None
    """Of `update_weights`: what was decided for all instances.  The instance loads it, whatever else is
    under way, or fails; one that has these or newer ones says so.  None: for this instance alone, which may
    refuse."""
    stand: Stand | None = None
    """Of `stand`: its label, whether it drains (`protocol/standing.py`)."""


ToEngine = Hello | Submit | Cancel | Query


class Welcome(msgspec.Struct, tag="welcome", array_like=True, frozen=True):
    incarnation: str
    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    workers: list[int]
    """Process ids of the worker ranks."""
    peer_endpoint: str = ""
    """Where other engines reach this one; "" if it takes part in no hand-over."""
    source: InstanceSource | None = None
    """Of its pool, without where it is: instances of the same tile and block size can hand over to each
    other."""
    detail: str = ""
    key: bytes = b""
    """With which a gateway names instances to this one (`passes.py`)."""
    weights: Weights = Weights()
    """Those that it has.  When they have changed it says `Welcome` again."""
    proof: bytes = b""
    """That it knows the secret of its registration: the answer to the `Hello`'s nonce."""
    standing: Standing = Standing()
    """When it has changed the engine says `Welcome` again, to all."""
    paused: bool = False
    """The same."""
    first: bool = False
    """No other gateway has been connected for longer than this one."""


class Finished(msgspec.Struct, array_like=True, frozen=True):
    id: int
    reason: FinishReason
    code: Literal["", "queue_full", "never_fits", "bad_request", "internal", "shutting_down"] = ""
    """Set when reason is `rejected` or `error`: what kind.  Reason `lost`: the request was handed over
    and it is not known whether it arrived; who has heard of it from the other instance ignores this.
    Reason `handed_over`: it is at the instance whose incarnation is in `message` now, and no output of it
    was sent from here; so the loss of that one is the loss of the request, also if nothing came from it."""
    message: str = ""
    num_cached: int = 0
    """Prompt tokens that came from the prefix cache at the first admission."""
    num_preemptions: int = 0
    queued_s: float = 0.0
    """Seconds from arrival to first admission."""
    retry_after_s: float = 0.0
    """With `queue_full`: how long what waits will take at the speed of lately; 0: not known."""
    pooled: bytes = b""
    """With reason `pooled`: packed float32, what was asked for in `Sampling.pooling`."""
    notes: list[Note] = []
    """Of a request that is noted: its way here, on this engine's clock."""


class Outputs(msgspec.Struct, tag="outputs", array_like=True, frozen=True):
    """Arrays are aligned; one request may occur more than once, in order.  Tokens come before ends."""

    ids: bytes = b""
    """Packed int64."""
    tokens: bytes = b""
    """Packed int32."""
    logprobs: list[tuple[int, TokenLogprobs]] = []
    """(index into `tokens`, log-probabilities)."""
    prompt_logprobs: list[tuple[int, PromptLogprobs]] = []
    """(request id, a run of positions); slot and epoch inside are of no interest here."""
    finished: list[Finished] = []
    cached: list[tuple[int, int]] = []
    """(request id, its prompt tokens that came from the prefix cache) of those that were admitted with any:
    before the first token or with it, for who ends a request before the engine does."""
    progress: list[tuple[int, int, int]] = []
    """(request id, leading tokens of its prompt that are computed, milliseconds since it was admitted) of
    those that ask (`Submit.progress`): when they are admitted, then twice a second at most, and when the
    prompt is through."""


class Routed(msgspec.Struct, tag="routed", array_like=True, frozen=True):
    """Before the `Outputs` whose tokens follow these positions."""

    runs: list[tuple[int, Routes]]
    """(request id, rows)."""


class Load(msgspec.Struct, tag="load", array_like=True, frozen=True):
    """How busy the instance is: after `Welcome`, and then when it has changed, at most every 50 ms."""

    waiting: int
    """Requests that wait for admission, those in preparation included."""
    running: int
    waiting_tokens: int
    """Tokens of prompts that are not computed yet, of those that wait and those that run."""
    free_blocks: int
    """Free and cached ones."""
    prefill_tokens_per_s: float = 0.0
    """Measured lately, while it prefilled; 0: not known."""
    decode_step_s: float = 0.0
    """Measured lately: a step that only decodes; 0: not known."""
    reset: bool = False
    """Forget all keys before adding."""
    added: bytes = b""
    """Packed int64: the first 8 bytes (little-endian, signed) of prefix keys that entered the index."""
    removed: bytes = b""
    """The same of keys that left it; applied before `added`."""
    steps: bytes = b""
    """Steps that its ranks have run since the last one (`step_notes.STEP_NOTES`), if it notes them."""
    written: float = 0.0
    """With `steps`: when this was written, on the engine's clock."""


class QueryReply(msgspec.Struct, tag="reply", array_like=True, frozen=True):
    """Of an order that was not carried out, `body` has `error`, a text for people, and `code`:
    `loading`, `shutting_down`, `busy` (another order is under way), `refused` (it cannot be done) or `stale`
    (it was for a standing that is no more)."""

    id: int
    body: dict[str, Any]


class Failing(msgspec.Struct, tag="failing", array_like=True, frozen=True):
    message: str


FromEngine = Welcome | Outputs | Routed | Load | QueryReply | Failing

_SUBMIT_BESIDES_PROMPT = 16 << 20


def max_message_bytes(max_model_len: int) -> int:
    """The largest message that an engine of this context reads: a prompt that fills it and 16 MiB besides.

    A larger one costs its sender the connection, and with it everything that is in flight on it; so a
    gateway looks before it sends.
    """
    return 4 * max_model_len + _SUBMIT_BESIDES_PROMPT


TO_ENGINE: Codec[ToEngine] = Codec(ToEngine)
FROM_ENGINE: Codec[FromEngine] = Codec(FromEngine)
