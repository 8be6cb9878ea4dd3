"""The seam between serving and computing.

A worker composes a `StepBatch` from its slots and an `Executor` runs it: the only thing an executor
knows of a request is its slot, its sampling parameters and what the batch says.  An executor never
decides when a request ends, never moves blocks, never looks at the command log.

Implementations: `torch_executor` (CPU, CUDA) and `simulated` (no torch; the oracle of the simulator).

*One step late.*  A device runs behind the host: between launching a step and reading its tokens the host has
nothing to do, and while the host reads tokens and composes, the device has nothing to do.  A `LateExecutor`
ends that.  The worker launches step n + 1 before it reads what step n has sampled: it supposes that each row
goes on by one token, whose position it knows, and whose value the device has.  So two steps are launched and
not collected at most, and for the time of one call.

| who | keeps |
| --- | --- |
| the worker | launches steps in order, collects them in order, never more than one ahead |
| | `admit` and `release` of a slot never come while a launched step that is not collected has a row of it |
| | no block that such a step reads or writes is given to anybody else before it is collected |
| | a row of step n + 1 whose slot ended in step n is dropped: nothing that the step gave for it is told |
| the executor | when `launch` returns it has read the batch: its arrays change afterwards |
| | steps run one after the other, as launched: n + 1 finds the KV and the tokens of n |
| | it remembers the token that a slot sampled last, for the row that carries it (`StepBatch.carried`) |
| | when `collect` returns, everything that the step writes is written, on every rank |

What needs the token itself before the next one can be chosen cannot be carried: `LateExecutor.carries` says
of which requests that is true.  Their rows are composed when their last token has been read, every other
step; the rows beside them do not wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from baton.protocol.params.sampling import Sampling, Stopping, TokenLogprobs
from baton.protocol.routes import Routes
from baton.transfer.base import PoolView

OnLayers = Callable[[int], None]
"""Called within a step with n: the KV that the step writes is final, on every rank, in the first n layers."""

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(slots=True, frozen=True)
class ExecutorInfo:
    """What a loaded executor offers."""

    num_blocks: int
    block_size: int
    tile: str
    """Names the layout inside a (block, layer, K/V, head) tile."""
    block_bytes: int
    """Bytes of one block on this rank."""
    vocab_size: int
    detail: str


@dataclass(slots=True)
class StepBatch:
    """One step's work: R rows (one a slot), T = sum(counts) query tokens.

    Decode rows (one token each) come first, then those with drafts (the newest token, then the drafts), then
    prefill chunks.
    """

    step: int
    slots: Int32Array
    """[R] slot of each row."""
    starts: Int32Array
    """[R] position of the row's first query token; so many tokens are in its KV blocks already."""
    counts: Int32Array
    """[R] query tokens of the row, >= 1."""
    tokens: Int32Array
    """[T] input token ids, rows one after the other."""
    samples: BoolArray
    """[R] whether the row's last position yields a new token (false for an unfinished prompt)."""
    block_tables: Int32Array
    """[R, W] block ids by position; columns past ceil((start + count) / block_size) mean nothing."""
    num_decodes: int
    """The first so many rows have count 1 and sample."""
    drafts: Int32Array | None = None
    """[R] how many of the row's query tokens, at its end, are drafts (`drafting/base.py`); None: no row has
    any.  The step samples at the position before the first draft, then behind each one that was right."""
    prompt_logprob_targets: dict[int, Int32Array] = field(default_factory=dict)
    """row → [count or count-1] the token that follows each query position *inside the prompt*, for
    rows whose request asked for prompt log-probabilities."""
    pooled: dict[int, bool] = field(default_factory=dict)
    """row → whether its prompt ends here, for rows whose request wants a result of its prompt and no token
    (`Sampling.pooling`); they sample nothing."""
    carried: BoolArray | None = None
    """[R] rows whose query token is the one that the step before samples for the same slot, which the device
    has and the host has not: `tokens` is -1 there.  They are among the first `num_decodes`.  None: no row;
    always so with an executor that is not one step late."""
    plain: bool = False
    """One token for each slot that decodes, in the order of the worker's decode set, and nothing else.  For
    the worker, which takes in the results of such a step at once; executors need not look."""

    @property
    def first_prompt(self) -> int:
        """The row from which on there are pieces of prompts."""
        return self.num_decodes + (0 if self.drafts is None else int(np.count_nonzero(self.drafts)))


@dataclass(slots=True)
class StepResult:
    tokens: Int32Array
    """The new tokens, in the order of their rows: one for each true entry of `samples`, or as `runs` says."""
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """row → log-probabilities, one for each token of its run, for rows that sampled and whose request asked
    for them."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """row → one for each entry of `prompt_logprob_targets[row]`."""
    pooled: dict[int, bytes] = field(default_factory=dict)
    """row → packed float32, for each row whose pooled prompt ends here; only needed from rank 0."""
    expert_tokens: list[int] = field(default_factory=list)
    """As in `StepReport`; only needed from rank 0."""
    routes: dict[int, list[Routes]] = field(default_factory=dict)
    """row → the experts that its tokens went to, for rows whose request asked; only needed from rank 0."""
    failed: dict[int, str] = field(default_factory=dict)
    """row → why no token could be chosen for it, on every rank (the text is only needed from rank 0); the
    last entry of its run means nothing, and its request ends with this error."""
    late: list[int] = field(default_factory=list)
    """Rows for which no token can be chosen yet, on every rank; their runs are of one token, which means
    nothing.  The next step computes their last token again."""
    runs: Int32Array | None = None
    """[number of true entries in `samples`] how many tokens each row gives, at least one; None: one each.
    All but the last one of a run are drafts of the row."""
    drafts: dict[int, Int32Array] = field(default_factory=dict)
    """Slot → its drafts for the next step, the same on every rank."""


class ControlRefused(ValueError):
    """What was asked for cannot be done, and nothing has changed.  One line, for people."""


class Executor(Protocol):
    """Runs steps.  One per worker rank; all ranks get the same calls in the same order."""

    @property
    def info(self) -> ExecutorInfo: ...

    @property
    def one_step_late(self) -> bool:
        """Whether this is a `LateExecutor`, and the worker launches a step before it has read the last one's
        tokens."""

    @property
    def pool(self) -> PoolView:
        """The memory of the KV cache, for transfers.  Blocks that no slot uses may be written from
        another thread while steps run."""

    def admit(
        self,
        slot: int,
        tokens: Int32Array,
        num_prompt: int,
        sampling: Sampling,
        stopping: Stopping,
        salt: bytes = b"",
    ) -> None:
        """A request takes a slot: remember what sampling needs (penalties count `tokens` too).

        `tokens` is the prompt followed by what was generated before a preemption.  `salt`: as in `Admit`.
        """

    def release(self, slot: int) -> None:
        """The slot's request is over; forget it.  KV blocks need no clean-up."""

    def execute(self, batch: StepBatch, on_layers: OnLayers | None = None) -> StepResult:
        """Writes the KV of all query tokens into their blocks and samples.  Every rank returns the
        same tokens; log-probabilities are only needed from rank 0.

        `on_layers` is given where a decoding instance fetches layer by layer; an executor that cannot tell
        (a device that runs behind the host) need not call it.
        """

    def check_weights(self, directory: str) -> str:
        """Whether `update_weights` could load it; nothing changes.  As far as it can, it loads it already, in
        memory of its own, which `update_weights` of the same directory uses and `release_weights` gives back.
        May be called from another thread while steps run, and each rank answers for itself.

        Returns what tells the checkpoint apart from others, "" if nothing does.  Raises `ControlRefused`.
        """

    def update_weights(self, directory: str) -> None:
        """Loads another checkpoint of the same architecture and sizes, in place; no slot is admitted.

        Raises `ControlRefused`, on all ranks or on none, if it does not fit: then the old weights stay.
        Any other exception means that old and new are mixed, and the executor must not be used again.
        """

    def release_weights(self) -> None:
        """What a check has loaded will not be used; nothing happens if there is nothing."""

    def start_profile(self, directory: str) -> None:
        """Records what each step spends its time on.  Raises `ControlRefused`."""

    def stop_profile(self) -> None:
        """Writes this rank's trace (Chrome's JSON, which Perfetto opens) into the directory given to
        `start_profile`.  Raises `ControlRefused` if nothing is recorded or it cannot be written."""

    def close(self) -> None: ...


class LateExecutor(Executor, Protocol):
    """An executor whose results are read one step late; see the module.  It drafts nothing: a row with drafts
    cannot be composed before the result that they are drafted after.

    The loop calls `launch` and `collect` only.  (`execute` is both of them, where nothing is in flight.)"""

    def carries(self, sampling: Sampling, stopping: Stopping) -> bool:
        """Whether the next step may have a row of such a request before its last token has been read: all
        that sampling knows of earlier tokens is on the device.  The same on every rank.  False for a request
        with a constraint, whose matcher runs on the host; for penalties and bad words as the device's sampler
        can (`needs_token`)."""

    def launch(self, batch: StepBatch, on_layers: OnLayers | None = None) -> None:
        """Begins a step, behind those that were launched before, and does not wait for it.

        `on_layers`: as in `execute`; called from within the `collect` of this step, if at all.
        """

    def collect(self) -> StepResult:
        """Waits for the oldest step that was launched and not collected, and returns what it gave.  Also of
        rows whose request is over: the worker drops that."""


def needs_token(sampling: Sampling) -> bool:
    """Whether what may come next depends on which tokens were generated: a sampler that knows them on the
    host only does not carry such a request's rows.  (`Stopping.min_tokens` depends on their number alone.)"""
    return (
        sampling.constraint is not None
        or bool(sampling.bad_words)
        or sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )
