"""`baton bench serve --report FILE`: one page that needs nothing else, to keep and to send around.

It has figures, percentiles, and TTFT and ITL over the time of the run and as distributions; no script, and
nothing that a browser would have to load.  Light and dark follow the reader's system.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import numpy as np

from baton.bench.client import Outcome
from baton.bench.drawing.chart import MOST_POINTS, distribution, number, over_time
from baton.bench.drawing.latencies import Latencies, latencies_of
from baton.bench.machine import machine
from baton.bench.metrics import LATENCIES, Metrics
from baton.bench.results import Setting

_PERCENTILES: Final = (50.0, 90.0, 95.0, 99.0)
_MOST_ERRORS: Final = 20
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"


def check_report(path: Path) -> None:
    """Raises `ValueError` if the file cannot be written, before anything is measured."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a"):
            pass
    except OSError as error:
        raise ValueError(f"--report {path}: cannot write it: {error.strerror}") from None


def write_report(
    path: Path,
    setting: Setting,
    metrics: Metrics,
    outcomes: Sequence[Outcome],
    remarks: Sequence[str],
    now: datetime,
) -> None:
    """`metrics`: of `outcomes`.  Raises `OSError`."""
    path.write_text(page(setting, metrics, outcomes, remarks, now, machine()), encoding="utf-8")


def page(
    setting: Setting,
    metrics: Metrics,
    outcomes: Sequence[Outcome],
    remarks: Sequence[str],
    now: datetime,
    facts: dict[str, Any],
) -> str:
    """The whole page.  `facts`: of the machine."""
    title = escape(setting.title())
    about = f"{now:%Y-%m-%d %H:%M}, {facts['cores']} cores of {facts['cpu']}, Baton {facts['baton']}"
    style = files("baton.bench.drawing").joinpath("report.css").read_text(encoding="utf-8")
    drawn = latencies_of(outcomes)
    sections = [_figures(metrics)]
    if metrics.completed:
        sections += [_percentiles(outcomes), *_charts(drawn)]
    sections += [_errors(metrics), _about(setting, remarks, facts)]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="content-security-policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{title}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
        f'<p class="soft">{escape(about)}</p>\n' + "\n".join(filter(None, sections)) + "\n</body>\n</html>\n"
    )


def _figures(metrics: Metrics) -> str:
    figures = {
        "Requests": f"{metrics.completed + metrics.failed:,}",
        "Succeeded": f"{metrics.completed:,}",
        "Failed": f"{metrics.failed:,}",
        "Seconds": number(metrics.duration),
        "Requests/s": number(metrics.request_throughput),
        "Output tokens/s": number(metrics.output_throughput),
        "All tokens/s": number(metrics.total_token_throughput),
        "Prompt tokens": f"{metrics.total_input_tokens:,}",
        "Output tokens": f"{metrics.total_output_tokens:,}",
    }
    if metrics.request_goodput is not None:
        figures["Good requests/s"] = number(metrics.request_goodput)
    bad = ' class="bad"' if metrics.failed else ""
    pairs = (
        f"<div><dt>{name}</dt><dd{bad if name == 'Failed' else ''}>{value}</dd></div>"
        for name, value in figures.items()
    )
    return f"<section><dl>{''.join(pairs)}</dl></section>"


def _percentiles(outcomes: Sequence[Outcome]) -> str:
    head = "".join(
        f'<th scope="col">{name}</th>' for name in ("mean", *(f"p{q:g}" for q in _PERCENTILES), "max")
    )
    good = [outcome for outcome in outcomes if outcome.succeeded]
    rows = []
    for name, (title, values_of) in LATENCIES.items():
        values = np.asarray([value for outcome in good for value in values_of(outcome)]) * 1e3
        if not len(values):
            continue
        cells = [values.mean(), *(np.percentile(values, q) for q in _PERCENTILES), values.max()]
        numbers = "".join(f"<td>{number(float(value))}</td>" for value in cells)
        told = f'{name.upper()}<span class="long">, {title.lower()}</span>'
        rows.append(f'<tr><th scope="row">{told}</th>{numbers}</tr>')
    return (
        '<section><h2>Latencies, in milliseconds</h2><div class="wide"><table>'
        f'<thead><tr><th scope="col"></th>{head}</tr></thead><tbody>{"".join(rows)}</tbody>'
        "</table></div></section>"
    )


def _charts(drawn: Latencies) -> list[str]:
    found = []
    key = '<span class="key"><i></i>median<i class="p99"></i>p99, of each twentieth of the run</span>'
    for name, when, times, values, failed in (
        ("TTFT", "sent at (s)", drawn.sent, drawn.ttft, drawn.failed),
        ("ITL", "came at (s)", drawn.came, drawn.itl, ()),
    ):
        if not len(values):
            continue
        said = f"{MOST_POINTS:,} of {len(values):,} points are drawn, the longest among them."
        thin = f'<p class="soft">{said}</p>' if len(values) > MOST_POINTS else ""
        found.append(
            f'<div class="two"><section><h2>{name} over time {key}</h2>'
            f"{over_time(times, values, f'{name} (ms)', when, failed)}{thin}</section>"
            f"<section><h2>{name}, distribution</h2>{distribution(values, f'{name} (ms)')}</section></div>"
        )
    return found


def _errors(metrics: Metrics) -> str:
    if not metrics.errors:
        return ""
    most = sorted(metrics.errors.items(), key=lambda item: -item[1])
    rows = "".join(f"<li>{count:,} × {escape(reason)}</li>" for reason, count in most[:_MOST_ERRORS])
    more = len(most) - _MOST_ERRORS
    rest = f"<li>and {more:,} other reasons</li>" if more > 0 else ""
    return f'<section><h2 class="bad">Why requests failed</h2><ul>{rows}{rest}</ul></section>'


def _about(setting: Setting, remarks: Sequence[str], facts: dict[str, Any]) -> str:
    goodput = ", ".join(f"{name} ≤ {limit:g} ms" for name, limit in setting.goodput.items())
    told = {
        "Command": f"<code>{escape(str(facts['command']))}</code>",
        "Lengths": escape(
            f"{setting.random_input_len:,} tokens in, {setting.random_output_len:,} out, "
            f"each ± {100 * setting.random_range_ratio:g} %; seed {setting.seed}"
        ),
        "Good is": escape(goodput),
        "Machine": escape(
            f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB, Linux {facts['kernel']}, "
            f"Python {facts['python']}, load average {facts['load_average'][0]}"
        ),
        "Ready after": "" if setting.ready_s is None else f"{setting.ready_s:.1f} s",
        "Remarks": "; ".join(map(escape, remarks)),
    }
    rows = "".join(f"<li>{name}: {value}</li>" for name, value in told.items() if value)
    return f"<section><h2>How it was measured</h2><ul>{rows}</ul></section>"
