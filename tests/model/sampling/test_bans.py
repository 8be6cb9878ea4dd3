"""Tokens that requests forbid: bad words, and all but the allowed ones; by the kernel and by PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.model.cpu.sampling import sampling_kernel
from baton.model.sampling.sampler import Sampler
from baton.protocol.codec import pack_int32
from baton.protocol.params.sampling import Constraint, Sampling, Stopping

VOCAB = 97
KERNELS = [None] if sampling_kernel() is None else [None, sampling_kernel()]
ends = pytest.mark.parametrize("kernel", KERNELS, ids=["torch", "native"][: len(KERNELS)])


def asked(**fields) -> Sampling:
    words = tuple(map(pack_int32, fields.pop("bad", ())))
    return Sampling(
        seed=5,
        bad_words=words,
        allowed=pack_int32(fields.pop("allowed", ())),
        **{"temperature": 1.0, **fields},
    )


def drawn(
    sampler: Sampler, slot: int, prompt: list[int], sampling: Sampling, count: int, seed: int = 3
) -> list[int]:
    """What a request generates; its logits are random, those of its bad words' tokens high."""
    sampler.admit(slot, np.array(prompt, np.int32), len(prompt), sampling, Stopping(100))
    random = torch.Generator().manual_seed(seed)
    tokens: list[int] = []
    for position in range(len(prompt), len(prompt) + count):
        logits = torch.randn(1, VOCAB, generator=random)
        logits[0, [7, 8, 9]] += 4.0
        found, _ = sampler.sample(logits, np.array([slot], np.int32), np.array([position], np.int32))
        tokens.append(int(found[0]))
    return tokens


@ends
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_words_do_not_come_and_others_do(kernel, temperature) -> None:
    sampler = Sampler(VOCAB, 4, kernel)
    free = drawn(sampler, 1, [1, 7], asked(temperature=temperature), 200)
    words = [[9], [7, 8], [8, 7, 7]]
    bound = drawn(sampler, 1, [1, 7], asked(temperature=temperature, bad=words), 200)
    for word in words:
        size = len(word)
        assert any(free[i : i + size] == word for i in range(200)) or size == 3
        assert not any(bound[i : i + size] == word for i in range(200))
    assert {7, 8} <= set(bound), "tokens of longer words may come otherwise"
    sampler.admit(1, np.array([1, 7], np.int32), 2, asked(bad=words), Stopping(9))
    likely = torch.zeros(1, VOCAB)
    likely[0, 8] = 100.0
    (first,), _ = sampler.sample(likely, np.array([1], np.int32), np.array([2], np.int32))
    assert first == 8, "what the prompt ends with begins no word"


@ends
def test_only_allowed_tokens_come(kernel) -> None:
    sampler = Sampler(VOCAB, 4, kernel)
    bound = drawn(sampler, 0, [1], asked(allowed=[3, 50, 96, 8], bad=[[8]], frequency_penalty=1.0), 200)
    assert set(bound) == {3, 50, 96}


@ends
@given(seed=st.integers(0, 1000), cut=st.integers(0, 20))
def test_a_preempted_request_goes_on_the_same(kernel, seed, cut) -> None:
    """Its slot is taken again with what it has generated: the words' beginnings are known from that."""
    sampling = asked(bad=[[7, 8], [9, 9, 9], [8]], repetition_penalty=1.2)
    whole = drawn(Sampler(VOCAB, 2, kernel), 0, [1, 2], sampling, 20, seed)
    sampler = Sampler(VOCAB, 2, kernel)
    random = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(20):
        logits = torch.randn(1, VOCAB, generator=random)
        logits[0, [7, 8, 9]] += 4.0
        rows.append(logits)
    known = [1, 2, *whole[:cut]]
    sampler.admit(1, np.array(known, np.int32), 2, sampling, Stopping(100))
    for position in range(cut, 20):
        found, _ = sampler.sample(rows[position], np.array([1], np.int32), np.array([2 + position], np.int32))
        assert int(found[0]) == whole[position]


@ends
def test_rows_beside_a_bound_one_do_not_know(kernel) -> None:
    sampler = Sampler(VOCAB, 3, kernel)
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    slots, positions = np.arange(3, dtype=np.int32), np.full(3, 1, np.int32)
    for slot in range(3):
        sampler.admit(slot, np.array([1], np.int32), 1, asked(), Stopping(9))
    free, _ = sampler.sample(logits, slots, positions)
    sampler.admit(1, np.array([1], np.int32), 1, asked(bad=[[int(free[1])]]), Stopping(9))
    bound, _ = sampler.sample(logits, slots, positions)
    assert bound[1] != free[1]
    assert (bound[[0, 2]] == free[[0, 2]]).all()
    assert sampler.dead == []


@ends
def test_a_request_of_which_nothing_is_left_is_told(kernel) -> None:
    """Also where only a grammar and the allowed tokens together leave nothing."""
    sampler = Sampler(VOCAB, 3, kernel)
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    slots, positions = np.arange(3, dtype=np.int32), np.full(3, 1, np.int32)
    sampler.admit(0, np.array([1], np.int32), 1, asked(allowed=[4], bad=[[4]]), Stopping(9))
    sampler.admit(1, np.array([1], np.int32), 1, asked(), Stopping(9))
    sampler.admit(
        2, np.array([1], np.int32), 1, asked(allowed=[4, 5], constraint=Constraint("x")), Stopping(9)
    )
    sampler.masked[2] = 1
    sampler.masks[2] = 0
    sampler.masks[2, 0] = 1 << 5
    tokens, _ = sampler.sample(logits, slots, positions)
    assert (sampler.dead, tokens[2]) == ([0], 5)
    sampler.masks[2, 0] = 1 << 6
    alone, _ = sampler.sample(logits, slots, positions)
    assert (sampler.dead, alone[1]) == ([0, 2], tokens[1])


@ends
def test_log_probabilities_of_asked_tokens(kernel) -> None:
    sampler = Sampler(VOCAB, 2, kernel)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    sampling = asked(temperature=0.0, logprobs=2, logprob_ids=pack_int32([90, 3, 4]), bad=[[3]])
    sampler.admit(0, np.array([1], np.int32), 1, sampling, Stopping(9))
    _, found = sampler.sample(logits, np.array([0], np.int32), np.array([1], np.int32))
    expected = torch.log_softmax(logits, -1)[0]
    assert {token for token, _ in found[0].top} == {90, 3, 4}
    for token, value in found[0].top:
        assert value == pytest.approx(float(expected[token]))
    assert [value for _, value in found[0].top] == sorted((v for _, v in found[0].top), reverse=True)
