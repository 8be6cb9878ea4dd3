"""Prometheus metrics of one server, in vLLM's names with the prefix `baton:`.

A `Metrics` owns its registry, so that two servers in one process (tests, say) share nothing.  What the
gateway sees is counted as it happens; what only an engine knows comes from its statistics, which the
caller fetches when it is scraped and passes to `render`: a scrape without them has the rest.  What concerns
one instance has the label `instance`; a sum over it is the server's.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

MAX_KEYS = 100
"""API keys that metrics tell apart."""

_Read = Callable[[Mapping[str, Any]], float]

_PREFIX = "baton:"
_LABELS = ("model_name", "instance")
_TTFT = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
)
_ITL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_LATENCY = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_QUEUE = (0.001, 0.005, 0.01, 0.05, *_LATENCY[1:])
_CHOICES = (1, 2, 5, 10, 20, 50, 100)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

_ENGINE_GAUGES: dict[str, tuple[str, _Read]] = {
    "num_requests_running": (
        "Requests in a slot of the instance.",
        lambda s: s["running"] + s.get("following", 0),
    ),
    "num_requests_following": (
        "Of those running, the ones that wait for a part of their prompt which another request computes.",
        lambda s: s["following"],
    ),
    "num_requests_waiting": ("Requests that wait for admission.", lambda s: s["waiting"]),
    "kv_cache_usage_perc": (
        "Part of the KV blocks that is held, from 0 to 1.",
        lambda s: s["blocks"]["held"] / max(s["blocks"]["total"], 1),
    ),
}
_ENGINE_COUNTERS: dict[str, tuple[str, _Read]] = {
    "prefix_cache_queries": ("Prompt tokens looked up in the cache.", lambda s: s["prefix_query_tokens"]),
    "prefix_cache_hits": ("Prompt tokens found in the cache.", lambda s: s["prefix_hit_tokens"]),
    "prefix_cache_followed": (
        "Of the prompt tokens found, those that another request was computing when this one came.",
        lambda s: s["prefix_followed_tokens"],
    ),
    "num_preemptions": ("Preemptions.", lambda s: s["preemptions"]),
    "recomputed_tokens": ("Tokens computed again after preemptions.", lambda s: s["recomputed_tokens"]),
    "engine_steps": ("Steps that the workers ran.", lambda s: s["steps"]),
    "engine_step_seconds": ("Time that the steps took.", lambda s: s["step_seconds"]),
    "requests_displaced": (
        "Requests that waited and made place for another one.",
        lambda s: s["displaced"],
    ),
    "protocol_violations": ("Messages that could not be.", lambda s: s["violations"]),
}
"""name → (help, how it is read from the engine's answer to the query `stats`)."""


class InstanceSample(NamedTuple):
    """One instance at the time of a scrape."""

    stats: Mapping[str, Any] | None
    """What its engine answered to the query `stats`; None if it did not."""
    label: str
    ready: bool
    draining: bool
    in_flight: int
    """Sequences that this gateway has there."""
    restarts: int
    paused: bool = False
    """Told so by this gateway."""


class Metrics:
    """Counters and histograms of one server, all with the label `model_name`."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._engine = _EngineStats(model_name)
        self.registry.register(self._engine)
        self._model_name = model_name
        self._prompt_tokens = self._tally("prompt_tokens", "Prompt tokens of requests that were served.")
        self._generation_tokens = self._tally("generation_tokens", "Generated tokens.")
        self._success = _Tallies(
            model_name,
            "request_success",
            "Sequences by how they ended: stop, length, abort or error.",
            ("finished_reason",),
        )
        self.registry.register(self._success)
        self._ttft = self._histogram("time_to_first_token_seconds", "From arrival to first token.", _TTFT)
        self._itl = self._histogram("inter_token_latency_seconds", "Between two chunks of tokens.", _ITL)
        self._e2e = self._histogram("e2e_request_latency_seconds", "From arrival to the end.", _LATENCY)
        self._queue = self._histogram("request_queue_time_seconds", "From arrival to admission.", _QUEUE)
        self._inference = self._histogram(
            "request_inference_time_seconds", "From admission to the last token.", _LATENCY
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "From admission to the first token.", _LATENCY
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "From the first token to the last.", _LATENCY
        )
        self._params_n = self._histogram("request_params_n", "Choices that a request asks for.", _CHOICES)
        self._params_max_tokens = self._histogram(
            "request_params_max_tokens", "Tokens that a sequence may have, given or by default.", _TOKENS
        )
        self._request_prompt = self._histogram("request_prompt_tokens", "Prompt tokens a sequence.", _TOKENS)
        self._request_generation = self._histogram(
            "request_generation_tokens", "Generated tokens a sequence.", _TOKENS
        )
        self._keys: set[str] = set()
        self._key_tokens = _Tallies(
            model_name,
            "key_tokens",
            "Tokens of sequences that ended, by id of the API key; *: all further keys.",
            ("key", "kind"),
        )
        self.registry.register(self._key_tokens)
        self._http = Counter(
            _PREFIX + "http_requests",
            "HTTP requests by route and status.",
            ("method", "route", "status"),
            registry=self.registry,
        )

    def first_tokens(self, count: int, prompt: int, seconds: float) -> None:
        """The first tokens of a sequence came, so long after the request."""
        self._ttft.observe(seconds)
        self._prompt_tokens.value += prompt
        self._generation_tokens.value += count

    def more_tokens(self, count: int, seconds: float) -> None:
        """Further ones came, so long after those before them."""
        self._itl.observe(seconds)
        self._generation_tokens.value += count

    def all_tokens(self, count: int, seconds: float) -> None:
        """Further ones came within so long, not watched one by one: what lay between them on average."""
        self._itl.observe(seconds / count)
        self._generation_tokens.value += count

    def finished(
        self,
        reason: str,
        *,
        seconds: float,
        prompt: int,
        generated: int,
        max_tokens: int | None = None,
        queued_s: float | None = None,
        first_s: float | None = None,
        decode_s: float = 0.0,
        key: str = "",
        count: int = 1,
    ) -> None:
        """One sequence ended.  `queued_s`: from arrival to admission, `first_s`: from arrival to the first
        token, None where that is not known; `decode_s`: from there to the last one.  `key`: the id of the
        API key it came with, if it was submitted at all.  `count`: so many sequences that never ran, with
        prompts of this length, ended like that."""
        if key not in self._keys and len(self._keys) >= MAX_KEYS:
            key = "*"
        self._keys.add(key)
        self._key_tokens.add((key, "prompt"), prompt * count)
        self._key_tokens.add((key, "generation"), generated)
        self._success.add((reason,), count)
        self._e2e.observe(seconds, count)
        self._request_prompt.observe(prompt, count)
        self._request_generation.observe(generated, count)
        if max_tokens is not None:
            self._params_max_tokens.observe(max_tokens)
        if first_s is not None:
            self._decode.observe(decode_s)
        if queued_s is not None:
            self._queue.observe(queued_s)
            if first_s is not None:
                prefill_s = max(first_s - queued_s, 0.0)
                self._prefill.observe(prefill_s)
                self._inference.observe(prefill_s + decode_s)

    def choices(self, n: int) -> None:
        """One request ended, that asked for so many choices."""
        self._params_n.observe(n)

    def http_request(self, method: str, route: str, status: int) -> None:
        self._http.labels(method, route, status).inc()

    def render(
        self, instances: Mapping[str, InstanceSample], *, handed_over: int, continued: int, held: int = 0
    ) -> bytes:
        """The exposition.  `handed_over`: requests that another instance decodes than prefilled them;
        `continued`: times that a request went on after the loss of its instance; `held`: requests that wait
        for the end of a pause that is about to begin."""
        self._engine.held = held
        self._engine.instances = instances
        self._engine.totals = {"requests_handed_over": handed_over, "requests_continued": continued}
        return bytes(generate_latest(self.registry))

    def _tally(self, name: str, text: str) -> _Tally:
        tally = _Tally(self._model_name, name, text)
        self.registry.register(tally)
        return tally

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> _Buckets:
        histogram = _Buckets(self._model_name, name, text, bounds)
        self.registry.register(histogram)
        return histogram


class _Tally:
    """A counter for what happens with every token: nothing but an addition.  For one thread."""

    def __init__(self, model_name: str, name: str, text: str) -> None:
        self._model_name, self._name, self._text = model_name, name, text
        self.value = 0

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(_PREFIX + self._name, self._text, labels=["model_name"])
        family.add_metric([self._model_name], self.value)
        yield family


class _Tallies:
    """Counters by labels, for what happens with every sequence.  For one thread."""

    def __init__(self, model_name: str, name: str, text: str, labels: tuple[str, ...]) -> None:
        self._model_name, self._name, self._text, self._labels = model_name, name, text, labels
        self._values: dict[tuple[str, ...], int] = {}

    def add(self, labels: tuple[str, ...], count: int) -> None:
        self._values[labels] = self._values.get(labels, 0) + count

    def collect(self) -> Iterator[Metric]:
        labels = ["model_name", *self._labels]
        family = CounterMetricFamily(_PREFIX + self._name, self._text, labels=labels)
        for values, count in self._values.items():
            family.add_metric([self._model_name, *values], count)
        yield family


class _Buckets:
    """A histogram for what happens with every token or sequence: a search and two additions.  For one
    thread."""

    def __init__(self, model_name: str, name: str, text: str, bounds: tuple[float, ...]) -> None:
        self._model_name, self._name, self._text = model_name, name, text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """So many times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(_PREFIX + self._name, self._text, labels=["model_name"])
        bounds = [floatToGoString(bound) for bound in (*self._bounds, math.inf)]
        counts = zip(bounds, accumulate(self._counts), strict=True)
        family.add_metric([self._model_name], list(counts), self._sum)
        yield family


_INSTANCE_GAUGES: dict[str, tuple[str, Callable[[InstanceSample], float]]] = {
    "instance_up": ("1 while the instance runs, else 0.", lambda i: float(i.ready)),
    "instance_draining": ("1 while nothing new is sent to the instance.", lambda i: float(i.draining)),
    "instance_paused": ("1 while the instance stands still by /pause.", lambda i: float(i.paused)),
    "instance_requests": ("Sequences of this server that are at the instance.", lambda i: i.in_flight),
}
_SIZES = (
    (
        "step_tokens",
        "iteration_tokens_total",
        "Tokens a step: of prompts that it computed, and generated ones.",
    ),
    ("step_prompt_tokens", "iteration_prompt_tokens", "Tokens of prompts, of each step that computed any."),
)
"""(key in the engine's statistics, name, text)."""
_TOTALS = {
    "requests_handed_over": "Requests that another instance decodes than prefilled them.",
    "requests_continued": "Times that a request went on elsewhere after the loss of its instance.",
}


class _EngineStats:
    """A collector: the instances at the last scrape as metrics.  Keys that are missing are left out."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self.instances: Mapping[str, InstanceSample] = {}
        self.totals: Mapping[str, int] = {}
        self.held = 0

    def collect(self) -> Iterator[Metric]:
        for name, (text, read) in _ENGINE_GAUGES.items():
            yield from self._gauge(name, text, self._values(read))
        for name, (text, read) in _ENGINE_COUNTERS.items():
            yield from self._counter(name, text, self._values(read))
        for key, name, text in _SIZES:
            yield from self._sizes(key, name, text)
        yield from self._step_cost()
        yield from self._cache_config()
        for name, (text, look) in _INSTANCE_GAUGES.items():
            yield from self._gauge(name, text, {key: look(one) for key, one in self.instances.items()})
        waiting = GaugeMetricFamily(
            _PREFIX + "num_requests_waiting_by_key",
            "Requests that wait for admission and have not run, by id of the API key; *: all further keys.",
            labels=[*_LABELS, "key"],
        )
        for instance, sample in self.instances.items():
            for key, count in ((sample.stats or {}).get("waiting_by_key") or {}).items():
                waiting.add_metric([self._model_name, instance, key], float(count))
        yield waiting
        labels = GaugeMetricFamily(
            _PREFIX + "instance_label",
            "1: what the gateway sends to the instance.",
            labels=[*_LABELS, "label"],
        )
        for instance, sample in self.instances.items():
            labels.add_metric([self._model_name, instance, sample.label], 1.0)
        yield labels
        restarts = {key: float(one.restarts) for key, one in self.instances.items()}
        yield from self._counter("instance_restarts", "Times that the instance was started again.", restarts)
        held = GaugeMetricFamily(
            _PREFIX + "requests_held",
            "Requests that are not submitted before a pause (mode wait) is over.",
            labels=["model_name"],
        )
        held.add_metric([self._model_name], float(self.held))
        yield held
        for name, value in self.totals.items():
            total = CounterMetricFamily(_PREFIX + name, _TOTALS[name], labels=["model_name"])
            total.add_metric([self._model_name], float(value))
            yield total

    def _step_cost(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            _PREFIX + "step_cost_seconds",
            "What the instance has learnt of the time of a step, by part: `Pace`.",
            labels=[*_LABELS, "part"],
        )
        for instance, sample in self.instances.items():
            for part, seconds in ((sample.stats or {}).get("step_cost") or {}).items():
                family.add_metric([self._model_name, instance, part], float(seconds))
        if family.samples:
            yield family

    def _sizes(self, key: str, name: str, text: str) -> Iterator[Metric]:
        """A histogram of token counts that engines keep."""
        family = HistogramMetricFamily(_PREFIX + name, text, labels=_LABELS)
        for instance, sample in self.instances.items():
            sizes = (sample.stats or {}).get(key)
            if not isinstance(sizes, Mapping):
                continue
            bounds = [floatToGoString(bound) for bound in (*sizes["bounds"], math.inf)]
            counts = zip(bounds, accumulate(sizes["counts"]), strict=True)
            family.add_metric([self._model_name, instance], list(counts), sizes["sum"])
        if family.samples:
            yield family

    def _cache_config(self) -> Iterator[Metric]:
        """1, with what it is made of in the labels, as vLLM does."""
        names = ("block_size", "num_gpu_blocks", "enable_prefix_caching")
        family = GaugeMetricFamily(
            _PREFIX + "cache_config_info",
            "1: how the instance's KV cache is made.",
            labels=[*_LABELS, *names],
        )
        for instance, sample in self.instances.items():
            stats = sample.stats or {}
            blocks = stats.get("blocks")
            if isinstance(blocks, Mapping):
                values = (stats.get("block_size"), blocks.get("total"), stats.get("enable_prefix_caching"))
                family.add_metric([self._model_name, instance, *map(str, values)], 1.0)
        if family.samples:
            yield family

    def _values(self, read: _Read) -> dict[str, float]:
        """By instance; without those that do not say it (they load, or did not answer)."""
        values = {}
        for name, sample in self.instances.items():
            try:
                values[name] = float(read(sample.stats or {}))
            except (KeyError, TypeError):
                continue
        return values

    def _gauge(self, name: str, text: str, values: Mapping[str, float]) -> Iterator[Metric]:
        gauge = GaugeMetricFamily(_PREFIX + name, text, labels=_LABELS)
        for instance, value in values.items():
            gauge.add_metric([self._model_name, instance], value)
        if values:
            yield gauge

    def _counter(self, name: str, text: str, values: Mapping[str, float]) -> Iterator[Metric]:
        counter = CounterMetricFamily(_PREFIX + name, text, labels=_LABELS)
        for instance, value in values.items():
            counter.add_metric([self._model_name, instance], value)
        if values:
            yield counter
