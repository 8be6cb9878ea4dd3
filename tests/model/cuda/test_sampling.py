"""Sampling, interpreted or on a device: the tokens of the CPU's kernel, one for one, and edits of PyTorch,
bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from baton.model.cpu.library import instruction_sets, load
from baton.model.cpu.sampling import KernelSampling, SlotParameters, native_kernel
from baton.model.cuda.sampling import CHUNK, Wishes, sample, sample_launches
from baton.model.cuda.slot_sampling import TritonSampling
from baton.model.sampling.counter_random import stream_starts
from baton.model.sampling.edits import SlotEdits, edit_entries, edit_logits, leave_out
from baton.protocol.params.sampling import LogitBias, Sampling, Stopping
from tests.model.cuda.where import DEVICE, ON_DEVICE

FUSED = [name for name in instruction_sets() if name.startswith("avx")]
"""Builds with fused multiply-add, whose weights are those of the kernels."""
NATIVE = pytest.mark.skipif(not FUSED, reason="there is no native library with fused multiply-add")
VOCAB = 2500
WISHES: list[dict[str, float]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
    {"top_k": 1},
    {"top_k": 1200},
    {"top_k": 900, "top_p": 0.8, "min_p": 0.001},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 2.5, "top_p": 0.999},
    {"temperature": 0.6, "min_p": 0.05},
    {"top_p": 1e-9},
    {"temperature": 0.02, "top_k": 700, "top_p": 0.99},
]


def parameters(
    wishes: list[dict[str, float]], vocab: int, allowed: np.ndarray | None = None
) -> SlotParameters:
    """A slot for each wish; `allowed` [slots, vocab]: what masks say, of every slot but each third."""
    have = SlotParameters.of_greedy(len(wishes), vocab)
    for slot, wish in enumerate(wishes):
        have.temperature[slot] = wish.get("temperature", 1.0)
        have.top_k[slot] = wish.get("top_k", vocab)
        have.top_p[slot] = wish.get("top_p", 1.0)
        have.min_p[slot] = wish.get("min_p", 0.0)
    have.streams[:] = stream_starts(np.arange(len(wishes), dtype=np.uint64) * np.uint64(2**63 + 977))
    if allowed is not None:
        have.masked[:] = np.arange(len(wishes)) % 3 != 2
        bits = np.packbits(allowed, axis=1, bitorder="little")
        have.masks.view(np.uint8)[:, : bits.shape[1]] = bits
    return have


def both(
    logits: Tensor, have: SlotParameters, slots: list[int], position: int
) -> tuple[list[int], list[int]]:
    """Tokens of the kernels and of the CPU's."""
    chosen = np.array(slots, np.int32)
    positions = np.full(len(slots), position, np.int32)
    cpu = KernelSampling(native_kernel(load(FUSED[0])), have, logits.shape[1])
    wishes = Wishes.of(have, DEVICE)
    on_device = (torch.from_numpy(numbers).to(DEVICE) for numbers in (chosen, positions))
    found = sample(logits.to(DEVICE), *on_device, wishes)
    return found.tolist(), cpu.sample(logits, chosen, positions).tolist()


@NATIVE
@pytest.mark.parametrize(
    ("dtype", "spread", "masked"),
    [(torch.float32, 1.0, False), (torch.bfloat16, 4.0, True), (torch.bfloat16, 0.02, False)],
    ids=["float32", "bfloat16, masked", "many equals"],
)
def test_agrees_with_the_cpu(dtype: torch.dtype, spread: float, masked: bool):
    """Every wish; rows lie apart in memory."""
    generator = torch.Generator().manual_seed(int(spread * 100))
    slots = list(range(len(WISHES)))
    logits = (
        (torch.randn(len(slots), VOCAB + 7, generator=generator) * spread).to(dtype).float()[:, 2 : VOCAB + 2]
    )
    allowed = np.random.default_rng(1).random((len(slots), VOCAB)) < 0.4
    allowed[:, 1024:2048] = False  # a whole chunk
    found, expected = both(logits, parameters(WISHES, VOCAB, allowed if masked else None), slots, position=7)
    assert found == expected


@NATIVE
@ON_DEVICE
@pytest.mark.parametrize("spread", [0.02, 2.0, 6.0])
def test_agrees_with_the_cpu_for_a_large_vocabulary(spread: float):
    """256 rows of 151,936 logits, every wish, at several positions."""
    vocab, wishes = 151936, [WISHES[row % len(WISHES)] for row in range(256)]
    have = parameters(wishes, vocab)
    generator = torch.Generator().manual_seed(1)
    for position in range(3):
        logits = (torch.randn(256, vocab, generator=generator) * spread).bfloat16().float()
        found, expected = both(logits, have, list(range(256)), position)
        assert found == expected


@NATIVE
def test_equals_and_extremes():
    """Rows of equals, of which ids decide; rows where nearly everything, or everything, is impossible."""
    vocab = 1100
    logits = torch.zeros(7, vocab)
    logits[1, 500:] = -torch.inf
    logits[2] = -torch.inf
    logits[2, [5, 1099]] = 1.0
    logits[3, ::2] = -0.0
    logits[4] = torch.arange(vocab) % 3
    logits[5] = -torch.inf
    logits[6, 1050] = torch.inf
    wishes = [
        {"temperature": 0.0},
        {"top_k": 700},
        {"top_k": 40, "top_p": 0.5},
        {"temperature": 3.0, "top_p": 0.25},
    ]
    for wish in wishes:
        found, expected = both(logits, parameters([wish] * 7, vocab), list(range(7)), position=3)
        assert found == expected, wish


@NATIVE
def test_many_draws_of_one_distribution():
    """Positions draw other numbers, the CPU's; slots need not be in order; tokens come as often as they
    should."""
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).log_softmax(1).expand(30, 4).contiguous()
    have = parameters([{"temperature": 1.0}] * 30, 4)
    slots = list(reversed(range(30)))
    drawn = []
    for position in (0, 1, 2**31 - 1):
        found, expected = both(logits, have, slots, position)
        assert found == expected
        drawn.append(found)
    assert drawn[0] != drawn[1]
    often = np.bincount(np.concatenate(drawn), minlength=4) / 90
    assert np.abs(often - logits[0].exp().numpy()).max() < 0.15


@NATIVE
def test_a_row_depends_on_nothing_else():
    rows = [1, 2, 5]
    logits = torch.randn(3, 1100, generator=torch.Generator().manual_seed(5)) * 2
    have = parameters([WISHES[row] for row in rows], 1100)
    wishes = Wishes.of(have, DEVICE)
    together, _ = both(logits, have, [0, 1, 2], position=9)
    for row in (1, 2):
        one, nine = (torch.tensor([number], dtype=torch.int32, device=DEVICE) for number in (row, 9))
        alone = sample(logits[row : row + 1].to(DEVICE), one, nine, wishes)
        assert alone.tolist() == [together[row]]


@pytest.mark.parametrize(
    ("wish", "best"),
    [
        ({"temperature": 1.5, "top_k": 3}, (28.0, 29.5, 31.25)),
        ({"temperature": 0.4, "top_p": 0.97}, (30.1, 31.0, 31.25)),
    ],
    ids=["top-k", "top-p"],
)
def test_chunks_that_decide_nothing_are_not_read(wish: dict[str, float], best: tuple[float, ...]):
    """One program chooses a row's token, so what it reads is what it takes.  Of twelve chunks three have the
    best tokens: what the others hold once their maxima and masses are known does not matter."""
    vocab, places = 12 * CHUNK, [1, 4, 10]
    logits = torch.rand(1, vocab, generator=torch.Generator().manual_seed(4)) + 25
    for logit, chunk in zip(best, places, strict=True):
        logits[0, chunk * CHUNK + 17] = logit
    spoiled = logits.clone()
    for chunk in set(range(12)).difference(places):
        spoiled[0, chunk * CHUNK : (chunk + 1) * CHUNK] = 31.2
    wishes = Wishes.of(parameters([wish], vocab), DEVICE)
    logits, spoiled = logits.to(DEVICE), spoiled.to(DEVICE)
    slot = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    found = torch.empty_like(slot)
    for number in (5, 6, 15):  # (draws that tell how much is kept)
        position = torch.full_like(slot, number)
        expected = sample(logits, slot, position, wishes).tolist()
        there = logits.clone()
        *measuring, choosing = sample_launches(there, slot, position, wishes, found)
        for launch in measuring:
            launch.run()
        there.copy_(spoiled)
        choosing.run()
        assert found.tolist() == expected


def test_the_same_edits_as_pytorchs():
    """Bias, tokens that are impossible, penalties, and all of them for one token: the same bits."""
    vocab = 300
    tokens = np.array([3, 4, 5, 3, 9, 9, 9, 299], np.int32)
    bias = LogitBias.of({3: 4.5, 7: -100.0, 299: 1.25})
    allowed = np.arange(0, vocab, 3, dtype=np.int32).tobytes()
    bad = tuple(np.array(word, np.int32).tobytes() for word in ((9, 299, 17), (4,), (9, 18)))
    asked = [
        Sampling(seed=0, logit_bias=bias, repetition_penalty=1.3),
        Sampling(seed=0, frequency_penalty=0.7, presence_penalty=-0.4, repetition_penalty=0.8),
        Sampling(seed=0, frequency_penalty=0.1, bad_words=bad, allowed=allowed),
        Sampling(seed=0, logit_bias=bias),
    ]
    stops = [Stopping(max_tokens=20, min_tokens=9 * (row != 1), stop_token_ids=(9, 11)) for row in range(4)]
    edits = [SlotEdits.of(tokens, 4, one, stop, vocab) for one, stop in zip(asked, stops, strict=True)]
    logits = (torch.randn(4, vocab, generator=torch.Generator().manual_seed(2)) * 3).to(DEVICE)
    expected, rows = logits.clone(), [(row, 8, one) for row, one in enumerate(edits)]
    edit_logits(expected, rows)
    leave_out(logits, rows)
    entries = edit_entries(rows)
    named = list(zip(entries["rows"].tolist(), entries["ids"].tolist(), strict=True))
    assert len(set(named)) == len(named)
    TritonSampling(SlotParameters.of_greedy(4, vocab), vocab, DEVICE).edit(logits, entries)
    assert torch.equal(logits, expected)
    assert torch.isneginf(logits[0, [9, 11]]).all()
    assert torch.isneginf(logits[2, [4, 17]]).all()
    assert not torch.isneginf(logits[1]).any()


def test_what_does_not_fit_is_refused_by_its_name():
    wishes = Wishes.of(SlotParameters.of_greedy(2, 64), torch.device("cpu"))
    one = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="masks have only 96 bits"):
        sample(torch.zeros(1, 97), one, one, wishes)
    with pytest.raises(ValueError, match=r"slots \[1\] int64: the kernel takes int32"):
        sample(torch.zeros(1, 64), one.long(), one, wishes)
    with pytest.raises(ValueError, match=r"positions \[2\].*takes \[1\]"):
        sample(torch.zeros(1, 64), one, torch.zeros(2, dtype=torch.int32), wishes)
    assert sample(torch.zeros(0, 64), one[:0], one[:0], wishes).tolist() == []
