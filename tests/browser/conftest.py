"""A real Chromium on the pages of a real server.

`make browser` runs these tests with playwright in an environment of its own.  Without playwright or without a
Chromium (`apt-get install chromium`, or BATON_CHROMIUM=PROGRAM) they are skipped.  Pictures and figures go to
build/browser: look at the pictures.  Limits of time are printed beside what was measured; they are asserted
with BATON_LIMITS=1 (`make browser LIMITS=1`), for a machine that does nothing else.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import GENEROUS_S
from tests.e2e.server import Server

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

OUT = Path(__file__).parents[2] / "build" / "browser"
FIGURES = pytest.StashKey[list[str]]()
SPLIT = ("--prefill", "1", "--decode", "2", "--disaggregation-threshold", "0")
PROBES = Path(__file__).with_name("probes.js")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    api = pytest.importorskip("playwright.sync_api", reason="no playwright here: run `make browser`")
    names = [os.environ.get("BATON_CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome"]
    program = next(filter(None, (shutil.which(name) for name in names if name)), None)
    if program is None:
        pytest.skip("no Chromium here (Debian: apt-get install chromium; or BATON_CHROMIUM=PROGRAM)")
    root = ["--no-sandbox"] if os.geteuid() == 0 else []
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=root)
        yield chromium
        chromium.close()


@dataclass
class Opened:
    """A page, and what it complained of."""

    page: Page
    errors: list[str] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)
    """Origins from which it loaded something."""

    def shoot(self, name: str) -> None:
        """The whole page into a picture.  (To hide the cursor takes a style, which the policy forbids.)"""
        OUT.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=OUT / f"{name}.png", full_page=True, caret="initial")

    def wait(self, expression: str) -> None:
        """Until it is true in the page.  (playwright's own way is eval, which the policy forbids.)"""
        deadline = time.monotonic() + GENEROUS_S
        while not self.page.evaluate(expression):
            assert time.monotonic() < deadline, f"{expression}: {self.page.inner_text('body')}"
            self.page.wait_for_timeout(30)

    def call(self, method: str) -> Any:
        """Of Chromium's own protocol."""
        session = self.page.context.new_cdp_session(self.page)
        try:
            return session.send(method)
        finally:
            session.detach()


Open = Callable[..., Opened]


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Opens an address, with `dark`, `width`, `expected` (an expression for console errors that are right).
    At the end nothing else may have gone wrong in any page."""
    opened: list[tuple[Opened, str]] = []

    def open_it(url: str, *, dark: bool = False, width: int = 1280, expected: str = "") -> Opened:
        size = {"width": width, "height": 900}
        context = browser.new_context(color_scheme="dark" if dark else "light", viewport=size)
        page = context.new_page()
        page.set_default_timeout(60_000)
        one = Opened(page)
        page.on("console", lambda line: one.errors.append(line.text) if line.type == "error" else None)
        page.on("pageerror", lambda error: one.errors.append(str(error)))
        page.on("request", lambda request: one.asked.add("/".join(request.url.split("/")[:3])))
        page.add_init_script(path=PROBES)
        opened.append((one, expected))
        page.goto(url)
        return one

    yield open_it
    for one, expected in opened:
        assert one.page.evaluate("wrong") == []
        assert [error for error in one.errors if not expected or not re.search(expected, error)] == []
        one.page.context.close()


@pytest.fixture(scope="module")
def split() -> Iterator[Server]:
    """One instance prefills and two decode, with the embedded model."""
    with Server(*SPLIT, "--dtype", "float32", "--kv-cache-memory-bytes", "64M") as server:
        server.wait_ready()
        yield server


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> Callable[[str, float, float, str], None]:
    """Keeps a figure beside its limit."""

    def keep(what: str, value: float, limit: float, unit: str) -> None:
        lines = request.config.stash.setdefault(FIGURES, [])
        lines.append(f"{what}: {value:.1f} {unit} (at most {limit:g})")
        OUT.mkdir(parents=True, exist_ok=True)
        (OUT / "measured.json").write_text(json.dumps(lines, indent=1))
        assert value <= limit or os.environ.get("BATON_LIMITS") != "1", lines[-1]

    return keep


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in config.stash.get(FIGURES, []):
        terminalreporter.write_line(line)
