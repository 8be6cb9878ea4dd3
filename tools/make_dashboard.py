"""Writes deploy/grafana/baton.json: vLLM's panels by our names; instances, hand-overs, losses, the server.

    python tools/make_dashboard.py            # writes it
    python tools/make_dashboard.py --check    # exits 1 if it is not what would be written

Plain dictionaries of Grafana's dashboard schema (version 39, Grafana 10 and later).  What concerns an
instance is told by every gateway that is connected with it, so such series are `max by (instance)` before
they are added up.  The scrape keeps Baton's label `instance` (`honor_labels: true`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PATH = Path(__file__).parents[1] / "deploy" / "grafana" / "baton.json"
Panel = dict[str, Any]

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_SERVER = 'model_name=~"$model_name"'
_INSTANCE = f'{_SERVER}, instance=~"$instance"'
_RANGE = "[$__rate_interval]"


def rate(name: str, by: str = "", labels: str = _SERVER) -> str:
    """Of a counter of the gateway, per second."""
    return f"sum{_by(by)}(rate(baton:{name}{{{labels}}}{_RANGE}))"


def instances(name: str, by: str = "instance") -> str:
    """Of a counter of engines, per second, by instance or another label."""
    one = ", ".join(dict.fromkeys(["instance", *by.split(", ")]))
    inner = f"max by ({one}) (rate(baton:{name}{{{_INSTANCE}}}{_RANGE}))"
    return f"sum by ({by}) ({inner})"


def gauge(name: str, by: str = "instance") -> str:
    one = ", ".join(dict.fromkeys(["instance", *by.split(", ")]))
    return f"sum by ({by}) (max by ({one}) (baton:{name}{{{_INSTANCE}}}))"


def quantile(q: float, name: str, *, engines: bool = False) -> str:
    buckets = instances(f"{name}_bucket", "le") if engines else rate(f"{name}_bucket", "le")
    return f"histogram_quantile({q}, {buckets})"


def mean(name: str) -> str:
    return f"{rate(f'{name}_sum')} / {rate(f'{name}_count')}"


def latencies(name: str, *, engines: bool = False) -> list[tuple[str, str]]:
    found = [(f"P{100 * q:g}", quantile(q, name, engines=engines)) for q in (0.99, 0.95, 0.9, 0.5)]
    return found if engines else [*found, ("mean", mean(name))]


def _by(labels: str) -> str:
    return f" by ({labels}) " if labels else ""


# -- panels: (title, description, unit, [(legend, query)], options)


def lines(
    title: str,
    text: str,
    unit: str,
    queries: Sequence[tuple[str, str]],
    *,
    stacked: bool = False,
    most: float | None = None,
) -> Panel:
    custom: dict[str, Any] = {"drawStyle": "line", "lineWidth": 1, "fillOpacity": 10 if stacked else 0}
    custom |= {"showPoints": "never", "spanNulls": False}
    if stacked:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    defaults: dict[str, Any] = {
        "unit": unit,
        "min": 0,
        "custom": custom,
        "color": {"mode": "palette-classic"},
    }
    if most is not None:
        defaults["max"] = most
    options = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return _panel("timeseries", title, text, defaults, options, queries, width=12, height=8)


def number(title: str, text: str, unit: str, query: str, *, steps: Sequence[tuple[str, float]] = ()) -> Panel:
    thresholds = [{"color": "green" if steps else "blue", "value": None}]
    thresholds += [{"color": color, "value": value} for color, value in steps]
    defaults = {
        "unit": unit,
        "color": {"mode": "thresholds"},
        "thresholds": {"mode": "absolute", "steps": thresholds},
        "noValue": "–",
    }
    options = {
        "colorMode": "value" if steps else "none",
        "graphMode": "area",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "textMode": "value",
    }
    return _panel("stat", title, text, defaults, options, [("", query)], width=3, height=4)


def heatmap(title: str, text: str, name: str) -> Panel:
    query = f"sum by (le) (increase(baton:{name}_bucket{{{_SERVER}}}{_RANGE}))"
    options = {
        "calculate": False,
        "color": {"mode": "scheme", "scheme": "Spectral", "exponent": 0.5, "steps": 64},
        "yAxis": {"unit": "none"},
        "cellGap": 1,
        "legend": {"show": True},
        "tooltip": {"mode": "single"},
    }
    panel = _panel("heatmap", title, text, {}, options, [("{{le}}", query)], width=12, height=8)
    panel["targets"][0]["format"] = "heatmap"
    return panel


def _panel(
    kind: str,
    title: str,
    text: str,
    defaults: dict[str, Any],
    options: dict[str, Any],
    queries: Sequence[tuple[str, str]],
    *,
    width: int,
    height: int,
) -> Panel:
    targets = [
        {
            "datasource": _SOURCE,
            "expr": query,
            "legendFormat": legend or "__auto",
            "refId": chr(ord("A") + at),
        }
        for at, (legend, query) in enumerate(queries)
    ]
    return {
        "type": kind,
        "title": title,
        "description": text,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": targets,
        "gridPos": {"w": width, "h": height},
    }


_ERRORS = rate("request_success_total", labels=f'{_SERVER}, finished_reason="error"')
_HITS = "sum(" + instances("prefix_cache_hits_total") + ")"
_QUERIES = "sum(" + instances("prefix_cache_queries_total") + ")"

ROWS: list[tuple[str, list[Panel]]] = [
    (
        "Now",
        [
            number("Requests", "Sequences that ended, a second.", "reqps", rate("request_success_total")),
            number("Prompt tokens", "Those from the cache too.", "short", rate("prompt_tokens_total")),
            number("Generated tokens", "A second.", "short", rate("generation_tokens_total")),
            number(
                "Errors",
                "Share of sequences that ended with an error.",
                "percentunit",
                f"({_ERRORS} or vector(0)) / ({rate('request_success_total')} > 0)",
                steps=(("orange", 0.001), ("red", 0.01)),
            ),
            number("TTFT p95", "Time to first token.", "s", quantile(0.95, "time_to_first_token_seconds")),
            number("ITL p95", "Between two chunks.", "s", quantile(0.95, "inter_token_latency_seconds")),
            number(
                "Instances up",
                "Of those that the gateways know.",
                "none",
                f"sum(max by (instance) (baton:instance_up{{{_INSTANCE}}}))",
            ),
            number(
                "KV, fullest",
                "Of the instances.",
                "percentunit",
                f"max(baton:kv_cache_usage_perc{{{_INSTANCE}}})",
                steps=(("orange", 0.85), ("red", 0.95)),
            ),
        ],
    ),
    (
        "Requests",
        [
            lines("E2E request latency", "Arrival to end.", "s", latencies("e2e_request_latency_seconds")),
            lines(
                "Token throughput",
                "A second.",
                "short",
                [("prompt", rate("prompt_tokens_total")), ("generated", rate("generation_tokens_total"))],
            ),
            lines(
                "Inter-token latency", "Between two chunks.", "s", latencies("inter_token_latency_seconds")
            ),
            lines(
                "Scheduler state",
                "Requests that run and wait, of all instances.",
                "none",
                [
                    ("running", f"sum({gauge('num_requests_running')})"),
                    ("waiting", f"sum({gauge('num_requests_waiting')})"),
                ],
            ),
            lines("Time to first token", "From arrival.", "s", latencies("time_to_first_token_seconds")),
            lines(
                "KV cache utilization",
                "Part of the blocks that requests hold.",
                "percentunit",
                [("{{instance}}", gauge("kv_cache_usage_perc"))],
                most=1,
            ),
            lines(
                "Time per output token",
                "Of a request.",
                "s",
                latencies("request_time_per_output_token_seconds"),
            ),
            lines("Queue time", "Arrival to admission.", "s", latencies("request_queue_time_seconds")),
            lines(
                "Prefill and decode time",
                "Averages: admission to the first token, and from there to the last.",
                "s",
                [
                    ("queue", mean("request_queue_time_seconds")),
                    ("prefill", mean("request_prefill_time_seconds")),
                    ("decode", mean("request_decode_time_seconds")),
                    ("inference", mean("request_inference_time_seconds")),
                ],
            ),
            lines(
                "Finish reason",
                "Sequences that ended, a second.",
                "reqps",
                [("{{finished_reason}}", rate("request_success_total", "finished_reason"))],
                stacked=True,
            ),
            heatmap("Request prompt length", "Tokens.", "request_prompt_tokens"),
            heatmap("Request generation length", "Tokens.", "request_generation_tokens"),
            heatmap("Max generation tokens", "Of the longest choice.", "request_max_num_generation_tokens"),
            heatmap("Requested max_tokens", "Given or by default.", "request_params_max_tokens"),
            lines(
                "Prefix cache",
                "Part of the prompt tokens that were found.",
                "percentunit",
                [("found", f"{_HITS} / ({_QUERIES} > 0)")],
                most=1,
            ),
            lines(
                "Prompt tokens by source",
                "A second.",
                "short",
                [("{{source}}", rate("prompt_tokens_by_source_total", "source"))],
                stacked=True,
            ),
        ],
    ),
    (
        "Instances",
        [
            lines("Running", "Requests.", "none", [("{{instance}}", gauge("num_requests_running"))]),
            lines(
                "Waiting by reason",
                "capacity: for room there; deferred: for room at a decoder.",
                "none",
                [("{{instance}} {{reason}}", gauge("num_requests_waiting_by_reason", "instance, reason"))],
            ),
            lines(
                "KV blocks by owner",
                "Of all instances.",
                "none",
                [("{{state}}", gauge("kv_blocks", "state"))],
                stacked=True,
            ),
            lines(
                "Step time",
                "Average of a step.",
                "s",
                [
                    (
                        "{{instance}}",
                        f"{instances('engine_step_seconds_total')} / ({instances('engine_steps_total')} > 0)",
                    )
                ],
            ),
            lines(
                "Tokens a step",
                "Computed and generated.",
                "none",
                latencies("iteration_tokens_total", engines=True),
            ),
            lines(
                "Preemptions",
                "A second.",
                "none",
                [("{{instance}}", instances("num_preemptions_total"))],
            ),
            lines(
                "Refused",
                "Requests that an instance refused, a second.",
                "reqps",
                [("{{instance}} {{reason}}", instances("admission_rejections_total", "instance, reason"))],
            ),
            lines(
                "State",
                "1: up, draining, paused.",
                "none",
                [
                    ("{{instance}} up", gauge("instance_up")),
                    ("{{instance}} draining", gauge("instance_draining")),
                    ("{{instance}} paused", gauge("instance_paused")),
                ],
            ),
            lines(
                "Labels",
                "What the gateways send to instances.",
                "none",
                [
                    (
                        "{{label}}",
                        f"sum by (label) (max by (instance, label) (baton:instance_label{{{_INSTANCE}}}))",
                    )
                ],
                stacked=True,
            ),
            lines(
                "Restarts", "Since the start.", "none", [("{{instance}}", gauge("instance_restarts_total"))]
            ),
            lines(
                "Experts by load",
                "Of a mixture: tokens by what their expert took over the average of its layer.",
                "short",
                [("up to {{load}}", instances("expert_tokens_total", "load"))],
                stacked=True,
            ),
        ],
    ),
    (
        "Hand-over",
        [
            lines(
                "Hand-overs by outcome",
                "At the instances that prefill, a second.",
                "reqps",
                [("{{outcome}}", instances("handovers_total", "outcome"))],
                stacked=True,
            ),
            lines(
                "Why requests stayed",
                "They decode where they were prefilled.",
                "reqps",
                [("{{reason}}", instances("handovers_stayed_total", "reason"))],
                stacked=True,
            ),
            lines(
                "Hand-over time",
                "Until the other instance has taken it.",
                "s",
                latencies("handover_seconds", engines=True),
            ),
            lines(
                "Last page",
                "After the request was handed over: what the transfer adds.",
                "s",
                latencies("handover_tail_seconds", engines=True),
            ),
            lines(
                "KV fetched",
                "By transport.",
                "Bps",
                [("{{transport}}", instances("handover_bytes_total", "transport"))],
                stacked=True,
            ),
            lines(
                "Arrivals by outcome",
                "At the instances that decode, a second.",
                "reqps",
                [("{{outcome}}", instances("handover_arrivals_total", "outcome"))],
                stacked=True,
            ),
            lines(
                "Decoders that took none",
                "By why.",
                "reqps",
                [("{{reason}}", instances("handover_refusals_total", "reason"))],
            ),
            lines(
                "Failed fetches",
                "A second, beside all.",
                "ops",
                [
                    ("failed {{instance}}", instances("handover_fetch_errors_total")),
                    ("all {{instance}}", instances("handover_fetches_total")),
                ],
            ),
        ],
    ),
    (
        "Lost instances",
        [
            lines(
                "Requests by what became of them",
                "In the last interval.",
                "none",
                [
                    (
                        "{{outcome}}",
                        f"sum by (outcome) (increase(baton:requests_lost_total{{{_SERVER}}}{_RANGE}))",
                    )
                ],
            ),
            lines(
                "From the loss to the next token",
                "As clients see it.",
                "s",
                latencies("continuation_seconds"),
            ),
        ],
    ),
    (
        "Server",
        [
            lines(
                "HTTP by status",
                "A second.",
                "reqps",
                [("{{status}}", f"sum by (status) (rate(baton:http_requests_total{{{_SERVER}}}{_RANGE}))")],
                stacked=True,
            ),
            lines("HTTP connections", "Open.", "none", [("open", "sum(baton:http_connections)")]),
            lines(
                "Memory",
                "Of the processes on the gateway's host, as PSS.",
                "bytes",
                [
                    (
                        "{{owner}} {{part}}",
                        f"sum by (owner, part) (baton:process_memory_bytes{{{_SERVER}}})",
                    )
                ],
                stacked=True,
            ),
            lines(
                "Tokens by API key",
                "A second.",
                "short",
                [("{{key}} {{kind}}", rate("key_tokens_total", "key, kind"))],
            ),
            lines(
                "Helpers",
                "Bodies that wait, and that were read a second.",
                "none",
                [
                    ("waiting", f"sum(baton:helper_jobs_waiting{{{_SERVER}}})"),
                    ("read", rate("helper_jobs_total")),
                ],
            ),
        ],
    ),
]


def dashboard() -> dict[str, Any]:
    panels: list[Panel] = []
    x = y = row_height = 0
    for title, row in ROWS:
        y += row_height
        panels.append(
            {
                "type": "row",
                "title": title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": y, "w": 24, "h": 1},
            }
        )
        x, y, row_height = 0, y + 1, 0
        for panel in row:
            size = panel["gridPos"]
            if x + size["w"] > 24:
                x, y, row_height = 0, y + row_height, 0
            panels.append(panel | {"gridPos": {"x": x, "y": y} | size})
            x, row_height = x + size["w"], max(row_height, size["h"])
    for number_, panel in enumerate(panels, 1):
        panel["id"] = number_
    return {
        "title": "Baton",
        "uid": "baton",
        "description": "Requests, instances, hand-overs and losses of Baton servers.",
        "tags": ["baton", "llm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "",
        "annotations": {"list": []},
        "links": [],
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Data source",
                    "type": "datasource",
                    "query": "prometheus",
                    "current": {},
                },
                _variable("model_name", "Model", "label_values(baton:generation_tokens_total, model_name)"),
                _variable("instance", "Instance", "label_values(baton:instance_up, instance)"),
            ]
        },
        "panels": panels,
    }


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": "A"},
        "definition": query,
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "sort": 1,
    }


def text() -> str:
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="compare only")
    if parser.parse_args().check:
        same = PATH.exists() and PATH.read_text(encoding="utf-8") == text()
        print(f"{PATH}: {'as made' if same else 'is out of date: python tools/make_dashboard.py'}")
        return 0 if same else 1
    PATH.parent.mkdir(parents=True, exist_ok=True)
    PATH.write_text(text(), encoding="utf-8")
    print(f"{PATH}: {sum(panel['type'] != 'row' for panel in dashboard()['panels'])} panels")
    return 0


if __name__ == "__main__":
    sys.exit(main())
