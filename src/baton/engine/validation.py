"""Checks a `Submit`: each refusal names the field, the numbers and the fix.

The gateway has checked what users send; the engine checks again, because it does not rely on its gateways.  A
request that passes can be run by the worker and fits in the pool, so it never fails later for a reason that
is known now.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from typing import Literal

import numpy as np

from baton.protocol.codec import MalformedMessage, unpack_int32
from baton.protocol.messages.requests import Submit
from baton.protocol.params.pooling import MAX_LABELS, Pooling
from baton.protocol.params.sampling import LogitBias
from baton.protocol.rules.fair_queue import check_flow

RejectCode = Literal["queue_full", "never_fits", "bad_request", "internal", "shutting_down"]


class Rejected(Exception):
    """This request is answered with `Finished(rejected)`."""

    def __init__(self, code: RejectCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True)
class Limits:
    """What the instance can hold; sizes in tokens unless the name says blocks."""

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int


def check_submit(submit: Submit, limits: Limits) -> array[int]:
    """Returns the token ids of prompt and `generated`.  Raises `Rejected`."""
    if not -(1 << 63) <= submit.id < 1 << 63:
        raise Rejected("bad_request", f"id: {submit.id} must fit into 64 bits with a sign, as in `Outputs`")
    prompt = _check_tokens("prompt", submit.prompt, limits.vocab_size)
    if not prompt:
        raise Rejected("bad_request", "prompt: it is empty; send at least one token id")
    generated = _check_tokens("generated", submit.generated, limits.vocab_size)
    _check_stopping(submit, limits)
    if len(generated) >= submit.stopping.max_tokens:
        raise Rejected(
            "bad_request",
            f"generated: the client has {len(generated)} tokens of max_tokens, "
            f"{submit.stopping.max_tokens}, so nothing is left to generate; finish the request instead",
        )
    _check_sampling(submit, limits)
    wrong = check_flow(submit.flow)
    if wrong is not None:
        raise Rejected("bad_request", wrong)
    if submit.sampling.pooling is None:
        _check_size(len(prompt), submit.stopping.max_tokens, limits)
    else:
        _check_pooling(submit, submit.sampling.pooling, limits)
        _check_pooled_size(len(prompt), limits)
    return prompt + generated


def _check_tokens(name: str, data: bytes, vocab_size: int) -> array[int]:
    try:
        tokens = unpack_int32(data)
    except MalformedMessage as error:
        raise Rejected("bad_request", f"{name}: {error}; send packed int32 token ids") from None
    if not tokens:
        return tokens
    ids = np.frombuffer(data, np.int32)
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise Rejected(
            "bad_request", f"{name}: token id {wrong} is not in the vocabulary, 0 to {vocab_size - 1}"
        )
    return tokens


def _check_stopping(submit: Submit, limits: Limits) -> None:
    stopping = submit.stopping
    if stopping.max_tokens < 1:
        raise Rejected("bad_request", f"max_tokens: {stopping.max_tokens} must be at least 1")
    if not 0 <= stopping.min_tokens <= stopping.max_tokens:
        raise Rejected(
            "bad_request",
            f"min_tokens: {stopping.min_tokens} must be from 0 to max_tokens, {stopping.max_tokens}",
        )
    _check_ids("stop_token_ids", stopping.stop_token_ids, limits.vocab_size)


def _check_sampling(submit: Submit, limits: Limits) -> None:
    sampling = submit.sampling
    if not 0 <= sampling.seed < 1 << 64:
        raise Rejected("bad_request", f"seed: {sampling.seed} must be an unsigned 64-bit number")
    for name, low in (
        ("temperature", 0.0),
        ("top_p", 0.0),
        ("min_p", 0.0),
        ("repetition_penalty", 0.0),
        ("presence_penalty", -math.inf),
        ("frequency_penalty", -math.inf),
    ):
        value = getattr(sampling, name)
        if not math.isfinite(value) or value < low:
            raise Rejected("bad_request", f"{name}: {value} must be a finite number, at least {low}")
    if sampling.top_p == 0 or sampling.repetition_penalty == 0:
        raise Rejected("bad_request", "top_p, repetition_penalty: must be more than 0; 1 switches them off")
    for name in ("top_k", "logprobs", "prompt_logprobs"):
        number = getattr(sampling, name)
        if number is not None and number < 0:
            raise Rejected("bad_request", f"{name}: {number} must not be negative")
    known = (len(submit.prompt) + len(submit.generated)) // 4
    if sampling.routes_from is not None and not 0 <= sampling.routes_from <= known:
        raise Rejected(
            "bad_request",
            f"routes_from: {sampling.routes_from} must be from 0 to {known}, the tokens it has",
        )
    if sampling.logit_bias is not None:
        _check_bias(sampling.logit_bias, limits.vocab_size)
    for name, ids in (("allowed", sampling.allowed), ("logprob_ids", sampling.logprob_ids)):
        _check_tokens(name, ids, limits.vocab_size)
    for word in sampling.bad_words:
        if not _check_tokens("bad_words", word, limits.vocab_size):
            raise Rejected("bad_request", "bad_words: a sequence is empty; send at least one token id")


def _check_pooling(submit: Submit, pooling: Pooling, limits: Limits) -> None:
    if submit.stopping.max_tokens != 1 or submit.generated:
        raise Rejected("bad_request", "pooling: nothing is generated; send max_tokens 1 and no tokens")
    if submit.sampling.logprobs is not None or submit.sampling.prompt_logprobs is not None:
        raise Rejected(
            "bad_request", "pooling: has no log-probabilities; leave logprobs, prompt_logprobs away"
        )
    if submit.sampling.routes_from is not None:
        raise Rejected("bad_request", "pooling: has no routed experts; leave routes_from away")
    if pooling.dimensions < 0:
        raise Rejected("bad_request", f"dimensions: {pooling.dimensions} must not be negative")
    if len(pooling.labels) > MAX_LABELS:
        raise Rejected("bad_request", f"labels: {len(pooling.labels)}, at most {MAX_LABELS}")
    _check_ids("labels", pooling.labels, limits.vocab_size)


def _check_pooled_size(num_prompt: int, limits: Limits) -> None:
    most = min(limits.max_model_len, limits.num_blocks * limits.block_size)
    if num_prompt > most:
        raise Rejected(
            "never_fits",
            f"prompt: {num_prompt} tokens, this instance takes at most {most}, for its context is "
            f"{limits.max_model_len} (--max-model-len) and it has {limits.num_blocks} KV blocks of "
            f"{limits.block_size} tokens; shorten the prompt",
        )


def _check_bias(bias: LogitBias, vocab_size: int) -> None:
    ids = _check_tokens("logit_bias", bias.ids, vocab_size)
    if len(bias.values) != 4 * len(ids):
        raise Rejected(
            "bad_request",
            f"logit_bias: {len(ids)} ids and {len(bias.values)} bytes of values; send 4 bytes each",
        )
    if not np.isfinite(np.frombuffer(bias.values, np.float32)).all():
        raise Rejected("bad_request", "logit_bias: every value must be a finite number")


def _check_ids(name: str, ids: tuple[int, ...], vocab_size: int) -> None:
    if not ids:
        return
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise Rejected(
            "bad_request", f"{name}: token id {wrong} is not in the vocabulary, 0 to {vocab_size - 1}"
        )


def _check_size(num_prompt: int, max_tokens: int, limits: Limits) -> None:
    total = num_prompt + max_tokens
    if total > limits.max_model_len:
        raise Rejected(
            "never_fits",
            f"prompt and max_tokens: {num_prompt} + {max_tokens} = {total} tokens, the context of this "
            f"instance is {limits.max_model_len} (--max-model-len); shorten the prompt or lower max_tokens",
        )
    # The last generated token is never fed to the model, so it needs no KV.
    blocks = -(-(total - 1) // limits.block_size)
    if blocks > limits.num_blocks:
        raise Rejected(
            "never_fits",
            f"prompt and max_tokens: {num_prompt} + {max_tokens} tokens may need {blocks} KV blocks of "
            f"{limits.block_size} tokens, this instance has {limits.num_blocks}; shorten the prompt, lower "
            "max_tokens, or give the KV cache more memory",
        )
