"""Scenarios that the explorer visits completely: two requests, one or two slots, a few blocks of two tokens.

Add one by adding an entry; keep it small: states multiply with tokens, with slots, and with everything that
may happen at any time.  `events` of the result says whether a scenario contains what it was made for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from baton.simulation.explorer.explored_gateway import Ask


@dataclass(frozen=True)
class Scenario:
    """What happens, or may happen, at any moment in every order."""

    name: str
    description: str
    asks: tuple[Ask, ...]
    num_slots: int = 1
    num_blocks: int = 3
    block_size: int = 2
    step_tokens: int = 8
    """Budget of a step: prompts longer than this are computed in chunks."""
    prefix_caching: bool = False
    crash: Literal["worker", "engine", "gateway", "p", "d", "fetch"] | None = None
    """May die (a fetch: fail) once, at any moment."""
    pair: bool = False
    """Two instances: P prefills, and hands over to D."""
    queries: tuple[str, ...] = ()
    """Asked in this order, each at any moment."""


_A, _B = (1, 2), (3, 4)

SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario("queue", "the second request waits for the only slot", (Ask(_A, 3), Ask(_B, 3))),
        Scenario(
            "preempt",
            "both run and grow, and the pool is too small for both",
            (Ask(_A, 4), Ask(_B, 4)),
            num_slots=2,
            num_blocks=4,
        ),
        Scenario(
            "preempt_cancel",
            "as preempt, and the one that gives way may hang up",
            (Ask(_A, 4), Ask(_B, 4, cancels=True)),
            num_slots=2,
            num_blocks=4,
        ),
        Scenario(
            "preempt_stop",
            "as preempt, and both end by a stop token while the preemption travels",
            (Ask(_A, 5, stop=True), Ask(_B, 5, stop=True)),
            num_slots=2,
            num_blocks=4,
        ),
        Scenario(
            "three",
            "three requests, two slots, and a pool too small for two of them",
            (Ask(_A, 4), Ask(_B, 3), Ask((5,), 3)),
            num_slots=2,
            num_blocks=4,
        ),
        Scenario(
            "preempt_pause",
            "as preempt, and somebody pauses and resumes",
            (Ask(_A, 4), Ask(_B, 3)),
            num_slots=2,
            num_blocks=4,
            queries=("pause", "resume"),
        ),
        Scenario(
            "cancel_queued",
            "the request that waits for the slot may hang up",
            (Ask(_A, 3), Ask(_B, 3, cancels=True)),
        ),
        Scenario(
            "cancel_running",
            "the request on the slot may hang up",
            (Ask(_A, 3, cancels=True), Ask(_B, 3)),
        ),
        Scenario(
            "cancel_both",
            "both may hang up",
            (Ask(_A, 3, cancels=True), Ask(_B, 3, cancels=True)),
            num_slots=2,
        ),
        Scenario(
            "cancel_prefill",
            "the prompt is computed in chunks, and the client may hang up in between",
            (Ask((1, 2, 3, 4, 5), 2, cancels=True), Ask(_B, 2)),
            num_blocks=4,
            step_tokens=2,
        ),
        Scenario(
            "first_token_ends",
            "the first token is the last, and the client may hang up",
            (Ask(_A, 1, cancels=True), Ask(_B, 1)),
        ),
        Scenario(
            "priority",
            "the second request is more important and takes the blocks of the first",
            (Ask(_A, 4, priority=1), Ask(_B, 4)),
            num_slots=2,
            num_blocks=4,
        ),
        Scenario(
            "prefix_shared",
            "the second prompt begins as the first, and the first may hang up",
            (Ask((1, 2, 3, 4), 2, cancels=True), Ask((1, 2, 3, 4, 5), 2)),
            num_slots=2,
            num_blocks=4,
            step_tokens=3,
            prefix_caching=True,
        ),
        Scenario(
            "prefix_preempted",
            "both share a block, grow and give way",
            (Ask((1, 2, 3), 5), Ask((1, 2, 4), 5)),
            num_slots=2,
            num_blocks=5,
            prefix_caching=True,
        ),
        Scenario(
            "reset_prefix",
            "the prefix cache is reset at any moment",
            (Ask((1, 2, 3), 2), Ask((1, 2, 3), 2)),
            num_slots=2,
            num_blocks=4,
            prefix_caching=True,
            queries=("reset_prefix_cache",),
        ),
        Scenario(
            "pause",
            "somebody pauses and resumes, and a client may hang up meanwhile",
            (Ask(_A, 3, cancels=True), Ask(_B, 3)),
            queries=("pause", "resume"),
        ),
        Scenario(
            "crash_worker",
            "the worker dies at any moment; the instance is started again",
            (Ask(_A, 3), Ask(_B, 3)),
            num_slots=2,
            crash="worker",
        ),
        Scenario(
            "crash_engine",
            "the engine dies at any moment, and its worker with it; the instance is started again",
            (Ask(_A, 3), Ask(_B, 3)),
            num_slots=2,
            crash="engine",
        ),
        Scenario(
            "crash_preempt",
            "the worker dies at any moment, also while a preemption travels",
            (Ask(_A, 4), Ask(_B, 4)),
            num_slots=2,
            num_blocks=4,
            crash="worker",
        ),
        Scenario(
            "crash_cancel",
            "the worker dies, and a client may hang up before, meanwhile or after",
            (Ask(_A, 2, cancels=True), Ask(_B, 2)),
            crash="worker",
        ),
        Scenario(
            "crash_gateway",
            "the gateway dies at any moment, and its requests are cancelled",
            (Ask(_A, 3), Ask(_B, 3)),
            crash="gateway",
        ),
        Scenario("handover", "P prefills, D decodes", (Ask((1, 2, 3), 3),), pair=True),
        Scenario(
            "handover_chunks",
            "pages travel while the prompt is computed",
            (Ask((1, 2, 3, 4, 5), 2),),
            num_blocks=4,
            step_tokens=2,
            pair=True,
        ),
        Scenario(
            "handover_fetch",
            "a fetch may fail at any moment",
            (Ask((1, 2, 3, 4, 5), 2),),
            num_blocks=4,
            step_tokens=2,
            crash="fetch",
            pair=True,
        ),
        Scenario(
            "handover_cancel",
            "as handover, and the client may hang up",
            (Ask((1, 2, 3), 3, cancels=True),),
            pair=True,
        ),
        Scenario(
            "handover_credit",
            "D has a slot for one of two: the other one waits for credit",
            (Ask(_A, 3), Ask(_B, 3)),
            pair=True,
        ),
        Scenario("handover_d_dies", "D dies at any moment", (Ask(_A, 3),), crash="d", pair=True),
        Scenario("handover_p_dies", "P dies at any moment", (Ask(_A, 3),), crash="p", pair=True),
    )
}
