"""What a request must be answered: the simulated executor's tokens, computed one by one from the text alone.

The same as `simulated_tokens` in `executor/simulated/executor.py` (a test says so), but incremental and
without arrays: the sum over the tokens so far is kept, so that each further token costs one step.  It shares
no line with what it judges, the mixing of bits included: a change there that is wrong must show here.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

from baton.protocol.params.pooling import Pooling
from baton.protocol.params.sampling import Constraint, Sampling, Stopping

_MULTIPLIER = 0x9E3779B97F4A7C15
_LENGTH_MIX = 0xD6E8FEB86659FD93
_MASK = (1 << 64) - 1


def expected_tokens(
    prompt: Sequence[int],
    sampling: Sampling,
    stopping: Stopping,
    vocab_size: int,
    weights: str = "",
    begun: Sequence[int] = (),
) -> tuple[list[int], str]:
    """The tokens of the whole answer, and why it ends: "stop" or "length".  `begun`: what other weights gave
    before these."""
    salt = (sampling.seed * _LENGTH_MIX + 1) & _MASK if sampling.temperature > 0 else 0
    salt ^= weights_salt(weights)
    total, power = 0, 1
    for token in (*prompt, *begun):
        total = (total + (token + 1) * power) & _MASK
        power = power * _MULTIPLIER & _MASK
    length = len(prompt) + len(begun)
    answer = list(begun)
    constraint = sampling.constraint
    while len(answer) < stopping.max_tokens:
        x = ((total + length * _LENGTH_MIX) ^ salt) & _MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        x ^= x >> 31
        token = (
            _chosen(x, constraint, answer, stopping.stop_token_ids, vocab_size)
            if constraint
            else x % vocab_size
        )
        answer.append(token)
        if token in stopping.stop_token_ids and len(answer) > stopping.min_tokens:
            return answer, "stop"
        total = (total + (token + 1) * power) & _MASK
        power = power * _MULTIPLIER & _MASK
        length += 1
    return answer, "length"


def _chosen(
    x: int, constraint: Constraint, answer: Sequence[int], stops: Sequence[int], vocab_size: int
) -> int:
    """The token of a constrained answer, which has these tokens so far."""
    modulus = int(constraint.grammar.split()[1].rstrip(","))
    state = 0
    for token in answer:
        state = (31 * state + token + 1) % 1_000_003
    ends = {stop for stop in stops if stop < vocab_size}
    may = [token for token in range(vocab_size) if token % modulus == state % modulus and token not in ends]
    if not may or (state % 3 == 0 and len(answer) >= constraint.min_tokens and not constraint.goes_on):
        may += sorted(ends)
    return may[x % len(may)]


def expected_vector(prompt: Sequence[int], pooling: Pooling, weights: str = "") -> bytes:
    """What a pooled request is answered by these weights."""
    total, power = 0, 1
    for token in prompt:
        total = (total + (token + 1) * power) & _MASK
        power = power * _MULTIPLIER & _MASK
    x = ((total + len(prompt) * _LENGTH_MIX) ^ weights_salt(weights)) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    x ^= x >> 31
    size = len(pooling.labels) or pooling.dimensions or 8
    parts = x.to_bytes(8, "little")
    return struct.pack(f"<{size}f", *(parts[place % 8] / 256 - 0.5 + place for place in range(size)))


def weights_salt(path: str) -> int:
    """How weights of this path change the tokens; 0: those of the start, and all paths that the plan does not
    mean to change anything (`new_weights.py`)."""
    if not path.startswith("w"):
        return 0
    return int.from_bytes(blake2b(path.encode(), digest_size=8).digest(), "little")
