"""What every `timings` keeps to."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

NOT_PARTS = {"total_ms", "first_token_ms", "clock_error_ms", "accepted_drafts"}


def check_timings(timings: Mapping[str, float | None] | None, *parts: str) -> None:
    """They add up; these parts are among them, as are `read`, `queue` and `decode`."""
    assert timings is not None
    assert {f"{name}_ms" for name in ("read", "queue", "decode", *parts)} <= set(timings)
    seconds = [value for name, value in timings.items() if name not in NOT_PARTS]
    assert all(value is not None and value >= 0 for value in seconds), timings
    assert sum(filter(None, seconds)) == pytest.approx(timings["total_ms"], abs=0.01)
    assert 0 < (timings["first_token_ms"] or 0) <= (timings["total_ms"] or 0)
