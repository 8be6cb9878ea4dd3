"""The JSON of a serving benchmark, with the keys of vLLM's result files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from baton.bench.client import Outcome
from baton.bench.machine import machine
from baton.bench.metrics import Metrics


@dataclass(frozen=True)
class Setting:
    """What was asked for."""

    model_id: str
    num_prompts: int
    random_input_len: int
    random_output_len: int
    random_range_ratio: float
    request_rate: float
    """Requests a second; infinite: all at once."""
    burstiness: float
    max_concurrency: int | None
    seed: int
    goodput: dict[str, float]
    ready_s: float | None
    """Seconds until the server that was started for the run was ready."""

    def title(self) -> str:
        rate = "all at once" if math.isinf(self.request_rate) else f"{self.request_rate:g} requests/s"
        limit = "" if self.max_concurrency is None else f", {self.max_concurrency} at a time"
        sizes = f"{self.num_prompts} × {self.random_input_len} in / {self.random_output_len} out"
        return f"{self.model_id}: {sizes}, {rate}{limit}"


def default_name(setting: Setting, now: datetime) -> str:
    limit = "" if setting.max_concurrency is None else f"-concurrency{setting.max_concurrency}"
    model = Path(setting.model_id).name
    return f"baton-{setting.request_rate:g}qps{limit}-{model}-{now:%Y%m%d-%H%M%S}.json"


def as_json(
    setting: Setting, metrics: Metrics, outcomes: Sequence[Outcome], now: datetime, detailed: bool
) -> dict[str, Any]:
    """`detailed`: with the values of every request (seconds), in their order."""
    found: dict[str, Any] = {"date": f"{now:%Y%m%d-%H%M%S}", **vars(setting), **metrics.as_dict()}
    if math.isinf(setting.request_rate):
        found["request_rate"] = "inf"
    if detailed:
        found |= {
            "input_lens": [len(outcome.request.prompt) for outcome in outcomes],
            "output_lens": [outcome.output_tokens for outcome in outcomes],
            "start_times": [outcome.start for outcome in outcomes],
            "ttfts": [outcome.ttft if outcome.succeeded else 0.0 for outcome in outcomes],
            "itls": [outcome.itls for outcome in outcomes],
            "errors": [outcome.error for outcome in outcomes],
        }
    return found | {"machine": machine()}


def remarks(outcomes: Sequence[Outcome], full_length: bool) -> list[str]:
    """What a reader of the numbers has to know.  `full_length`: all answers should be as long as asked."""
    good = [outcome for outcome in outcomes if outcome.succeeded]
    found = []
    if any(outcome.counted_events for outcome in good):
        found.append("the server does not say how many tokens it made: events are counted as tokens")
    short = sum(outcome.output_tokens != outcome.request.output_len for outcome in good)
    if full_length and short:
        found.append(f"{short} answers are not as long as asked for")
    other = sum(outcome.input_tokens not in (None, len(outcome.request.prompt)) for outcome in good)
    if other:
        found.append(f"{other} prompts have another length for the server than for the client")
    return found
