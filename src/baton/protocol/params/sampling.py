"""What a request asks of sampling and stopping, as it travels from gateway to engine to worker.

The gateway resolves every default before it sends: a seed is always present (so that the same
request, retried, preempted or handed over, gives the same tokens), `max_tokens` is bounded by the
model's context, and the end-of-sequence ids are part of `stop_token_ids` unless the client asked to
ignore them.  Strings to stop at are the gateway's own business and do not travel.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

import msgspec

from baton.protocol.codec import pack_int32, unpack_int32
from baton.protocol.params.pooling import Pooling

MAX_GRAMMAR_BYTES = 512 << 10
"""Of a constraint: it travels with each sequence of a request."""
ASKS_FOR_GRAMMAR = "structured_outputs"
"""A worker's name for the field that asked for a grammar, whichever it was: the gateway knows it."""
UNFOLLOWABLE = f"{ASKS_FOR_GRAMMAR}: the grammar cannot be followed any more: "
"""So the message of a closing begins whose request asked for what cannot be kept: its client's to change."""
NOTHING_LEFT = (
    "allowed_token_ids, bad_words: with what else binds the answer they leave no token that may follow"
)
"""The same."""
MAX_BAD_SEQUENCES = 4096
"""Several for each bad word: the engine looks at each of them once."""
MAX_STOP_IDS = 1 << 16
"""Far more than gateways send: the engine looks at each of them between two steps."""


class LogitBias(msgspec.Struct, array_like=True, frozen=True):
    """What is added to the logits of some tokens.  Two aligned arrays: they travel and are checked without a
    step of the interpreter for each token, and the sequences of a request share them."""

    ids: bytes
    """Packed int32."""
    values: bytes
    """Packed float32."""

    @classmethod
    def of(cls, bias: Mapping[int, float]) -> LogitBias:
        return cls(pack_int32(bias), array("f", bias.values()).tobytes())

    def items(self) -> Iterator[tuple[int, float]]:
        """(token, value); for whom speed does not matter."""
        return zip(unpack_int32(self.ids), memoryview(self.values).cast("f"), strict=True)


class Constraint(msgspec.Struct, array_like=True, frozen=True):
    """What an answer may be.  A worker's matcher follows the generated tokens (`grammar/masks.py`), so
    its state never travels: after a preemption, at another instance, it reads them again.

    The end belongs to it: a stop token may come exactly where the grammar accepts, and
    `Stopping.min_tokens` is 0.
    """

    grammar: Annotated[str, msgspec.Meta(max_length=MAX_GRAMMAR_BYTES)]
    """As llguidance takes it; checked by the gateway."""
    min_tokens: int = 0
    """Before so many tokens it does not end where it can go on."""
    goes_on: bool = False
    """It never ends where it can go on (`ignore_eos`)."""


class Sampling(msgspec.Struct, array_like=True, frozen=True):
    """How the next token is drawn.

    The order of application, as in vLLM: logit bias, `min_tokens` mask, bad words and allowed tokens,
    repetition, frequency and presence penalties, the constraint, temperature, min-p, top-k, top-p, then
    one draw keyed by (seed, position).
    """

    seed: int
    """Unsigned 64-bit; the counter-based generator is keyed by (seed, position of the new token)."""
    temperature: float = 1.0
    """0 means greedy: the token of the largest logit, the smallest id among equals."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means all."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: LogitBias | None = None
    logprobs: int | None = None
    """None: no log-probabilities.  k >= 0: of the chosen token and of the k most likely ones, from the
    raw logits (before penalties and temperature), natural logarithm.  Under a constraint: of the tokens
    that it allows."""
    prompt_logprobs: int | None = None
    """The same for each prompt token after the first."""
    pooling: Pooling | None = None
    """Not None: no token is drawn, this is computed of the prompt instead.  `max_tokens` is 1 then, and
    counts as none."""
    constraint: Constraint | None = None
    allowed: bytes = b""
    """Packed int32: no other token may be drawn; empty: any."""
    bad_words: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=MAX_BAD_SEQUENCES)] = ()
    """Packed int32, each a sequence of tokens: its last one is not drawn where the others were generated
    right before."""
    logprob_ids: bytes = b""
    """Packed int32: with `logprobs`, these tokens are reported instead of the most likely ones."""
    routes_from: int | None = None
    """Not None: experts that tokens go to are wanted, of positions from here on (`protocol/routes.py`)."""


class Stopping(msgspec.Struct, array_like=True, frozen=True):
    """When the worker ends a request by itself."""

    max_tokens: int
    """At most so many generated tokens, >= 1."""
    min_tokens: int = 0
    """No stop token can be sampled before so many tokens have been generated."""
    stop_token_ids: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_STOP_IDS)] = ()
    """Any of these ends the request with reason `stop`; the token itself is reported too."""


LISTED_LOGPROBS = 128
"""Of one position: more are packed."""


class TokenLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Log-probabilities at one position: the chosen token and the k most likely, best first."""

    token: int
    logprob: float
    rank: int
    """1 for the most likely token of the vocabulary."""
    top: tuple[tuple[int, float], ...] = ()
    """(token, its log-probability); empty where there are more than `LISTED_LOGPROBS`: see `best`."""
    flat: bytes = b""
    """Instead of `top`, where there are more: their ids, packed int32, and then as many float32."""

    @classmethod
    def packed(cls, token: int, logprob: float, rank: int, ids: bytes, values: bytes) -> TokenLogprobs:
        """Of more than `LISTED_LOGPROBS`.  `ids`: packed int32; `values`: packed float32."""
        return cls(token, logprob, rank, flat=ids + values)

    @property
    def count(self) -> int:
        """How many `best` gives, of all."""
        return len(self.flat) // 8 or len(self.top)

    def best(self, first: int = 0, stop: int | None = None) -> Sequence[tuple[int, float]]:
        """(token, its log-probability), best first: number `first` to `stop` of them, from 0."""
        if not self.flat:
            return self.top[first:stop]
        numbers = memoryview(self.flat).cast("i")
        half = len(numbers) // 2
        part = slice(first, half if stop is None else min(stop, half))
        values = memoryview(self.flat)[4 * half :].cast("f")
        return list(zip(numbers[:half][part], values[part], strict=True))
