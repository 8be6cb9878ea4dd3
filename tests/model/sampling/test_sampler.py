"""The sampler against a straightforward reference, its distribution, and its independence of the batch.

Everything is asked of both forms: PyTorch's operations, and the CPU's kernel where there is one.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.model.cpu.sampling import sampling_kernel
from baton.model.sampling import sampler as sampler_module
from baton.model.sampling.counter_random import stream_starts, uniforms
from baton.protocol.params.sampling import LISTED_LOGPROBS, LogitBias, Sampling, Stopping

VOCAB = 50
_KERNELS = {"torch": None} if sampling_kernel() is None else {"torch": None, "kernel": sampling_kernel()}
_form = "torch"


@pytest.fixture(autouse=True, scope="module", params=_KERNELS)
def _each_form(request: pytest.FixtureRequest) -> None:
    global _form
    _form = request.param


def new_sampler(vocab: int, num_slots: int) -> sampler_module.Sampler:
    return sampler_module.Sampler(vocab, num_slots, _KERNELS[_form])


def reference_token(
    logits: np.ndarray, tokens: list[int], num_prompt: int, sampling: Sampling, stopping: Stopping
) -> int:
    """One row, one rule after the other, in plain Python and float64."""
    values = [float(value) for value in logits]
    for token, bias in sampling.logit_bias.items() if sampling.logit_bias else ():
        values[token] += bias
    if len(tokens) - num_prompt < stopping.min_tokens:
        for token in stopping.stop_token_ids:
            values[token] = -math.inf
    output = tokens[num_prompt:]
    for token in set(tokens):
        values[token] = (
            values[token] / sampling.repetition_penalty
            if values[token] > 0
            else values[token] * sampling.repetition_penalty
        )
    for token in set(output):
        values[token] -= output.count(token) * sampling.frequency_penalty + sampling.presence_penalty
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    if sampling.temperature == 0:
        return order[0]
    top = values[order[0]]
    weights = [math.exp((value - top) / sampling.temperature) for value in values]
    kept = [token for token in order if weights[token] >= sampling.min_p]
    if sampling.top_k > 0:
        kept = kept[: sampling.top_k]
    total = sum(weights[token] for token in kept)
    nucleus, mass = [], 0.0
    for token in kept:
        if mass >= sampling.top_p * total:
            break
        nucleus.append(token)
        mass += weights[token]
    uniform = uniforms(
        stream_starts(np.array([sampling.seed], np.uint64)), np.array([len(tokens)], np.uint64)
    )
    target, mass = float(uniform[0]) * sum(weights[token] for token in nucleus), 0.0
    for token in sorted(nucleus):
        mass += weights[token]
        if mass > target:
            return token
    return max(nucleus)


def sample_one(logits, tokens, num_prompt, sampling, stopping, vocab=VOCAB) -> int:
    sampler = new_sampler(vocab, 4)
    sampler.admit(2, np.array(tokens, np.int32), num_prompt, sampling, stopping)
    found, _ = sampler.sample(
        torch.as_tensor(logits).float()[None].clone(),
        np.array([2], np.int32),
        np.array([len(tokens)], np.int32),
    )
    return int(found[0])


samplings = st.builds(
    Sampling,
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.97, 0.7, 0.2, 1e-6]),
    top_k=st.sampled_from([0, 0, 1, 3, 20, 49, 50, 1000]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.1, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.6, -0.3]),
    logit_bias=st.one_of(
        st.none(),
        st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -2.0, 3.0, 100.0])).map(
            LogitBias.of
        ),
    ),
)
stoppings = st.builds(
    Stopping,
    max_tokens=st.just(100),
    min_tokens=st.sampled_from([0, 0, 2, 9]),
    stop_token_ids=st.sampled_from([(), (7,), (1, 7, 30)]),
)
# Coarse logits, so that equals are frequent, as they are in bfloat16.
logit_rows = st.lists(st.integers(-12, 12).map(lambda n: n / 4), min_size=VOCAB, max_size=VOCAB)
rows = st.tuples(
    logit_rows, st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12), samplings, stoppings
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(row=rows, generated=st.integers(0, 6))
def test_every_parameter_is_the_references(row: Any, generated: int) -> None:
    logits, tokens, sampling, stopping = row
    num_prompt = max(1, len(tokens) - generated)
    expected = reference_token(np.array(logits, np.float32), tokens, num_prompt, sampling, stopping)
    assert sample_one(logits, tokens, num_prompt, sampling, stopping) == expected


@settings(max_examples=60, deadline=None)
@given(batch=st.lists(rows, min_size=2, max_size=9), data=st.data())
def test_a_row_does_not_depend_on_the_others(batch: list[Any], data: Any) -> None:
    sampler = new_sampler(VOCAB, len(batch))
    slots = data.draw(st.permutations(range(len(batch))))
    for slot, (_, tokens, sampling, stopping) in zip(slots, batch, strict=True):
        sampler.admit(slot, np.array(tokens, np.int32), 1, sampling, stopping)
    together, _ = sampler.sample(
        torch.tensor([logits for logits, *_ in batch]).float(),
        np.array(slots, np.int32),
        np.array([len(tokens) for _, tokens, _, _ in batch], np.int32),
    )
    alone = [
        sample_one(logits, tokens, 1, sampling, stopping) for logits, tokens, sampling, stopping in batch
    ]
    assert together.tolist() == alone


@pytest.mark.parametrize("sampling", [
    Sampling(0), Sampling(0, temperature=0.7, top_p=0.9), Sampling(0, top_k=40), Sampling(0, top_k=700),
    Sampling(0, min_p=0.02), Sampling(0, temperature=3.0, top_p=0.999), Sampling(0, top_k=1),
])  # fmt: skip
def test_large_vocabulary_alone_and_batched_and_reference(sampling: Sampling) -> None:
    """The shortcut of ranking only the best, and its fallback, on a vocabulary where they differ."""
    vocab, n = 9000, 6
    # Rounded, so that there are equals; flat rows have their nucleus far beyond the shortcut's depth.
    logits = (torch.randn(n, vocab, generator=torch.Generator().manual_seed(1)) * 8).round() / 4
    logits[1] = 0.0
    logits[2, 100:400] = 5.0
    sampler = new_sampler(vocab, 16)
    others = [Sampling(1, top_k=5), Sampling(2), Sampling(3, temperature=0.0), Sampling(4, top_p=0.5)]
    slots = np.arange(n, dtype=np.int32)
    positions = np.full(n, 3, np.int32)
    for row in range(n):
        wanted = Sampling(row + 10, sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p)
        sampler.admit(row, np.array([1, 2, 3], np.int32), 3, wanted, Stopping(9))
        found, _ = sampler.sample(logits[row : row + 1].clone(), slots[row : row + 1], positions[:1])
        expected = reference_token(logits[row].numpy(), [1, 2, 3], 3, wanted, Stopping(9))
        assert found[0] == expected
        mixed = new_sampler(vocab, 16)
        for slot, other in enumerate(others):
            mixed.admit(slot, np.array([1], np.int32), 1, other, Stopping(9))
        mixed.admit(4, np.array([1, 2, 3], np.int32), 3, wanted, Stopping(9))
        stacked = torch.cat((logits[:4], logits[row : row + 1]))
        together, _ = mixed.sample(stacked, slots[:5], positions[:5])
        assert together[4] == expected


def test_distribution_of_many_draws() -> None:
    logits = torch.linspace(-2, 2, 16)
    for sampling, kept in ((Sampling(0), range(16)), (Sampling(0, temperature=0.5, top_k=5), range(11, 16))):
        draws = 8000
        sampler = new_sampler(16, draws)
        for slot in range(draws):
            wanted = Sampling(slot, sampling.temperature, 1.0, sampling.top_k)
            sampler.admit(slot, np.array([0], np.int32), 1, wanted, Stopping(9))
        tokens, _ = sampler.sample(
            logits.repeat(draws, 1), np.arange(draws, dtype=np.int32), np.ones(draws, np.int32)
        )
        weights = torch.exp(logits / sampling.temperature)
        weights[: kept[0]] = 0
        expected = (weights / weights.sum() * draws).numpy()
        counts = np.bincount(tokens, minlength=16)
        assert counts[: kept[0]].sum() == 0
        part = slice(kept[0], 16)
        chi_square = float(((counts[part] - expected[part]) ** 2 / expected[part]).sum())
        assert chi_square < 3 * len(kept)


def test_same_seed_same_tokens_and_position_matters() -> None:
    logits = torch.zeros(1, VOCAB)

    def draw(seed: int, position: int) -> int:
        return sample_one(logits[0], [0] * position, 1, Sampling(seed), Stopping(99))

    first = [draw(5, position) for position in range(1, 30)]
    assert first == [draw(5, position) for position in range(1, 30)]
    assert len(set(first)) > 10
    assert first != [draw(6, position) for position in range(1, 30)]


def test_greedy_takes_the_smallest_id_among_equals() -> None:
    logits = torch.zeros(VOCAB)
    logits[[9, 20, 31]] = 4.0
    greedy = Sampling(0, temperature=0.0)
    assert sample_one(logits, [0], 1, greedy, Stopping(1)) == 9
    for seed in range(20):
        assert sample_one(logits, [0], 1, Sampling(seed, top_k=1), Stopping(1)) == 9


def test_min_tokens_counts_what_was_generated_before_a_preemption() -> None:
    logits = torch.zeros(VOCAB)
    logits[7] = 9.0
    stopping = Stopping(max_tokens=9, min_tokens=2, stop_token_ids=(7,))
    greedy = Sampling(0, temperature=0.0)
    assert sample_one(logits, [1, 2, 3], 3, greedy, stopping) != 7
    assert sample_one(logits, [1, 2, 3, 4], 3, greedy, stopping) != 7
    assert sample_one(logits, [1, 2, 3, 4, 5], 3, greedy, stopping) == 7


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5),
    st.integers(1, 8),
    st.integers(0, 7),
    st.integers(0, 99),
)
def test_penalties_follow_sampled_tokens_and_survive_a_preemption(prompt, steps, preempt_at, seed) -> None:
    """A running slot counts what it samples just as an admission of all tokens so far does."""
    sampling = Sampling(
        seed, temperature=0.9, repetition_penalty=1.4, presence_penalty=0.4, frequency_penalty=0.3
    )
    logits = torch.randn(steps, VOCAB, generator=torch.Generator().manual_seed(seed))
    tokens = list(prompt)
    sampler = new_sampler(VOCAB, 2)
    sampler.admit(1, np.array(tokens, np.int32), len(prompt), sampling, Stopping(99))
    for step in range(steps):
        if step == preempt_at:
            sampler.release(1)
            sampler.admit(1, np.array(tokens, np.int32), len(prompt), sampling, Stopping(99))
        expected = reference_token(logits[step].numpy(), tokens, len(prompt), sampling, Stopping(99))
        found, _ = sampler.sample(
            logits[step : step + 1].clone(), np.array([1], np.int32), np.array([len(tokens)], np.int32)
        )
        assert found[0] == expected
        tokens.append(int(found[0]))


def test_a_released_slot_leaves_nothing_to_the_next_request() -> None:
    sampler = new_sampler(VOCAB, 2)
    heavy = Sampling(1, 1.0, 0.9, 3, 0.1, 1.5, 1.0, 1.0, LogitBias.of({4: 100.0}), 5, 5)
    sampler.admit(0, np.array([1, 2], np.int32), 1, heavy, Stopping(9, 9, (3,)))
    sampler.release(0)
    sampler.admit(0, np.array([1], np.int32), 1, Sampling(0, temperature=0.0), Stopping(9))
    logits = torch.zeros(1, VOCAB)
    logits[0, 3] = 1.0
    tokens, logprobs = sampler.sample(logits, np.zeros(1, np.int32), np.ones(1, np.int32))
    assert tokens.tolist() == [3]
    assert logprobs == {}
    assert sampler.prompt_logprobs_of(0) == 0


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(3)).round(decimals=1)
    expected = torch.log_softmax(logits, dim=-1)
    sampler = new_sampler(VOCAB, 3)
    biased = LogitBias.of({int(logits[0].argmin()): 100.0})
    sampler.admit(0, np.array([1], np.int32), 1, Sampling(0, 0.0, logit_bias=biased, logprobs=4), Stopping(9))
    sampler.admit(1, np.array([1], np.int32), 1, Sampling(1, 2.0), Stopping(9))
    sampler.admit(2, np.array([1], np.int32), 1, Sampling(2, 2.0, top_k=3, logprobs=0), Stopping(9))
    slots, positions = np.arange(3, dtype=np.int32), np.ones(3, np.int32)
    tokens, found = sampler.sample(logits.clone(), slots, positions)
    assert set(found) == {0, 2}
    assert found[0].token == tokens[0] == int(logits[0].argmin())
    assert found[0].rank > VOCAB - 5
    order = sorted(range(VOCAB), key=lambda token: (-float(expected[0, token]), token))
    assert [token for token, _ in found[0].top] == order[:4]
    assert found[2].top == ()
    for row in (0, 2):
        token = int(tokens[row])
        assert found[row].token == token
        assert found[row].logprob == pytest.approx(float(expected[row, token]), abs=1e-6)
        assert found[row].rank == 1 + int((logits[row] > logits[row, token]).sum())


def test_logprobs_take_the_smallest_ids_among_equals() -> None:
    from baton.model.sampling.logprobs import token_logprobs

    logits = torch.zeros(1, 4000)
    logits[0, [3999, 50, 7]] = 2.0
    report = token_logprobs(logits, torch.tensor([50]), 5)[0]
    assert [token for token, _ in report.top] == [7, 50, 3999, 0, 1]
    assert report.rank == 1


def test_many_logprobs_are_packed_and_the_same() -> None:
    from baton.model.sampling.logprobs import token_logprobs

    logits = torch.randn(3, 4000, generator=torch.Generator().manual_seed(0))
    logits[1] = 0.0  # (all are equals)
    logits[2, ::2] = -torch.inf  # (a grammar allows half of them)
    chosen, most = torch.tensor([7, 9, 11]), LISTED_LOGPROBS
    listed, packed = token_logprobs(logits, chosen, most), token_logprobs(logits, chosen, most + 1)
    for few, many in zip(listed, packed, strict=True):
        assert (many.token, many.logprob, many.rank) == (few.token, few.logprob, few.rank)
        assert many.best(0, most) == list(few.best()) == list(few.top)
        assert (many.top, many.count) == ((), most + 1)
    whole = token_logprobs(logits, chosen, 4000)
    assert [one.count for one in whole] == [4000, 4000, 2000]
    for row, one in enumerate(whole):
        expected = torch.log_softmax(logits[row], dim=-1)
        assert [value for _, value in one.best()] == [expected[token].item() for token, _ in one.best()]
        assert one.best(5, 9) == one.best()[5:9]


def test_hopeless_rows_still_give_a_token_of_the_vocabulary() -> None:
    for logits in (torch.full((VOCAB,), float("nan")), torch.full((VOCAB,), float("-inf"))):
        for sampling in (Sampling(0, 0.0), Sampling(0), Sampling(0, top_p=0.5), Sampling(0, top_k=3)):
            assert 0 <= sample_one(logits, [1], 1, sampling, Stopping(1)) < VOCAB


def test_the_shortcut_is_taken_where_it_suffices(monkeypatch: pytest.MonkeyPatch) -> None:
    depths = []
    original = sampler_module._truncated

    def spy(logits, weights, drawing, depth):
        depths.append(min(depth, logits.shape[1]))
        return original(logits, weights, drawing, depth)

    monkeypatch.setattr(sampler_module, "_truncated", spy)
    if _form != "torch":
        pytest.skip("the kernel takes other ways")
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 4
    sample_one(logits, [1], 1, Sampling(0, top_k=20), Stopping(1), 5000)
    sample_one(logits, [1], 1, Sampling(0, top_p=0.9), Stopping(1), 5000)
    assert depths == [64, 1024]
    sample_one(torch.zeros(5000), [1], 1, Sampling(0, top_k=20), Stopping(1), 5000)
    assert depths == [64, 1024, 64, 5000]
