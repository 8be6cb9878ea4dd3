"""The counter-based generator: its published outputs, its distribution, its independence."""

from __future__ import annotations

import numpy as np

from baton.model.sampling.counter_random import GOLDEN, mix, stream_starts, uniforms
from baton.protocol.rules.seeds import choice_seed

MASK = (1 << 64) - 1


def test_outputs_are_those_of_splitmix64() -> None:
    # The first outputs of the reference implementation for the state 1234567.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    states = np.array([(1234567 + n * GOLDEN) & MASK for n in (1, 2, 3)], np.uint64)
    assert mix(states).tolist() == published


def test_uniform_is_the_position_th_output_of_the_seeds_stream() -> None:
    def plain(value: int) -> int:
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
        return value ^ (value >> 31)

    for seed, position in ((0, 0), (1, 5), (MASK, 100_000), (1 << 63, 7)):
        start = plain((seed + GOLDEN) & MASK)
        expected = (plain((start + (position + 1) * GOLDEN) & MASK) >> 11) * 2.0**-53
        starts = stream_starts(np.array([seed], np.uint64))
        assert uniforms(starts, np.array([position], np.uint64))[0] == expected


def test_seeds_of_choices_are_mixed_in_the_same_way() -> None:
    for seed, choice in ((0, 1), (5, 3), (MASK, 127), (1 << 63, 2)):
        assert choice_seed(seed, choice) == mix(np.array([(seed + choice * GOLDEN) & MASK], np.uint64))[0]


def test_uniform_over_positions_and_over_seeds() -> None:
    positions = np.arange(20_000, dtype=np.uint64)
    one_seed = uniforms(stream_starts(np.full(20_000, 3, np.uint64)), positions)
    one_position = uniforms(stream_starts(positions), np.full(20_000, 3, np.uint64))
    for numbers in (one_seed, one_position):
        assert 0 <= numbers.min() <= numbers.max() < 1
        counts = np.histogram(numbers, bins=100, range=(0, 1))[0]
        chi_square = float(((counts - 200) ** 2 / 200).sum())
        assert 50 < chi_square < 150  # 99 degrees of freedom: mean 99, deviation 14
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03
