"""What the executor of rank 0 asks of a drafter: the tokens that probably follow in each slot.

Theory.  A *draft* is a token that is computed together with the newest token of its slot, before it is known
whether the sampler will choose it.  The step that computes a token and its k drafts tells at each of these
1 + k positions which token is sampled there.  As a token is a function of the tokens before it, of the
request's parameters and its position, the sampled tokens are right up to the first that differs from its
draft, that one included: the step gives the slot a *run* of 1 to 1 + k tokens, the same ones that so many
steps would have given one by one.

Between two steps the executor calls, in this order: `release` and `admit` for what ended and began, `took`
with what the last step took, `execute` runs the step, `see` with its rows, `after` with what it gave,
`propose` for the next one.

A drafter is driven by the thread of the steps, and the step waits for it: `after` and `propose` take some
microseconds a slot, unless they run a model (`models/`).  What it proposes may be cut short: by
`max_tokens`, before a stop token, by the blocks that the slot has and by what the step has room for.  A slot
without drafts costs what it costs without a drafter.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from baton.protocol.params.sampling import Sampling, Stopping

Int32Array = npt.NDArray[np.int32]


class Drafter(Protocol):
    """One per instance, on its rank 0.  Slots are those of the worker."""

    def admit(
        self,
        slot: int,
        tokens: Int32Array,
        num_prompt: int,
        sampling: Sampling,
        stopping: Stopping,
        salt: bytes = b"",
    ) -> None:
        """A request takes a slot, which was released or never used.  `tokens`: its prompt, then what was
        generated before a preemption or at another instance; not valid after the call.  `salt`: a
        request is drafted for from those of the same one; "": from itself alone."""

    def release(self, slot: int) -> None:
        """The slot's request is over; nothing happens if there is none."""

    def see(self, slots: Int32Array, ends: Int32Array, tables: Int32Array, first_prompt: int) -> None:
        """The rows of a step that sampled: their slots [R], how many tokens each has in its blocks now [R],
        drafts included, and the blocks [R, W].  Rows from `first_prompt` on are pieces of prompts."""

    def after(self, slots: Int32Array, runs: Int32Array, tokens: Int32Array) -> None:
        """What a step gave.

        `slots` [n]: those that got tokens, each once.  `runs` [n]: how many, at least 1.  `tokens` [sum of
        runs]: one slot's after the other's; all but the last token of a run were drafts that were right.
        Nobody changes these arrays afterwards.
        """

    def took(self, tokens: int, seconds: float) -> None:
        """A step without any piece of a prompt computed so many tokens, drafts included, in so long, with all
        that lay between it and the next one but `see`, `after` and `propose`."""

    def propose(self, slots: Int32Array) -> dict[int, Int32Array]:
        """The drafts of these slots for the next step: slot → 1 to `num_speculative_tokens` token ids of the
        vocabulary, in order.  A slot that is left out has none."""
