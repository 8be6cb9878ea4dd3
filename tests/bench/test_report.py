"""The page of `baton bench serve --report`: what stands in it, and that it needs nothing else."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path
from xml.etree import ElementTree

import pytest

from baton.bench.client import Outcome
from baton.bench.drawing.chart import MOST_POINTS, number
from baton.bench.drawing.report import check_report, page
from baton.bench.metrics import calculate
from baton.bench.results import Setting
from baton.bench.workload import Request

FACTS = {
    "cpu": "a <fast> one",
    "cores": 2,
    "memory_gib": 8.0,
    "kernel": "6.1",
    "python": "3.12",
    "baton": "0.1.0",
}
FACTS |= {"command": "baton bench serve --report 'x y.html'", "load_average": [0.5, 0.4, 0.3]}
SETTING = Setting(
    model_id="<script>alert(1)</script>",
    num_prompts=4,
    random_input_len=3,
    random_output_len=4,
    random_range_ratio=0.25,
    request_rate=2.0,
    burstiness=1.0,
    max_concurrency=None,
    seed=7,
    goodput={"ttft": 200.0},
    ready_s=1.5,
)


def outcome(start: float, gaps: list[float], error: str = "") -> Outcome:
    """`gaps`: seconds to the first event, then between events."""
    times = [start + sum(gaps[: index + 1]) for index in range(len(gaps))]
    return Outcome(Request([1, 2, 3], 4), start, times, output_tokens=len(gaps), error=error)


def made(outcomes: list[Outcome]) -> str:
    return page(
        SETTING, calculate(outcomes, 2.0), outcomes, ["a < remark"], datetime(2026, 1, 2, 3, 4), FACTS
    )


def charts(text: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


def paths(chart: ElementTree.Element, kind: str) -> list[str]:
    return [path.attrib["d"] for path in chart.iter("path") if kind in path.attrib["class"].split()]


RUN = [outcome(10.0, [0.1, 0.02, 0.02]), outcome(10.5, [0.3, 0.02, 0.04]), outcome(11.0, [0.2, 0.03, 0.03])]


def test_figures_and_percentiles() -> None:
    text = made([*RUN, outcome(11.5, [], "HTTP 500: <b>")])
    told = dict(re.findall(r"<dt>(.*?)</dt><dd[^>]*>(.*?)</dd>", text))
    assert (told["Requests"], told["Succeeded"], told["Failed"]) == ("4", "3", "1")
    assert (told["Requests/s"], told["Output tokens"]) == ("1.50", "9")
    (row,) = re.findall(r"<tr><th scope=\"row\">TTFT<span.*?</th>(.*?)</tr>", text)
    assert re.findall(r"<td>(.*?)</td>", row) == ["200", "200", "280", "290", "298", "300"]
    (row,) = re.findall(r"<tr><th scope=\"row\">ITL<span.*?</th>(.*?)</tr>", text)
    assert re.findall(r"<td>(.*?)</td>", row)[0] == "26.7"
    assert "1 × HTTP 500: &lt;b&gt;" in text
    assert "a &lt; remark" in text
    assert "3 tokens in, 4 out, each ± 25 %; seed 7" in text


def test_it_needs_nothing_else_and_runs_nothing() -> None:
    text = made(RUN)
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert not re.findall(r"""\b(?:src|href|@import|url)\s*[=(]|https?:|\son[a-z]+=|\sstyle=""", text)
    assert "default-src 'none'" in text


def test_charts_show_each_request_and_each_gap() -> None:
    """Three points of first tokens, six of gaps; curves that rise from nothing to all."""
    ttft, ttft_curve, itl, itl_curve = charts(made([*RUN, outcome(11.5, [], "lost")]))
    assert [len(re.findall("h0", paths(chart, "points")[0])) for chart in (ttft, itl)] == [3, 6]
    assert [len(re.findall("v-9", "".join(paths(chart, "failed")))) for chart in (ttft, itl)] == [1, 0]
    for curve in (ttft_curve, itl_curve):
        places = [tuple(map(float, at.split())) for at in re.split("[ML]", paths(curve, "curve")[0])[1:]]
        assert places == sorted(places, key=lambda at: (at[0], -at[1])), "to the right, and up"
        assert places[0][1] > 200
        assert places[-1][1] == 14.0
    said = [text.text for text in ttft_curve.iter("text") if text.attrib.get("class") == "said"]
    assert said == ["p50 200", "p90 280", "p99 298"]
    heights = [float(at.split()[1].removesuffix("h0")) for at in paths(ttft, "points")[0].split("M")[1:]]
    assert heights[1] < heights[2] < heights[0], "the longest is highest"


def test_very_many_values_make_no_large_page() -> None:
    many = [outcome(number / 100, [0.1, 0.0, *([0.02] * 59), 9.0]) for number in range(2000)]
    many[1003].times[20] += 500.0  # the longest of all gaps
    text = made(many)
    assert len(text) < 400_000
    assert f"{MOST_POINTS:,} of 122,000 points" in text
    _, _, itl, _ = charts(text)
    drawn = paths(itl, "points")[0]
    assert 0.9 * MOST_POINTS < drawn.count("h0") <= MOST_POINTS
    heights = sorted(float(at.split()[1].removesuffix("h0")) for at in drawn.split("M")[1:])
    assert heights[0] < heights[1] - 20, "the longest is drawn"
    assert "logarithmic" in "".join(text.text or "" for text in itl.iter("text"))


@pytest.mark.parametrize(
    "outcomes", [[outcome(0.0, [], "no")], [outcome(0.0, [0.1])], [outcome(0.0, [0.0, 0.0])]]
)
def test_little_to_draw(outcomes: list[Outcome]) -> None:
    text = made(outcomes)
    assert len(charts(text)) == {0: 0, 1: 2, 2: 4}[len(outcomes[0].times)]


def test_numbers_have_three_digits() -> None:
    assert [number(value) for value in (0, 0.1234, 1.234, 12.34, 1234.5)] == [
        "0",
        "0.12",
        "1.23",
        "12.3",
        "1,234",
    ]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    check_report(tmp_path / "new" / "run.html")
    with pytest.raises(ValueError, match=r"--report .*: cannot write it: Is a directory"):
        check_report(tmp_path)
