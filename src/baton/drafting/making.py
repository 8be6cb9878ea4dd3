"""The drafter that a configuration asks for."""

from __future__ import annotations

from collections.abc import Callable

from baton.drafting.base import Drafter
from baton.drafting.cost import StepCost
from baton.drafting.drafter import ChoosingDrafter
from baton.drafting.forced import Forced, WithForced
from baton.drafting.guesses import Source
from baton.drafting.ngram import NgramGuesses, NgramKernel
from baton.protocol.config import Speculation


def make_drafter(
    speculation: Speculation,
    *,
    max_num_seqs: int,
    vocab_size: int,
    ngram: NgramKernel,
    forced: Forced | None = None,
    constrained: Callable[[], bool] = bool,
) -> Drafter:
    """For rank 0 of an instance.

    `ngram`: `model.cpu.ngram.ngram_kernel()`. `forced`, `constrained`: what grammars force, and whether
    any slot has one; None: nobody knows. Raises `ValueError` for a method that no drafter here has.
    """
    most = speculation.num_speculative_tokens
    if speculation.method not in ("auto", "ngram"):
        raise ValueError(f"speculative_config: method {speculation.method!r}: give auto or ngram")
    source: Source = NgramGuesses(
        ngram,
        max_num_seqs,
        most=most,
        shortest=speculation.prompt_lookup_min,
        longest=speculation.prompt_lookup_max,
    )
    if speculation.method == "ngram":
        return ChoosingDrafter(source, max_num_seqs, cost=None)
    if forced is not None:
        source = WithForced(source, forced, constrained, max_num_seqs, most)
    return ChoosingDrafter(source, max_num_seqs, cost=StepCost(max_num_seqs * (1 + most)))
