"""The metrics that are counted with every token."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from baton.observe.metrics import InstanceSample, Metrics


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


def test_what_became_of_a_request():
    metrics = Metrics("m")
    metrics.finished(
        "stop", seconds=9, prompt=3, generated=4, max_tokens=16, queued_s=1.0, first_s=3.0, decode_s=5.0
    )
    metrics.finished("stop", seconds=9, prompt=3, generated=4, first_s=3.0, decode_s=5.0)  # of a stop string
    metrics.finished("abort", seconds=9, prompt=3, generated=0)
    metrics.choices(3)
    found = samples(metrics)
    sums = {
        name: found[f"request_{name}_time_seconds_sum", ""] for name in ("inference", "prefill", "decode")
    }
    counts = {name: found[f"request_{name}_time_seconds_count", ""] for name in sums}
    assert sums == {"inference": 7.0, "prefill": 2.0, "decode": 10.0}
    assert counts == {"inference": 1, "prefill": 1, "decode": 2}
    assert (found["request_params_n_sum", ""], found["request_params_n_count", ""]) == (3, 1)
    assert found["request_params_max_tokens_sum", ""] == 16


def test_what_engines_say_of_their_steps_and_caches():
    stats = {
        "step_tokens": {"bounds": [1, 8], "counts": [5, 2, 1], "sum": 40},
        "blocks": {"total": 100},
        "block_size": 16,
        "enable_prefix_caching": True,
    }
    sample = InstanceSample(stats, "mixed", ready=True, draining=False, in_flight=0, restarts=0)
    silent = sample._replace(stats=None)
    text = Metrics("m").render({"a": sample, "b": silent}, handed_over=0, continued=0).decode()
    for line in (
        'baton:iteration_tokens_total_bucket{instance="a",le="1.0",model_name="m"} 5.0',
        'baton:iteration_tokens_total_bucket{instance="a",le="8.0",model_name="m"} 7.0',
        'baton:iteration_tokens_total_bucket{instance="a",le="+Inf",model_name="m"} 8.0',
        'baton:iteration_tokens_total_sum{instance="a",model_name="m"} 40.0',
        'baton:cache_config_info{block_size="16",enable_prefix_caching="True",instance="a",model_name="m",'
        'num_gpu_blocks="100"} 1.0',
    ):
        assert line in text
    assert 'iteration_tokens_total_count{instance="b"' not in text
