"""The metrics that are counted with every token."""

from __future__ import annotations

import asyncio

from prometheus_client.parser import text_string_to_metric_families

from baton.engine.counters import Counters
from baton.gateway.http.memory import KEPT_S, MemorySamples
from baton.observe.handovers import MAX_REASONS, Losses
from baton.observe.memory import Memory
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


class Found(dict):
    """(name, values of the labels but the model's, sorted) → value; asked for in any order."""

    def __getitem__(self, key: tuple[str, ...]) -> float:
        return super().__getitem__((key[0], *sorted(key[1:])))


def labelled(text: bytes) -> Found:
    found = Found()
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            values = sorted(value for label, value in sample.labels.items() if label != "model_name")
            found[sample.name.removeprefix("baton:"), *values] = sample.value
    return found


def engine(stats: dict) -> InstanceSample:
    return InstanceSample(stats, "mixed", ready=True, draining=False, in_flight=0, restarts=0)


def test_hand_overs_by_outcome_reason_and_transport():
    counters = Counters()
    handovers = counters.handovers
    handovers.departures, handovers.taken, handovers.returned = 10, 5, 1
    handovers.stayed.update(no_credit=3, returned=1)
    handovers.seated = 4
    handovers.recomputed["lease over"] = 2
    handovers.fetched_by.update(shared_memory=1 << 20, tcp=7)
    handovers.takes.add(0.003)
    text = Metrics("m").render({"p": engine(counters.snapshot())}, handed_over=0, continued=0)
    found = labelled(text)
    assert [found["handovers_total", one, "p"] for one in ("taken", "stayed", "lost")] == [5, 3, 0]
    assert found["handovers_total", "p", "returned"] == 1
    assert found["handovers_stayed_total", "no_credit", "p"] == 3
    assert found["handover_recomputed_total", "lease over", "p"] == 2
    assert found["handover_arrivals_total", "p", "seated"] == 4
    assert found["handover_arrivals_total", "p", "recomputed"] == 2
    assert found["handover_bytes_total", "p", "shared_memory"] == 1 << 20
    assert found["handover_bytes_total", "p", "tcp"] == 7
    assert found["handover_seconds_bucket", "0.005", "p"] == 1
    assert found["handover_seconds_sum", "p"] == 0.003


def test_reasons_are_bounded():
    counters = Counters()
    counters.handovers.stayed.update({f"reason {number}": 1 for number in range(100)})
    found = labelled(Metrics("m").render({"p": engine(counters.snapshot())}, handed_over=0, continued=0))
    stayed = Found({key: value for key, value in found.items() if key[0] == "handovers_stayed_total"})
    assert len(stayed) == MAX_REASONS + 1
    assert sum(stayed.values()) == 100
    assert stayed["handovers_stayed_total", "*", "p"] > 0


def test_methods_are_bounded():
    metrics = Metrics("m")
    for method in ("GET", "BREW", "WHEN"):
        metrics.http_request(method, "/health", 200)
    found = labelled(metrics.render({}, handed_over=0, continued=0))
    assert found["http_requests_total", "/health", "200", "other"] == 2


def test_lost_instances():
    losses = Losses(continued=3, failed=1, tokens=40, bounds=(0.1, 1), gaps=[1, 1, 0], gap_seconds=0.6)
    found = labelled(Metrics("m").render({}, handed_over=0, continued=3, losses=losses))
    assert found["requests_lost_total", "continued"] == 3
    assert found["requests_lost_total", "failed"] == 1
    assert found["continued_tokens_total",] == 40
    assert found["continuation_seconds_bucket", "0.1"] == 1
    assert found["continuation_seconds_count",] == 2


def test_cached_prompts_and_time_per_token():
    metrics = Metrics("m")
    for cached in (0, 30):
        metrics.finished(
            "stop", seconds=9, prompt=40, generated=5, queued_s=0.1, first_s=0.2, decode_s=0.4, cached=cached
        )
    metrics.finished("abort", seconds=9, prompt=40, generated=1, first_s=0.2, decode_s=0.0)
    metrics.choices(2, longest=5)
    metrics.choices(1)  # of an embedding
    found = labelled(metrics.render({}, handed_over=0, continued=0))
    assert found["prompt_tokens_cached_total",] == 30
    assert found["prompt_tokens_by_source_total", "local_compute"] == 50
    assert found["prompt_tokens_by_source_total", "local_cache_hit"] == 30
    assert found["request_prefill_kv_computed_tokens_sum",] == 50
    assert found["request_time_per_output_token_seconds_count",] == 2
    assert found["request_time_per_output_token_seconds_sum",] == 0.2
    assert found["request_max_num_generation_tokens_count",] == 1


def test_memory_is_summed_by_owner():
    memory = {
        name: Memory(100, 30, 20)
        for name in ("gateway", "fork server", "helper 3", "d-0 engine", "d-0 rank 0")
    }
    found = labelled(Metrics("m").render({}, handed_over=0, continued=0, memory=memory))
    sizes = {key[1:]: value for key, value in found.items() if key[0] == "process_memory_bytes"}
    assert sizes == {
        ("gateway", "private"): 150,
        ("gateway", "weights"): 90,
        ("gateway", "kv_pool"): 60,
        ("d-0", "private"): 100,
        ("d-0", "weights"): 60,
        ("d-0", "kv_pool"): 40,
    }


async def test_memory_is_read_now_and_then():
    now, asked = [0.0], []

    def read(processes):
        asked.append(dict(processes))
        if len(asked) == 2:
            raise PermissionError
        return {name: Memory(1, 0, 0) for name in processes}

    samples = MemorySamples(lambda: {"gateway": 1}, clock=lambda: now[0], read=read)
    for _ in range(50):
        assert set(await samples.latest()) == {"gateway"}
    assert len(asked) == 1
    now[0] += KEPT_S
    found = await asyncio.gather(*(samples.latest() for _ in range(5)))
    assert len(asked) == 2
    assert found[0] == {}


def test_preemptions_of_a_request():
    counters = Counters()
    counters.preemptions_of.add(0)
    counters.preemptions_of.add(2)
    found = labelled(Metrics("m").render({"e": engine(counters.snapshot())}, handed_over=0, continued=0))
    buckets = [found["request_num_preemptions_bucket", bound, "e"] for bound in ("0.0", "1.0", "2.0")]
    assert buckets == [1, 1, 2]
