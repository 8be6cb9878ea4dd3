"""The simulated executor against its oracle: right blocks give the oracle's tokens, wrong ones do not."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.executor.base import StepBatch
from baton.executor.loading import create_executor
from baton.executor.simulated import executor as simulated
from baton.executor.simulated.executor import (
    SimulatedExecutor,
    WrongBlock,
    simulated_next_token,
    simulated_tokens,
)
from baton.launch.planning.instance_config import instance_config
from baton.protocol.config import CostModel
from baton.protocol.params.sampling import Constraint, Sampling, Stopping

VOCAB = 1000
GREEDY = Sampling(seed=1, temperature=0.0)


def make(num_blocks=32, block_size=4, **options):
    options.setdefault("vocab_size", VOCAB)
    return SimulatedExecutor(num_blocks=num_blocks, block_size=block_size, max_num_seqs=8, **options)


def batch(rows, *, num_decodes=0, step=1, targets=None):
    """rows: (slot, start, tokens, samples, blocks)"""
    width = max(len(row[4]) for row in rows)
    return StepBatch(
        step=step,
        slots=np.array([row[0] for row in rows], np.int32),
        starts=np.array([row[1] for row in rows], np.int32),
        counts=np.array([len(row[2]) for row in rows], np.int32),
        tokens=np.concatenate([np.array(row[2], np.int32) for row in rows]),
        samples=np.array([row[3] for row in rows], np.bool_),
        block_tables=np.array([[*row[4], *[-1] * (width - len(row[4]))] for row in rows], np.int32),
        num_decodes=num_decodes,
        prompt_logprob_targets=targets or {},
    )


def admit(executor, slot, sampling=GREEDY):
    executor.admit(slot, np.array([1], np.int32), 1, sampling, Stopping(max_tokens=100))


def test_the_oracle_depends_on_every_token_its_place_the_length_and_the_seed():
    tokens = [5, 6, 7, 0, 0, 9]
    base = simulated_next_token(tokens, 1 << 30)
    seen = {base}
    for i in range(len(tokens)):
        seen.add(simulated_next_token([*tokens[:i], tokens[i] + 1, *tokens[i + 1 :]], 1 << 30))
    seen.add(simulated_next_token([6, 5, *tokens[2:]], 1 << 30))
    seen.add(simulated_next_token(tokens[:-1], 1 << 30))
    seen.add(simulated_next_token([*tokens, 0], 1 << 30))
    seen.add(simulated_next_token(tokens, 1 << 30, seed=0))
    seen.add(simulated_next_token(tokens, 1 << 30, seed=2**64 - 1))
    assert len(seen) == 12
    assert simulated_next_token(np.array(tokens, np.int32), 1 << 30) == base
    drawn = simulated_tokens([3], 2000, VOCAB)
    assert len(set(drawn)) > 700
    assert all(0 <= token < VOCAB for token in drawn)


@pytest.fixture(params=[True, False], ids=["one by one", "as arrays"], scope="module")
def hashing(request):
    """Few short rows are hashed one by one, others all at once."""
    with pytest.MonkeyPatch.context() as patch:
        if not request.param:
            patch.setattr("baton.executor.simulated.hashes._FEW_ROWS", 0)
        yield


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_chunked_prefill_and_decode_give_the_oracles_tokens(hashing, data):
    size = data.draw(st.sampled_from([1, 3, 4, 8]))
    executor = make(num_blocks=200, block_size=size)
    free = data.draw(st.permutations(range(200)))
    rows = []
    for slot in range(data.draw(st.integers(1, 4))):
        prompt = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20))
        need = math.ceil((len(prompt) + 10) / size)
        seed = data.draw(st.none() | st.integers(0, 2**64 - 1))
        rows.append((slot, prompt, free[:need], seed))
        free = free[need:]
        temperature = 0.0 if seed is None else 1.0
        admit(executor, slot, Sampling(seed=seed or 0, temperature=temperature))
    texts = {slot: list(prompt) for slot, prompt, _, _ in rows}
    for slot, prompt, blocks, _ in rows:
        at = 0
        while at < len(prompt):
            count = data.draw(st.integers(1, len(prompt) - at))
            last = at + count == len(prompt)
            result = executor.execute(batch([(slot, at, prompt[at : at + count], last, blocks)]))
            assert len(result.tokens) == (1 if last else 0)
            at += count
        texts[slot] += result.tokens.tolist()
    for _ in range(8):
        step = [(s, len(texts[s]) - 1, texts[s][-1:], True, blocks) for s, _, blocks, _ in rows]
        for slot, token in zip(
            texts, executor.execute(batch(step, num_decodes=len(step))).tokens, strict=True
        ):
            texts[slot].append(int(token))
    for slot, prompt, _, seed in rows:
        assert texts[slot][len(prompt) :] == simulated_tokens(prompt, 9, VOCAB, seed)


def test_a_mixed_batch_in_small_groups(monkeypatch):
    monkeypatch.setattr("baton.executor.simulated.hashes._CHUNK_CELLS", 8)
    monkeypatch.setattr("baton.executor.simulated.hashes._FEW_ROWS", 0)
    executor = make()
    for slot in range(3):
        admit(executor, slot)
    executor.execute(batch([(0, 0, [1, 2, 3], True, [7]), (1, 0, [4, 5], False, [8, 9])]))
    result = executor.execute(
        batch(
            [(0, 3, [11], True, [7]), (1, 2, [6, 7, 8], True, [8, 9]), (2, 0, [9] * 6, True, [3, 1])],
            num_decodes=1,
        )
    )
    expected = [[1, 2, 3, 11], [4, 5, 6, 7, 8], [9] * 6]
    assert result.tokens.tolist() == [simulated_next_token(tokens, VOCAB) for tokens in expected]


def test_wrong_stale_and_missing_blocks_change_the_output(hashing):
    tokens = list(range(10, 17))
    right = simulated_next_token([*tokens, 17], VOCAB)

    def decode(blocks, spoil=lambda executor: None):
        executor = make()
        admit(executor, 0)
        admit(executor, 1)
        executor.execute(batch([(0, 0, tokens, False, [5, 2])]))
        spoil(executor)
        return int(executor.execute(batch([(0, 7, [17], True, blocks)], num_decodes=1)).tokens[0])

    def reuse(executor):
        executor.execute(batch([(1, 0, [99], False, [5])]))

    assert decode([5, 2]) == right
    assert decode([2, 5]) != right
    assert decode([6, 2]) != right  # never written
    assert decode([5, 3]) != right
    assert decode([5, 2], reuse) != right


def test_errors_name_what_is_wrong():
    executor = make()
    with pytest.raises(WrongBlock, match=r"slots \[3\]"):
        executor.execute(batch([(3, 0, [1], True, [0])]))
    admit(executor, 3)
    with pytest.raises(WrongBlock, match=r"blocks \[32\] of a pool of 32"):
        executor.execute(batch([(3, 0, [1], True, [32])]))
    with pytest.raises(WrongBlock, match=r"blocks \[-1\]"):
        executor.execute(batch([(3, 0, [1], True, [-1])]))
    with pytest.raises(WrongBlock, match="needs 2 blocks"):
        executor.execute(batch([(3, 0, [1] * 5, True, [0])]))
    executor.release(3)
    with pytest.raises(WrongBlock, match="not admitted"):
        executor.execute(batch([(3, 0, [1], True, [0])]))
    with pytest.raises(ValueError, match="vocab_size"):
        make(vocab_size=0)


def test_logprobs_are_ranked_and_repeatable():
    executor = make(vocab_size=10)
    admit(executor, 0, Sampling(seed=0, temperature=0.0, logprobs=4, prompt_logprobs=10))
    targets = {0: np.array([2, 3, 4], np.int32)}
    rows = [(0, 0, [1, 2, 3, 4], True, [0])]
    result = executor.execute(batch(rows, targets=targets))
    (found,) = result.logprobs[0]
    assert found.token == result.tokens[0] == found.top[0][0]
    assert found.rank == 1
    assert len({token for token, _ in found.top}) == 4
    assert sum(math.exp(value) for _, value in found.top) < 1
    assert [entry.token for entry in result.prompt_logprobs[0]] == [2, 3, 4]
    for entry in result.prompt_logprobs[0]:
        assert entry.top[entry.rank - 1] == (entry.token, entry.logprob)
    assert result.prompt_logprobs[0][2].top[0][0] == simulated_next_token([1, 2, 3], 10)
    again = executor.execute(batch(rows, targets=targets))
    assert again.logprobs == result.logprobs
    assert again.prompt_logprobs == result.prompt_logprobs


class Clock:
    """In place of the module `time`: it moves by what is slept."""

    now = 0.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def test_cost_model_in_virtual_and_in_real_time(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(simulated, "time", clock)
    cost = CostModel(base=100.0, per_prefill_token=0.1, per_decode_sequence=0.01, per_kv_token=0.001)
    executor = make(cost=cost)
    admit(executor, 0)
    executor.execute(batch([(0, 0, [1, 2, 3], True, [0])]))
    assert executor.virtual_seconds == pytest.approx(100.303)
    executor.execute(batch([(0, 3, [4], True, [0])], num_decodes=1))
    assert executor.virtual_seconds == pytest.approx(100.303 + 100.014)
    assert clock.now == 0.0
    executor = make(cost=CostModel(base=0.02), real_time=True)
    admit(executor, 0)
    executor.execute(batch([(0, 0, [1], True, [0])]))
    assert clock.now == pytest.approx(0.02)


def test_made_from_a_configuration():
    config = instance_config(
        model="", max_model_len=100, executor="simulated", block_size=16, max_num_seqs=3, vocab_size=50
    )
    assert create_executor(config, 0, "").info.num_blocks == 3 * 7
    small = msgspec.structs.replace(config, kv_cache_memory_bytes=640)
    assert create_executor(small, 0, "").info.num_blocks == 10
    exact = msgspec.structs.replace(config, num_blocks=4)
    info = create_executor(exact, 0, "").info
    assert (info.num_blocks, info.block_size, info.block_bytes, info.vocab_size) == (4, 16, 64, 50)


def test_a_constraint_of_its_own_kind_and_no_other():
    """Late as often as it says, then of the residue that the tokens so far decide; also after a restart."""

    def answer(count, generated=()):
        executor, tokens, late, start = make(), [1, 2, *generated], 0, 0
        sampling = Sampling(seed=0, temperature=0.0, constraint=Constraint("residues 3, late 2"))
        executor.admit(0, np.array(tokens, np.int32), 2, sampling, Stopping(50, stop_token_ids=(7,)))
        while len(tokens) < 2 + count:
            result = executor.execute(batch([(0, start, tokens[start:], True, [3, 4, 5])]))
            if result.late:
                late, start = late + 1, len(tokens) - 1
            else:
                start = len(tokens)
                tokens.append(int(result.tokens[0]))
        return late, tokens[2:]

    late, whole = answer(6)
    assert late == 2
    assert answer(6, whole[:4]) == (2, whole)
    with pytest.raises(ValueError, match="not with the simulated executor"):
        admit(make(), 0, Sampling(seed=0, constraint=Constraint("start: x")))
