"""`/ui` beside very many requests, and for a long time (BATON_BROWSER_MINUTES, default: a part of one)."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

from tests.browser.conftest import SPLIT, Open, Opened
from tests.browser.load import Load
from tests.conftest import GENEROUS_S
from tests.e2e.server import Server

REQUESTS = 10_000


def test_ten_thousand_requests_do_not_stall_it(
    open_page: Open, measured: Callable[[str, float, float, str], None]
) -> None:
    flags = (
        "--executor",
        "simulated",
        "--simulated-cost",
        "0.05",
        "--max-waiting",
        str(2 * REQUESTS),
        *SPLIT,
    )
    with Server(*flags) as server:
        server.wait_ready()
        with Load(server.url, REQUESTS, tokens=1500):
            deadline = time.monotonic() + 3 * GENEROUS_S
            while server.http.get("/debug/overview").json()["open"] < REQUESTS:
                assert time.monotonic() < deadline
                time.sleep(0.5)
            opened = open_page(f"{server.url}/ui")
            page = opened.page
            opened.wait("text('count') === '(10,000)'")
            for step in range(20):  # to the end and back, while the rows change
                page.evaluate(f"document.getElementById('rows').scrollTop = {abs(10 - step) * 24_000}")
                page.wait_for_timeout(250)
            page.fill("#find", "lane-9999-")
            opened.wait("count('shown') === 1")
            assert page.inner_text("#shown button") == "lane-9999-0"
            page.fill("#find", "decode")
            opened.wait("count('shown') > 5")
            opened.shoot("ui-10000")
            assert page.evaluate("document.querySelectorAll('#shown li').length") < 60
            longest = max(page.evaluate("long"), default=0.0)
            page.evaluate("setTimeout(() => { const begin = Date.now(); while (Date.now() < begin + 120); })")
            opened.wait("long.some((one) => one > 100)")  # (the probe sees them)
            page.goto("about:blank")
    measured("the longest task beside 10,000 requests", longest, 100, "ms")


def test_its_memory_is_steady(split: Server, open_page: Open) -> None:
    """After a collection: heap, nodes and listeners of the last third beside those of the second."""
    minutes = float(os.environ.get("BATON_BROWSER_MINUTES", "0.5"))
    opened = open_page(f"{split.url}/ui")
    page, samples = opened.page, []
    with Load(split.url, 8):
        opened.wait("count('shown') >= 3")
        begin = time.monotonic()
        while (passed := time.monotonic() - begin) < 60 * minutes:
            page.wait_for_timeout(max(1.0, minutes) * 1000)
            page.click("#shown button")
            opened.wait("count('waterfall')")
            samples.append((round(passed, 1), *_memory(opened)))
    third = len(samples) // 3
    assert third >= 3
    print("seconds, heap MB, nodes, listeners:", *samples[:: max(1, len(samples) // 12)], sep="\n")
    for index, (what, slack) in enumerate((("heap MB", 0.5), ("nodes", 100), ("listeners", 5)), start=1):
        before, after = (
            statistics.median(sample[index] for sample in part)
            for part in (samples[third : 2 * third], samples[2 * third :])
        )
        assert after <= before * 1.05 + slack, (what, before, after)


def _memory(opened: Opened) -> tuple[float, int, int]:
    opened.call("HeapProfiler.collectGarbage")
    heap = opened.call("Runtime.getHeapUsage")["usedSize"] / 1e6
    counts = opened.call("Memory.getDOMCounters")
    return round(heap, 2), counts["nodes"], counts["jsEventListeners"]
