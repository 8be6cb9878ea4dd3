"""The metrics that are counted with every token."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from baton.observe.metrics import Metrics


def samples(metrics: Metrics) -> dict[tuple[str, str], float]:
    """(name, bucket) → value."""
    text = metrics.render({}, handed_over=0, continued=0).decode()
    return {
        (sample.name.removeprefix("baton:"), sample.labels.get("le", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_tokens_and_the_time_between_them():
    metrics = Metrics("m")
    metrics.first_tokens(1, 7, 0.02)
    for seconds in (0.001, 0.0011, 0.3, 60.0):
        metrics.more_tokens(2, seconds)
    found = samples(metrics)
    assert found["prompt_tokens_total", ""] == 7
    assert found["generation_tokens_total", ""] == 9
    assert found["time_to_first_token_seconds_count", ""] == 1
    name = "inter_token_latency_seconds"
    assert found[f"{name}_count", ""] == found[f"{name}_bucket", "+Inf"] == 4
    assert found[f"{name}_sum", ""] == 0.001 + 0.0011 + 0.3 + 60.0
    bounds = ("0.001", "0.0025", "0.2", "0.3", "10.0")
    assert [found[f"{name}_bucket", bound] for bound in bounds] == [1, 2, 2, 3, 3]


def test_nothing_was_generated():
    found = samples(Metrics("m"))
    assert found["generation_tokens_total", ""] == 0
    assert found["inter_token_latency_seconds_bucket", "+Inf"] == 0
