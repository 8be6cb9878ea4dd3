"""The helpers at the time of a scrape, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from baton.gateway.helpers.pool import Helpers

_COUNTERS = {
    "num_jobs": ("helper_jobs", "Bodies that a helper process has read."),
    "num_lost": ("helper_losses", "Helper processes that died at work."),
    "num_starved": (
        "helper_starved_jobs",
        "Bodies that a busy machine left no time for, given to the helper process that has a share of it.",
    ),
    "num_refused": ("helper_refusals", "Bodies that were refused because too many waited for a helper."),
}


class HelperStats:
    """A collector."""

    def __init__(self, helpers: Helpers, model_name: str) -> None:
        self._helpers = helpers
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        for attribute, (name, text) in _COUNTERS.items():
            counter = CounterMetricFamily("baton:" + name, text, labels=["model_name"])
            counter.add_metric([self._model_name], getattr(self._helpers, attribute))
            yield counter
        waiting = GaugeMetricFamily(
            "baton:helper_jobs_waiting", "Bodies that wait for a helper.", labels=["model_name"]
        )
        waiting.add_metric([self._model_name], self._helpers.num_waiting)
        yield waiting
