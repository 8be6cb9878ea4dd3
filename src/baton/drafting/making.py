"""The drafter that a configuration asks for."""

from __future__ import annotations

from collections.abc import Callable

from baton.drafting.base import Drafter
from baton.drafting.choice import LEAST
from baton.drafting.cost import StepCost
from baton.drafting.drafter import ChoosingDrafter
from baton.drafting.forced import Forced, WithForced
from baton.drafting.guesses import Source
from baton.drafting.models.draft_kv import DraftKv
from baton.drafting.models.model_drafter import DraftModel, ModelDrafter
from baton.drafting.models.mtp_drafter import MtpDrafter, MtpModel
from baton.drafting.ngram import NgramGuesses, NgramKernel
from baton.drafting.suffix import SuffixGuesses, SuffixKernel
from baton.protocol.config import Speculation

_KEPT = 10000
"""Answers that are kept for other requests, with `suffix`."""


def make_drafter(
    speculation: Speculation,
    *,
    max_num_seqs: int,
    vocab_size: int,
    ngram: NgramKernel,
    suffix: Callable[[], SuffixKernel],
    forced: Forced | None = None,
    constrained: Callable[[], bool] = bool,
) -> Drafter:
    """For rank 0 of an instance.

    `ngram`, `suffix`: `model.cpu.ngram.ngram_kernel()`, `model.cpu.suffix.suffix_kernel`. `forced`,
    `constrained`: what grammars force, and whether any slot has one; None: nobody knows. Raises `ValueError`
    for a method that no drafter here has.
    """
    most, method = speculation.num_speculative_tokens, speculation.method
    if method not in ("auto", "ngram", "suffix"):
        raise ValueError(
            f"speculative_config: method {method!r}: give auto, ngram, suffix, draft_model or mtp"
        )
    depth = speculation.suffix_decoding_max_tree_depth
    own = NgramGuesses(
        ngram,
        max_num_seqs,
        most=most,
        shortest=speculation.prompt_lookup_min,
        longest=depth if method == "suffix" else speculation.prompt_lookup_max,
    )
    if method == "ngram":
        return ChoosingDrafter(own, cost=None)
    source: Source = own
    limited = method == "suffix"
    kept = speculation.suffix_decoding_max_cached_requests
    if kept is None:
        kept = _KEPT if limited else 0
    if limited or kept:
        source = SuffixGuesses(
            own,
            suffix(),
            max_num_seqs,
            depth=depth,
            most_requests=kept,
            most_bytes=speculation.suffix_decoding_max_cached_bytes,
            factor=speculation.suffix_decoding_max_spec_factor if limited else None,
            least=speculation.suffix_decoding_min_token_prob if limited else LEAST,
        )
    if limited:
        return ChoosingDrafter(source, cost=None)
    if forced is not None:
        source = WithForced(source, forced, constrained, max_num_seqs, most)
    return ChoosingDrafter(source, cost=StepCost(max_num_seqs * (1 + most)))


def make_model_drafter(
    speculation: Speculation,
    model: DraftModel,
    *,
    max_num_seqs: int,
    num_blocks: int,
    block_size: int,
    max_model_len: int,
) -> Drafter:
    """The same with a draft model, whose pool is as `DraftKv` says."""
    kv, cost = _kv_and_cost(speculation, max_num_seqs, num_blocks, block_size, max_model_len)
    most = speculation.num_speculative_tokens
    return ModelDrafter(model, kv, num_slots=max_num_seqs, most=most, cost=cost)


def make_mtp_drafter(
    speculation: Speculation,
    model: MtpModel,
    *,
    max_num_seqs: int,
    num_blocks: int,
    block_size: int,
    max_model_len: int,
) -> MtpDrafter:
    """The same with a layer of the model itself."""
    kv, cost = _kv_and_cost(speculation, max_num_seqs, num_blocks, block_size, max_model_len)
    most = speculation.num_speculative_tokens
    return MtpDrafter(model, kv, num_slots=max_num_seqs, most=most, cost=cost)


def _kv_and_cost(
    speculation: Speculation, max_num_seqs: int, num_blocks: int, block_size: int, max_model_len: int
) -> tuple[DraftKv, StepCost | None]:
    most = speculation.num_speculative_tokens
    kv = DraftKv(
        num_slots=max_num_seqs,
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        most=most,
    )
    return kv, StepCost(max_num_seqs * (1 + most)) if speculation.by_cost else None
