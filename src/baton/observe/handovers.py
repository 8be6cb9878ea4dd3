"""Hand-overs between instances, and requests that went on after a loss, as metrics.

Read from the engines' statistics (`HandoverCounters`) and the gateway's books when the server is scraped.
Each label has few values: outcomes and reasons are words of the protocol, transports those that there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import inf
from typing import Any, Final, NamedTuple, get_args

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from baton.observe.series import PREFIX
from baton.protocol.messages.handover import RefusalCode

MAX_REASONS: Final = 30
"""That a metric tells apart, of one instance."""
_LABELS = ("model_name", "instance")
_Stats = Mapping[str, Any]


class Losses(NamedTuple):
    """Requests of this gateway whose instance was lost; `gateway/cluster/continued.py`."""

    continued: int = 0
    failed: int = 0
    tokens: int = 0
    bounds: Sequence[float] = ()
    gaps: Sequence[int] = ()
    gap_seconds: float = 0.0


_KNOWN: dict[str, tuple[str, ...]] = {
    "handovers_stayed": ("no_credit", "refused", "returned"),
    "handover_refusals": (*get_args(RefusalCode), "no_answer", "passed_over"),
    "handover_recomputed": ("fetch failed", "fetch stalled", "lease over", "peer lost"),
    "handover_bytes": ("shared_memory", "tcp"),
}
"""Values that begin at 0: the first of a series that begins later is none for `rate` and `increase`."""
_COUNTERS: dict[str, tuple[str, str, Callable[[_Stats], Mapping[str, float]]]] = {
    "handovers": (
        "Requests that this instance was to hand over, by what became of it: taken (by the other one), "
        "stayed (it decodes here), returned (given back), lost (nobody knows).",
        "outcome",
        lambda s: {
            "taken": s["taken"],
            "stayed": _total(s["stayed"]) - s["stayed"].get("returned", 0),
            "returned": s["returned"],
            "lost": s["lost"],
        },
    ),
    "handovers_stayed": ("Requests that decode here after all, by why.", "reason", lambda s: s["stayed"]),
    "handover_refusals": (
        "Instances asked that take none now, by why.",
        "reason",
        lambda s: s["refused"],
    ),
    "handover_arrivals": (
        "Requests that other instances began to hand over to this one, by what became of it: seated (runs "
        "with the pages that came), recomputed (here), given_up (before it was ours).",
        "outcome",
        lambda s: {
            "seated": s["seated"],
            "recomputed": _total(s["recomputed"]),
            "given_up": _total(s["given_up"]),
        },
    ),
    "handover_recomputed": (
        "Requests that were handed over to this instance and computed again, by why.",
        "reason",
        lambda s: s["recomputed"],
    ),
    "handover_bytes": ("Bytes of KV that this instance fetched.", "transport", lambda s: s["fetched_by"]),
}
"""name → (help, label, how it is read)."""

_TOTALS: dict[str, tuple[str, str]] = {
    "fetches": ("handover_fetches", "Fetches of pages, of this instance."),
    "fetch_errors": ("handover_fetch_errors", "Of those, the ones that failed."),
    "fetch_seconds": ("handover_fetch_seconds", "Time that fetches took: a sum over ranks and fetches."),
    "pages_shared": ("handover_pages_shared", "Pages that came for another request at the same time."),
}
_TIMES = {
    "takes": ("handover_seconds", "From handing a request over to the word that it was taken."),
    "tails": ("handover_tail_seconds", "From when a request was handed over to the last of its pages."),
}


def handovers(model_name: str, instances: Mapping[str, _Stats]) -> Iterator[Metric]:
    """`instances`: their engines' answers to the query `stats`, without those that did not answer."""
    found = {name: stats["handovers"] for name, stats in instances.items() if "handovers" in stats}
    if not found:
        return
    for name, (text, label, read) in _COUNTERS.items():
        family = CounterMetricFamily(PREFIX + name, text, labels=[*_LABELS, label])
        for instance, stats in found.items():
            known = dict.fromkeys(_KNOWN.get(name, ()), 0.0)
            for value, count in _bounded(known | _read(read, stats)).items():
                family.add_metric([model_name, instance, value], float(count))
        yield family
    for key, (name, text) in _TOTALS.items():
        family = CounterMetricFamily(PREFIX + name, text, labels=_LABELS)
        for instance, stats in found.items():
            family.add_metric([model_name, instance], float(stats.get(key, 0)))
        yield family
    for key, (name, text) in _TIMES.items():
        histogram = HistogramMetricFamily(PREFIX + name, text, labels=_LABELS)
        for instance, stats in found.items():
            if isinstance(times := stats.get(key), Mapping):
                buckets = _buckets(times["bounds"], times["counts"])
                histogram.add_metric([model_name, instance], buckets, times["sum"])
        yield histogram


def losses(model_name: str, found: Losses) -> Iterator[Metric]:
    """What this gateway did about lost instances."""
    outcomes = {"continued": found.continued, "failed": found.failed}
    family = CounterMetricFamily(
        PREFIX + "requests_lost",
        "Times that a request lost its instance: continued elsewhere, or failed in the end.",
        labels=["model_name", "outcome"],
    )
    for outcome, count in outcomes.items():
        family.add_metric([model_name, outcome], float(count))
    yield family
    tokens = CounterMetricFamily(
        PREFIX + "continued_tokens",
        "Generated tokens that requests had when they lost their instance, and kept.",
        labels=["model_name"],
    )
    tokens.add_metric([model_name], float(found.tokens))
    yield tokens
    if found.bounds:
        gaps = HistogramMetricFamily(
            PREFIX + "continuation_seconds",
            "From the loss of a request's instance to its next token.",
            labels=["model_name"],
        )
        gaps.add_metric([model_name], _buckets(found.bounds, found.gaps), found.gap_seconds)
        yield gaps


def _total(counts: Mapping[str, float]) -> float:
    return sum(counts.values())


def _read(read: Callable[[_Stats], Mapping[str, float]], stats: _Stats) -> dict[str, float]:
    """Nothing of an engine that says it in another way."""
    try:
        return dict(read(stats))
    except (KeyError, TypeError, AttributeError):
        return {}


def _bounded(counts: Mapping[str, float]) -> dict[str, float]:
    """The reasons that came first; `*`: all further ones."""
    kept = dict(list(counts.items())[:MAX_REASONS])
    if len(counts) > MAX_REASONS:
        kept["*"] = _total(counts) - _total(kept)
    return kept


def _buckets(bounds: Sequence[float], counts: Sequence[int]) -> list[Any]:
    names = [floatToGoString(bound) for bound in (*bounds, inf)]
    return list(zip(names, accumulate(counts), strict=True))
