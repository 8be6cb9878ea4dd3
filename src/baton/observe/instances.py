"""What only engines know, as metrics: read from their statistics when the server is scraped.

What concerns one instance has the label `instance`; a sum over it is the server's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from baton.observe.handovers import Losses, handovers, losses
from baton.observe.memory import Memory
from baton.observe.series import PREFIX

_Read = Callable[[Mapping[str, Any]], float]
_LABELS = ("model_name", "instance")

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
    "spec_decode_num_drafts": ("Times that a step computed drafts of a request.", lambda s: s["drafts"]),
    "spec_decode_num_draft_tokens": ("Tokens that were drafted.", lambda s: s["draft_tokens"]),
    "spec_decode_num_accepted_tokens": ("Drafted tokens that were right.", lambda s: s["accepted_tokens"]),
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


_INSTANCE_GAUGES: dict[str, tuple[str, Callable[[InstanceSample], float]]] = {
    "instance_up": ("1 while the instance runs, else 0.", lambda i: float(i.ready)),
    "instance_draining": ("1 while nothing new is sent to the instance.", lambda i: float(i.draining)),
    "instance_paused": ("1 while the instance stands still by /pause.", lambda i: float(i.paused)),
    "instance_requests": ("Sequences of this server that are at the instance.", lambda i: i.in_flight),
}
_REJECTIONS = ("queue_full", "never_fits", "bad_request", "internal", "shutting_down")


def _rejected(stats: Mapping[str, Any]) -> Mapping[str, float]:
    """Beginning at 0: see `handovers.py`."""
    return dict.fromkeys(_REJECTIONS, 0.0) | dict(stats["rejected"])


_BY: dict[str, tuple[str, str, bool, Callable[[Mapping[str, Any]], Mapping[str, float]]]] = {
    "num_requests_waiting_by_reason": (
        "Requests that wait: for room here (capacity), or for room at an instance to decode them (deferred).",
        "reason",
        False,
        lambda s: {
            "capacity": s["waiting"] - s["departures"]["queued"],
            "deferred": s["departures"]["queued"],
        },
    ),
    "kv_blocks": (
        "Blocks of the KV pool: held by requests, exported (read by another instance), reserved (for "
        "requests that come from one), cached (free, with a prefix in them) and free.",
        "state",
        False,
        lambda s: {state: s["blocks"][state] for state in ("held", "exported", "reserved", "cached", "free")},
    ),
    "cluster_refusals": (
        "Who is no member of the cluster, or asked for pages without a grant: handshakes that were refused, "
        "connections that were ended half open, messages of strangers, connections and questions of pages.",
        "at",
        True,
        lambda s: s["refusals"],
    ),
    "spec_decode_num_accepted_tokens_per_pos": (
        "Drafted tokens that were right, by their place behind the request's newest token.",
        "position",
        True,
        lambda s: s["accepted_by_place"],
    ),
    "admission_rejections": (
        "Requests that the instance refused.",
        "reason",
        True,
        _rejected,
    ),
}
"""name → (help, label, whether it only grows, how it is read); the words are the engine's own, a few."""
_SIZES = (
    (
        "preemptions_of",
        "request_num_preemptions",
        "Preemptions of a request that ended at the instance.",
    ),
    (
        "step_tokens",
        "iteration_tokens_total",
        "Tokens a step: of prompts that it computed, and generated ones.",
    ),
    ("step_prompt_tokens", "iteration_prompt_tokens", "Tokens of prompts, of each step that computed any."),
)
"""(key in the engine's statistics, name, text)."""
_MEMORY = {"image": "weights", "kv_pool": "kv_pool", "private": "private"}
"""Attribute of `Memory` → part."""
_TOTALS = {
    "requests_handed_over": "Requests that another instance decodes than prefilled them.",
    "requests_continued": "Times that a request went on elsewhere after the loss of its instance.",
}


class EngineStats:
    """A collector: the instances at the last scrape as metrics.  Keys that are missing are left out."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self.instances: Mapping[str, InstanceSample] = {}
        self.totals: Mapping[str, int] = {}
        self.held = 0
        self.losses = Losses()
        self.memory: Mapping[str, Memory] = {}
        """By process, as `Fleet.processes` calls it; none where the system does not say."""

    def collect(self) -> Iterator[Metric]:
        for name, (text, read) in _ENGINE_GAUGES.items():
            yield from self._gauge(name, text, self._values(read))
        for name, (text, read) in _ENGINE_COUNTERS.items():
            yield from self._counter(name, text, self._values(read))
        for key, name, text in _SIZES:
            yield from self._sizes(key, name, text)
        for name, (text, label, grows, counts) in _BY.items():
            yield from self._by(name, text, label, counts, grows=grows)
        said = {name: one.stats for name, one in self.instances.items() if one.stats is not None}
        yield from handovers(self._model_name, said)
        yield from losses(self._model_name, self.losses)
        yield from self._process_memory()
        yield from self._step_cost()
        yield from self._expert_tokens()
        yield from self._cache_config()
        for name, (text, look) in _INSTANCE_GAUGES.items():
            yield from self._gauge(name, text, {key: look(one) for key, one in self.instances.items()})
        waiting = GaugeMetricFamily(
            PREFIX + "num_requests_waiting_by_key",
            "Requests that wait for admission and have not run, by id of the API key; *: all further keys.",
            labels=[*_LABELS, "key"],
        )
        for instance, sample in self.instances.items():
            for key, count in ((sample.stats or {}).get("waiting_by_key") or {}).items():
                waiting.add_metric([self._model_name, instance, key], float(count))
        yield waiting
        labels = GaugeMetricFamily(
            PREFIX + "instance_label",
            "1: what the gateway sends to the instance.",
            labels=[*_LABELS, "label"],
        )
        for instance, sample in self.instances.items():
            labels.add_metric([self._model_name, instance, sample.label], 1.0)
        yield labels
        restarts = {key: float(one.restarts) for key, one in self.instances.items()}
        yield from self._counter("instance_restarts", "Times that the instance was started again.", restarts)
        held = GaugeMetricFamily(
            PREFIX + "requests_held",
            "Requests that are not submitted before a pause (mode wait) is over.",
            labels=["model_name"],
        )
        held.add_metric([self._model_name], float(self.held))
        yield held
        for name, value in self.totals.items():
            total = CounterMetricFamily(PREFIX + name, _TOTALS[name], labels=["model_name"])
            total.add_metric([self._model_name], float(value))
            yield total

    def _by(
        self,
        name: str,
        text: str,
        label: str,
        read: Callable[[Mapping[str, Any]], Mapping[str, float]],
        *,
        grows: bool,
    ) -> Iterator[Metric]:
        kind = CounterMetricFamily if grows else GaugeMetricFamily
        family = kind(PREFIX + name, text, labels=[*_LABELS, label])
        for instance, sample in self.instances.items():
            try:
                counts = read(sample.stats or {})
            except (KeyError, TypeError):
                continue
            for value, count in counts.items():
                family.add_metric([self._model_name, instance, value], float(count))
        yield family

    def _process_memory(self) -> Iterator[Metric]:
        """Summed by instance and part: a restarted process must not be another series."""
        sums: dict[tuple[str, str], int] = {}
        for process, memory in self.memory.items():
            owner, _, what = process.rpartition(" ")
            if what.isdigit():  # "NAME rank 0", "helper 0"
                owner = owner.removesuffix(" rank").removesuffix("helper")
            elif what != "engine":
                owner = ""
            for attribute, part in _MEMORY.items():
                key = (owner or "gateway", part)
                sums[key] = sums.get(key, 0) + int(getattr(memory, attribute))
        family = GaugeMetricFamily(
            PREFIX + "process_memory_bytes",
            "Proportional set size of the processes of this host, by whose they are (an instance, or the "
            "gateway with its helpers): shared weights, the part of the KV pool that was used, all else.",
            labels=["model_name", "owner", "part"],
        )
        for (owner, part), size in sums.items():
            family.add_metric([self._model_name, owner, part], float(size))
        if family.samples:
            yield family

    def _step_cost(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            PREFIX + "step_cost_seconds",
            "What the instance has learnt of the time of a step, by part: `Pace`.",
            labels=[*_LABELS, "part"],
        )
        for instance, sample in self.instances.items():
            for part, seconds in ((sample.stats or {}).get("step_cost") or {}).items():
                family.add_metric([self._model_name, instance, part], float(seconds))
        if family.samples:
            yield family

    def _expert_tokens(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            PREFIX + "expert_tokens",
            "Tokens of a mixture, once for each expert that they went to, by that expert's load: at most so "
            "many times what an expert of its layer took on average.",
            labels=[*_LABELS, "load"],
        )
        for instance, sample in self.instances.items():
            for load, count in ((sample.stats or {}).get("expert_tokens") or {}).items():
                family.add_metric([self._model_name, instance, load], float(count))
        if family.samples:
            yield family

    def _sizes(self, key: str, name: str, text: str) -> Iterator[Metric]:
        """A histogram of token counts that engines keep."""
        family = HistogramMetricFamily(PREFIX + name, text, labels=_LABELS)
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
            PREFIX + "cache_config_info",
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
        gauge = GaugeMetricFamily(PREFIX + name, text, labels=_LABELS)
        for instance, value in values.items():
            gauge.add_metric([self._model_name, instance], value)
        if values:
            yield gauge

    def _counter(self, name: str, text: str, values: Mapping[str, float]) -> Iterator[Metric]:
        counter = CounterMetricFamily(PREFIX + name, text, labels=_LABELS)
        for instance, value in values.items():
            counter.add_metric([self._model_name, instance], value)
        if values:
            yield counter
