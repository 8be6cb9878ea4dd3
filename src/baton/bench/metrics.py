"""From what single requests came to, to the numbers of a benchmark.  Definitions are vLLM's:

* *TTFT*, time to first token: from sending a request to the first event with tokens.
* *TPOT*, time per output token, without the first: (E2EL - TTFT) / (output tokens - 1), one value a request.
* *ITL*, inter-token latency: each gap between two events of a stream; a server that sends several tokens in
  one event has fewer and longer ones.
* *E2EL*, end-to-end latency: from sending a request to its last token.
* *throughput*: finished requests, output tokens, or prompt and output tokens, over the whole duration.
* *goodput*: requests a second that met all the limits given.

Failed requests count in `failed` only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from baton.bench.client import Outcome

LATENCIES: dict[str, tuple[str, Callable[[Outcome], list[float]]]] = {
    "ttft": ("Time to First Token", lambda outcome: [outcome.ttft]),
    "tpot": (
        "Time per Output Token (excl. 1st token)",
        lambda outcome: [outcome.tpot] if outcome.output_tokens > 1 else [],
    ),
    "itl": ("Inter-token Latency", lambda outcome: outcome.itls),
    "e2el": ("End-to-end Latency", lambda outcome: [outcome.e2el]),
}
"""Name → title, and the values (seconds) that a request contributes."""

_LIMITED: dict[str, Callable[[Outcome], float]] = {
    "ttft": lambda outcome: outcome.ttft,
    "tpot": lambda outcome: outcome.tpot,
    "e2el": lambda outcome: outcome.e2el,
}


@dataclass(frozen=True)
class Latency:
    """Statistics in milliseconds."""

    mean: float
    median: float
    std: float
    percentiles: dict[float, float]


@dataclass(frozen=True)
class Metrics:
    """The result of a run.  Rates are per second."""

    duration: float
    """Seconds from the first request to the end of the last."""
    completed: int
    failed: int
    total_input_tokens: int
    total_output_tokens: int
    request_goodput: float | None
    """None: no limits were given."""
    latencies: dict[str, Latency]
    errors: dict[str, int]
    """Reason → how many requests."""

    @property
    def request_throughput(self) -> float:
        return self.completed / self.duration

    @property
    def output_throughput(self) -> float:
        return self.total_output_tokens / self.duration

    @property
    def total_token_throughput(self) -> float:
        return (self.total_input_tokens + self.total_output_tokens) / self.duration

    def as_dict(self) -> dict[str, Any]:
        """With the keys of vLLM's result files."""
        names = ("duration", "completed", "failed", "total_input_tokens", "total_output_tokens")
        rates = ("request_throughput", "output_throughput", "total_token_throughput")
        found: dict[str, Any] = {name: getattr(self, name) for name in (*names, *rates)}
        found["request_goodput"] = self.request_goodput
        for name, latency in self.latencies.items():
            found[f"mean_{name}_ms"] = latency.mean
            found[f"median_{name}_ms"] = latency.median
            found[f"std_{name}_ms"] = latency.std
            for percentile, value in latency.percentiles.items():
                found[f"p{percentile:g}_{name}_ms"] = value
        return found


def calculate(
    outcomes: Sequence[Outcome],
    duration: float,
    percentiles: Sequence[float] = (99.0,),
    goodput: dict[str, float] | None = None,
) -> Metrics:
    """`goodput`: milliseconds by name (ttft, tpot, e2el) that a good request does not exceed."""
    good = [outcome for outcome in outcomes if outcome.succeeded]
    errors: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.error:
            errors[outcome.error] = errors.get(outcome.error, 0) + 1
    return Metrics(
        duration=duration,
        completed=len(good),
        failed=len(outcomes) - len(good),
        total_input_tokens=sum(len(outcome.request.prompt) for outcome in good),
        total_output_tokens=sum(outcome.output_tokens for outcome in good),
        request_goodput=None if not goodput else _num_good(good, goodput) / duration,
        latencies={
            name: _latency([value for outcome in good for value in values(outcome)], percentiles)
            for name, (_, values) in LATENCIES.items()
        },
        errors=errors,
    )


def _num_good(outcomes: Sequence[Outcome], goodput: dict[str, float]) -> int:
    return sum(
        all(_LIMITED[name](outcome) * 1e3 <= limit for name, limit in goodput.items()) for outcome in outcomes
    )


def _latency(seconds: list[float], percentiles: Sequence[float]) -> Latency:
    """Zeros where there is no value, as vLLM reports."""
    values = np.asarray(seconds or [0.0]) * 1e3
    return Latency(
        mean=float(values.mean()),
        median=float(np.median(values)),
        std=float(values.std()),
        percentiles={q: float(np.percentile(values, q)) for q in percentiles},
    )


def parse_goodput(words: Sequence[str]) -> dict[str, float]:
    """["ttft:200", "tpot:50"] → {"ttft": 200.0, "tpot": 50.0}.  Raises `ValueError`."""
    found: dict[str, float] = {}
    for word in words:
        name, _, text = word.partition(":")
        try:
            limit = float(text)
        except ValueError:
            limit = -1.0
        if name not in _LIMITED or limit < 0:
            raise ValueError(f"--goodput {word}: give NAME:MILLISECONDS, with one of {', '.join(_LIMITED)}")
        found[name] = limit
    return found


def report(metrics: Metrics, selected: Sequence[str], max_concurrency: int | None, rate: float) -> str:
    """The lines for a person.  `selected`: which latencies."""
    rows: list[tuple[str, str]] = [
        ("Successful requests", f"{metrics.completed}"),
        ("Failed requests", f"{metrics.failed}"),
    ]
    if max_concurrency is not None:
        rows.append(("Maximum request concurrency", f"{max_concurrency}"))
    if rate != float("inf"):
        rows.append(("Request rate configured (RPS)", f"{rate:.2f}"))
    rows += [
        ("Benchmark duration (s)", f"{metrics.duration:.2f}"),
        ("Total input tokens", f"{metrics.total_input_tokens}"),
        ("Total generated tokens", f"{metrics.total_output_tokens}"),
        ("Request throughput (req/s)", f"{metrics.request_throughput:.2f}"),
    ]
    if metrics.request_goodput is not None:
        rows.append(("Request goodput (req/s)", f"{metrics.request_goodput:.2f}"))
    rows += [
        ("Output token throughput (tok/s)", f"{metrics.output_throughput:.2f}"),
        ("Total token throughput (tok/s)", f"{metrics.total_token_throughput:.2f}"),
    ]
    lines = [f"{' Serving Benchmark Result ':=^50}", *map(_line, rows)]
    for name in selected:
        latency = metrics.latencies[name]
        short = name.upper()
        lines.append(f"{LATENCIES[name][0]:-^50}")
        lines += [
            _line((f"Mean {short} (ms)", f"{latency.mean:.2f}")),
            _line((f"Median {short} (ms)", f"{latency.median:.2f}")),
        ]
        lines += [_line((f"P{q:g} {short} (ms)", f"{value:.2f}")) for q, value in latency.percentiles.items()]
    lines.append("=" * 50)
    lines += [f"failed {count}×: {reason}" for reason, count in list(metrics.errors.items())[:10]]
    return "\n".join(lines)


def _line(row: tuple[str, str]) -> str:
    return f"{row[0] + ':':<40} {row[1]:<9}".rstrip()
