"""The native sampling kernel against PyTorch's form of it, for every instruction set that this CPU has."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from baton.model.cpu.library import instruction_sets, load
from baton.model.cpu.sampling import native_kernel
from baton.model.sampling.sampler import Sampler
from baton.protocol.params.sampling import Constraint, LogitBias, Sampling, Stopping

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="there is no native library")
EVERY_BUILD = pytest.mark.parametrize("build", instruction_sets())
ROWS = 24
WISHES = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
    {"top_k": 1},
    {"top_k": 3000},
    {"top_k": 3000, "top_p": 0.8, "min_p": 0.001},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 2.5, "top_p": 0.999},
    {"temperature": 0.6, "min_p": 0.05},
    {"top_p": 1e-9},
    {"temperature": 0.02, "top_k": 9000, "top_p": 0.99},
]


def make(build: str, vocab: int, num_slots: int) -> Sampler:
    """`build`: an instruction set, or "torch"."""
    return Sampler(vocab, num_slots, None if build == "torch" else native_kernel(load(build)))


def draw(sampler: Sampler, logits: Tensor, wishes: list[dict[str, float]]) -> np.ndarray:
    count = len(logits)
    for slot in range(count):
        wanted = Sampling(seed=slot * 977, **wishes[slot % len(wishes)])  # type: ignore[arg-type]
        sampler.admit(slot, np.array([1, 2], np.int32), 2, wanted, Stopping(9))
    slots = np.arange(count, dtype=np.int32)
    tokens, _ = sampler.sample(logits, slots, np.full(count, 7, np.int32))
    return tokens


def random_logits(vocab: int, spread: float, seed: int = 0) -> Tensor:
    return torch.randn(ROWS, vocab, generator=torch.Generator().manual_seed(seed)) * spread


@EVERY_BUILD
@pytest.mark.parametrize("wish", WISHES, ids=str)
def test_agrees_with_torch(build: str, wish: dict[str, float]) -> None:
    """The same tokens; where u falls on the border of two tokens a rounding may decide, which is rare."""
    different = total = 0
    for vocab, spread in ((1000, 3.0), (5003, 1.0), (20_011, 3.0), (20_011, 0.02)):
        for logits in (random_logits(vocab, spread), random_logits(vocab, spread).bfloat16().float()):
            found = draw(make(build, vocab, ROWS), logits, [wish])
            expected = draw(make("torch", vocab, ROWS), logits, [wish])
            different += int((found != expected).sum())
            total += ROWS
    assert different <= total // 100


@EVERY_BUILD
def test_equals_and_masks(build: str) -> None:
    """Rows of equals, of which ids decide, and rows where nearly everything is impossible."""
    vocab = 4099
    logits = torch.zeros(6, vocab)
    logits[1, 2000:] = -torch.inf
    logits[2] = -torch.inf
    logits[2, [5, 4098]] = 1.0
    logits[3, ::2] = -0.0
    logits[4] = torch.arange(vocab) % 3
    logits[5] = torch.linspace(-1, 1, vocab)
    for wish in WISHES:
        for rows in (logits, logits.bfloat16().float()):
            found = draw(make(build, vocab, 6), rows, [wish])
            expected = draw(make("torch", vocab, 6), rows, [wish])
            assert found.tolist() == expected.tolist(), wish


@EVERY_BUILD
def test_a_row_depends_on_nothing_else(build: str) -> None:
    """Not on the other rows, on where it lies in memory, or on the number of threads."""
    vocab = 30_001
    logits = random_logits(vocab, 2.0).bfloat16().float()
    sampler = make(build, vocab, ROWS)
    together = draw(sampler, logits, WISHES)
    threads = torch.get_num_threads()
    slots, positions = np.arange(ROWS, dtype=np.int32), np.full(ROWS, 7, np.int32)
    padded = torch.full((ROWS, vocab + 9), torch.inf, dtype=torch.float32)
    padded[:, 3 : vocab + 3] = logits
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            tokens, _ = sampler.sample(padded[:, 3 : vocab + 3], slots, positions)
            assert tokens.tolist() == together.tolist()
    finally:
        torch.set_num_threads(threads)
    alone = [
        sampler.sample(logits[row : row + 1], slots[row : row + 1], positions[:1])[0][0] for row in slots
    ]
    assert alone == together.tolist()


@EVERY_BUILD
def test_edited_rows(build: str) -> None:
    """Rows with penalties are sampled from a copy in float32; the caller's logits stay as they are."""
    vocab = 2000
    logits = random_logits(vocab, 2.0).bfloat16().float()
    before = logits.clone()
    best = logits.argmax(dim=-1).tolist()
    wishes = [{"temperature": 0.0}, {"temperature": 0.0, "logit_bias": LogitBias.of({11: 100.0})}]
    tokens = draw(make(build, vocab, ROWS), logits, wishes)  # type: ignore[arg-type]
    assert tokens.tolist() == [11 if row % 2 else best[row] for row in range(ROWS)]
    assert torch.equal(logits, before)


@EVERY_BUILD
def test_masks(build: str) -> None:
    """As if the logits of what a mask leaves out were -inf, for every wish; rows beside it are free."""
    vocab = 5003
    logits = random_logits(vocab, 2.0)
    chosen = np.random.default_rng(5)
    for density in (0.5, 0.02, 1.0):
        allowed = chosen.random((ROWS, vocab)) < density
        allowed[:, 1024:3072] &= chosen.random((ROWS, 1)) < 0.5  # whole chunks are left out
        allowed[:, 4100] = True
        allowed[::5] = True
        allowed[3] = False
        allowed[3, [7, 5002]] = True
        for wish in WISHES:
            for rows in (logits, logits.bfloat16().float()):
                masked = rows.masked_fill(torch.from_numpy(~allowed), float("-inf"))
                expected = draw(make(build, vocab, ROWS), masked, [wish])
                for form in (build, "torch"):
                    sampler = make(form, vocab, ROWS)
                    found = draw_masked(sampler, rows, wish, allowed)
                    assert allowed[np.arange(ROWS), found].all()
                    if form == build:
                        assert found.tolist() == expected.tolist(), (wish, density)


def draw_masked(sampler: Sampler, logits: Tensor, wish: dict[str, float], allowed: np.ndarray) -> np.ndarray:
    """Every fifth row is free."""
    vocab = sampler.vocab_size
    for slot in range(len(logits)):
        constraint = Constraint("any") if slot % 5 else None
        wanted = Sampling(seed=slot * 977, constraint=constraint, **wish)  # type: ignore[arg-type]
        sampler.admit(slot, np.array([1, 2], np.int32), 2, wanted, Stopping(9))
        sampler.masked[slot] = constraint is not None
        bits = np.packbits(allowed[slot], bitorder="little")
        row = np.zeros(4 * (vocab // 32 + 1), np.uint8)
        row[: len(bits)] = bits
        sampler.masks[slot] = row.view(np.uint32) if slot % 5 else 0
    slots = np.arange(len(logits), dtype=np.int32)
    tokens, _ = sampler.sample(logits, slots, np.full(len(logits), 7, np.int32))
    return tokens


@EVERY_BUILD
def test_log_probabilities_are_of_what_a_mask_allows(build: str) -> None:
    logits = random_logits(100, 1.0)[:2]
    for form in (build, "torch"):
        sampler = make(form, 100, 2)
        for slot, constraint in ((0, Constraint("any")), (1, None)):
            wanted = Sampling(seed=1, logprobs=5, constraint=constraint)
            sampler.admit(slot, np.array([1], np.int32), 1, wanted, Stopping(9))
        sampler.masked[0] = 1
        sampler.masks[0, 1] = 0b1010  # 33 and 35
        tokens, found = sampler.sample(logits, np.arange(2, dtype=np.int32), np.full(2, 7, np.int32))
        best = logits[0, [33, 35]].log_softmax(-1).tolist()
        assert tokens[0] in (33, 35)
        assert dict(found[0].top) == pytest.approx({33: best[0], 35: best[1]}, abs=1e-5)
        assert len(found[1].top) == 5
        assert found[1].top[0][1] == pytest.approx(logits[1].log_softmax(-1).max().item(), abs=1e-5)
