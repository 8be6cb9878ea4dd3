"""Random work is exact, reproducible, and arrives as asked."""

from __future__ import annotations

import math

import numpy as np
import pytest

from baton.bench.workload import arrival_times, random_requests


def test_lengths_are_exact_and_prompts_differ() -> None:
    requests = random_requests(50, 7, 3, vocab_size=1000, seed=1)
    assert {(len(request.prompt), request.output_len) for request in requests} == {(7, 3)}
    assert all(10 <= token < 1000 for request in requests for token in request.prompt)
    assert len({tuple(request.prompt) for request in requests}) == 50
    assert requests == random_requests(50, 7, 3, vocab_size=1000, seed=1)
    assert requests != random_requests(50, 7, 3, vocab_size=1000, seed=2)


def test_a_range_of_lengths() -> None:
    requests = random_requests(400, 100, 10, vocab_size=1000, range_ratio=0.5)
    lengths = {len(request.prompt) for request in requests}
    assert min(lengths) >= 50
    assert max(lengths) <= 150
    assert len(lengths) > 60
    assert {request.output_len for request in requests} == set(range(5, 16))
    assert min(len(request.prompt) for request in random_requests(20, 1, 1, 15, range_ratio=1.0)) == 1


@pytest.mark.parametrize("burstiness", [0.2, 1.0, 5.0, math.inf])
def test_arrivals_keep_the_rate(burstiness: float) -> None:
    times = arrival_times(500, rate=20.0, burstiness=burstiness)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(25.0)
    gaps = np.diff(times)
    variation = gaps.std() / gaps.mean()
    assert variation == pytest.approx(0.0 if math.isinf(burstiness) else burstiness**-0.5, rel=0.3, abs=1e-9)


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert arrival_times(3, math.inf) == [0.0, 0.0, 0.0]
