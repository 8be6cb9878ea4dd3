"""The page of `baton bench serve --report` in a browser: it loads nothing, and can be read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.browser.conftest import OUT, Open
from tests.e2e.server import Server


@pytest.fixture(scope="module")
def report(split: Server) -> Path:
    """Of a run on a real server."""
    path = OUT / "report.html"
    python = os.environ.get("BATON_PYTHON", sys.executable)
    command = [
        python,
        "-m",
        "baton",
        "bench",
        "serve",
        "--base-url",
        split.url,
        "--report",
        str(path),
    ]
    command += "--num-prompts 120 --request-rate 25 --random-output-len 60 --random-range-ratio 0.5".split()
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return path


@pytest.mark.parametrize("name", ["light", "dark", "phone"])
def test_a_report_can_be_read(report: Path, open_page: Open, name: str) -> None:
    width = 390 if name == "phone" else 1280
    opened = open_page(f"file://{report}", dark=name == "dark", width=width)
    opened.shoot(f"report-{name}")
    page = opened.page
    assert opened.asked == {"file://"}
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("faint()") == []
    assert page.locator("svg").count() == 4
    box = page.locator("svg").first.bounding_box()
    assert box is not None
    assert box["width"] > 300
    assert "120" in page.inner_text("dl")
