"""The numbers of a run, from requests whose times are known."""

from __future__ import annotations

import math

import pytest

from baton.bench.client import Outcome
from baton.bench.metrics import calculate, parse_goodput, report
from baton.bench.workload import Request


def outcome(start: float, times: list[float], tokens: int, error: str = "") -> Outcome:
    return Outcome(Request([11] * 10, tokens), start, times, tokens, error=error)


RUN = [
    outcome(0.0, [0.1, 0.2, 0.4], 3),
    outcome(1.0, [1.3, 1.5], 5),  # two events, five tokens
    outcome(1.0, [1.2], 1),
    outcome(1.0, [], 9, "connection lost"),
]


def test_definitions() -> None:
    metrics = calculate(RUN, duration=2.0, percentiles=(50, 99))
    assert (metrics.completed, metrics.failed) == (3, 1)
    assert (metrics.total_input_tokens, metrics.total_output_tokens) == (30, 9)
    assert metrics.request_throughput == pytest.approx(1.5)
    assert metrics.output_throughput == pytest.approx(4.5)
    assert metrics.total_token_throughput == pytest.approx(19.5)
    assert metrics.request_goodput is None
    assert metrics.errors == {"connection lost": 1}
    found = metrics.as_dict()
    assert found["mean_ttft_ms"] == pytest.approx((100 + 300 + 200) / 3)
    assert found["mean_tpot_ms"] == pytest.approx((300 / 2 + 200 / 4) / 2)  # not of the single token
    assert found["mean_itl_ms"] == pytest.approx((100 + 200 + 200) / 3)
    assert found["median_e2el_ms"] == pytest.approx(400)
    assert found["p50_ttft_ms"] == pytest.approx(200)
    assert found["p99_ttft_ms"] == pytest.approx(298)


def test_goodput_counts_requests_within_all_limits() -> None:
    def goodput(*limits: str) -> float | None:
        return calculate(RUN, 2.0, goodput=parse_goodput(limits)).request_goodput

    assert goodput("ttft:250") == pytest.approx(1.0)
    assert goodput("ttft:250", "tpot:100") == pytest.approx(0.5)  # a single token has no TPOT to exceed
    assert goodput("e2el:1000") == pytest.approx(1.5)


@pytest.mark.parametrize("word", ["itl:5", "ttft", "ttft:fast", "ttft:-1"])
def test_a_limit_that_is_none(word: str) -> None:
    with pytest.raises(ValueError, match="--goodput"):
        parse_goodput([word])


def test_nothing_succeeded() -> None:
    metrics = calculate([RUN[-1]], duration=1.0)
    assert metrics.as_dict()["mean_ttft_ms"] == 0.0
    assert "failed 1×: connection lost" in report(metrics, ["ttft"], None, math.inf)


def test_the_report_shows_what_was_selected() -> None:
    text = report(calculate(RUN, 2.0, (90.0,)), ["itl"], 16, math.inf)
    assert "P90 ITL (ms):" in text
    assert "TTFT" not in text
    assert "Maximum request concurrency:             16" in text
