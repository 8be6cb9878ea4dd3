"""`/ui` in a browser: how it looks, what its figures are worth, keys, orders, rights."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable

import pytest

from tests.browser.conftest import SPLIT, Open, Opened
from tests.browser.load import Load
from tests.conftest import GENEROUS_S
from tests.e2e.server import Server

PARTS = ["read", "queue", "prefill", "handover", "decode", "finish"]
Measured = Callable[[str, float, float, str], None]


def ready(opened: Opened) -> None:
    opened.wait("text('link') === 'ready'")


def texts(opened: Opened, selector: str) -> list[str]:
    return opened.page.eval_on_selector_all(selector, "all => all.map((one) => one.textContent.trim())")


@pytest.mark.parametrize("name", ["light", "dark", "phone", "phone-dark"])
def test_it_looks_well_under_load(split: Server, open_page: Open, name: str) -> None:
    """Asserted is that nothing is wider than the screen, and that texts have contrast: see the pictures."""
    width = 390 if "phone" in name else 1280
    opened = open_page(f"{split.url}/ui", dark="dark" in name, width=width)
    ready(opened)
    page = opened.page
    opened.wait("count('legend')")
    if not split.metric("baton:num_requests_running"):
        opened.wait("!document.getElementById('none').hidden")
    opened.shoot(f"ui-{name}-idle")
    with Load(split.url, 12):
        opened.wait("count('shown') >= 5")
        page.select_option("#which", "decode-0")
        page.fill("#prompt", "Hello! Who are you?")
        page.press("#prompt", "Enter")
        page.wait_for_selector("#waterfall .wire")
        page.focus("#map")
        page.keyboard.press("ArrowRight")
        opened.shoot(f"ui-{name}")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate("faint()") == []
        page.click("#pause")
        assert page.evaluate("faint()") == []
        opened.shoot(f"ui-{name}-dialog")
        page.keyboard.press("Escape")
    assert opened.asked == {split.url}


@pytest.mark.parametrize("stream", [False, True])
def test_a_waterfall_adds_up_to_what_the_client_measured(
    split: Server, open_page: Open, measured: Measured, stream: bool
) -> None:
    """Of requests that were handed over.  What a busy machine adds on the way to the client is not the
    server's: one of them at least has to agree."""
    opened = open_page(f"{split.url}/ui")
    ready(opened)
    page, best = opened.page, float("inf")
    for number in range(40):
        name = f"waterfall-{stream}-{number}"
        body = {"prompt": "Once upon a time " * 20, "max_tokens": 60, "ignore_eos": True, "stream": stream}
        sent = time.perf_counter()
        split.http.post("/v1/completions", json=body, headers={"x-request-id": name}).raise_for_status()
        took_ms = (time.perf_counter() - sent) * 1e3
        page.fill("#id", name)
        page.click("#look button")
        opened.wait(f"text('request').startsWith('{name}: done')")
        total = float(re.search(r"done, ([0-9.]+) ms", texts(opened, "#request")[0])[1])
        rows = texts(opened, "#waterfall li:not(.wire)")
        assert [row.split()[0] for row in rows] == PARTS
        assert re.search(r"handover prefill-0 → decode-[01]", rows[3])
        assert re.search(r"↳ [0-9.]+ [kM]B by shared memory", " ".join(texts(opened, "#waterfall .wire")))
        added = sum(float(ms.removesuffix(" ms")) for ms in texts(opened, "#waterfall li:not(.wire) .ms"))
        assert added == pytest.approx(total, abs=0.5), "rounded six times"
        assert total <= took_ms
        best = min(best, took_ms - added)
        if best < 5:
            break
    measured(f"waterfall beside the client's clock (stream: {stream})", best, 5, "ms")
    assert best < 5


def test_the_chat_box_shows_its_own_request(split: Server, open_page: Open) -> None:
    opened = open_page(f"{split.url}/ui")
    ready(opened)
    page = opened.page
    page.fill("#prompt", "Hello! Who are you?")
    page.press("#prompt", "Enter")
    opened.wait("/: done, /.test(text('request'))")
    assert "Baton" in texts(opened, "#answer")[0]
    found = re.match(
        r"([0-9a-f]{32}): done, ([0-9.]+) ms \(this page measured ([0-9.]+) ms", texts(opened, "#request")[0]
    )
    assert page.input_value("#id") == found[1]
    assert float(found[2]) <= float(found[3])
    (told,) = split.http.get("/debug/requests", params={"id": found[1]}).json()["requests"]
    assert told["instances"][0] == "prefill-0"
    assert texts(opened, "#waterfall li:nth-child(3) span:first-child") == ["prefill prefill-0"]
    assert re.search(r"prefill-0: handed .*pages", " ".join(texts(opened, "#notes li")))
    page.fill("#prompt", "Tell me a long story.")
    assert page.is_enabled("#send")
    assert page.is_disabled("#stop")


def test_keys_are_enough(split: Server, open_page: Open) -> None:
    """Tab reaches everything in the order of the page, shows where it is; Escape says no; the focus stays."""
    opened = open_page(f"{split.url}/ui")
    ready(opened)
    page = opened.page
    order = []
    while True:
        page.keyboard.press("Tab")
        at = page.evaluate("focused()")
        if at["name"] in order or page.evaluate("document.activeElement === document.body"):
            break
        order.append(at["name"])
        assert at["seen"], at
        assert at["ring"], at
    names = texts(opened, "#instances td.name")
    rows = [name for one in names for name in (f"Label of {one}", f"Drain {one}")]
    assert sorted(names) == ["decode-0", "decode-1", "prefill-0"]
    assert order == ["pause", *rows, "which", "map", "find", "rows", "prompt", "send", "id", "Show"]

    drain = page.get_by_role("button", name="Drain decode-1")
    drain.focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.textContent") == "Cancel"
    page.keyboard.press("Escape")
    assert page.evaluate("focused()")["name"] == "Drain decode-1"
    assert state(split, "decode-1") == (False, "decode")
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Drain decode-1"
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Use again: decode-1").wait_for()
    assert page.evaluate("focused()")["name"] == "Use again: decode-1"
    assert state(split, "decode-1") == (True, "decode")
    opened.wait("/drained/.test(text('instances'))")
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    drain.wait_for()
    assert state(split, "decode-1") == (False, "decode")


def state(server: Server, name: str) -> tuple[bool, str]:
    (one,) = [one for one in server.http.get("/cluster/instances").json()["instances"] if one["name"] == name]
    return one["draining"], one["label"]


def test_orders_ask_before_they_act(split: Server, open_page: Open) -> None:
    opened = open_page(f"{split.url}/ui")
    ready(opened)
    page = opened.page
    label = page.get_by_label("Label of decode-1")
    label.select_option("mixed")
    assert "Give decode-1 the label mixed?" in texts(opened, "#question")[0]
    page.get_by_role("button", name="Cancel").click()
    opened.wait("document.querySelector('[aria-label=\"Label of decode-1\"]').value === 'decode'")
    assert state(split, "decode-1") == (False, "decode")
    for wanted in ("mixed", "decode"):
        label.select_option(wanted)
        page.get_by_role("button", name="Change the label").click()
        opened.wait("!document.getElementById('sure').open")
        deadline = time.monotonic() + GENEROUS_S
        while state(split, "decode-1") != (False, wanted):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        opened.wait(f"document.querySelector('[aria-label=\"Label of decode-1\"]').value === '{wanted}'")
    page.click("#pause")
    page.click("#yes")
    page.get_by_role("button", name="Resume all").wait_for()
    assert split.http.get("/is_paused").json()["is_paused"] is True
    page.click("#pause")
    page.click("#yes")
    page.get_by_role("button", name="Pause all").wait_for()
    assert split.http.get("/is_paused").json()["is_paused"] is False
    ready(opened)


def test_a_killed_instance_is_seen(split: Server, open_page: Open, measured: Measured) -> None:
    opened = open_page(f"{split.url}/ui")
    ready(opened)
    opened.page.evaluate("watchStates()")
    with Load(split.url, 6):
        opened.wait("count('shown') >= 3")
        killed = time.time()
        os.kill(split.children()["engine"][-1], signal.SIGKILL)
        opened.wait("gone")
        opened.shoot("ui-killed")
        measured("a killed instance is seen after", opened.page.evaluate("gone") / 1e3 - killed, 2, "s")
        opened.wait("/ready, 1 restart[0-9]/.test(text('instances'))")


def test_a_server_that_goes_and_comes_back(open_page: Open) -> None:
    flags = ("--executor", "simulated", *SPLIT)
    with Server(*flags) as server:
        server.wait_ready()
        opened = open_page(f"{server.url}/ui", expected="ERR_CONNECTION_REFUSED|status of 503")
        ready(opened)
    opened.wait("/does not answer|ended the connection/.test(text('link'))")
    opened.shoot("ui-away")
    with Server(*flags, "--port", server.url.rpartition(":")[2]):
        ready(opened)
        assert sorted(texts(opened, "#instances td.name")) == ["decode-0", "decode-1", "prefill-0"]
        opened.page.goto("about:blank")


def test_who_has_no_admin_key_is_asked_for_it(open_page: Open) -> None:
    with Server("--executor", "simulated", "--admin-key", "sesame", "--api-key", "user") as server:
        deadline = time.monotonic() + GENEROUS_S
        while server.http.get("/ready").status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        opened = open_page(f"{server.url}/ui", expected="status of 40[13]")
        page = opened.page
        page.wait_for_selector("#key")
        assert texts(opened, "#link") == ["not connected"]
        assert page.evaluate("document.activeElement.id") == "key"
        assert page.is_hidden("main")
        opened.shoot("ui-key")
        for wrong in ("guess", "user"):
            page.keyboard.type(wrong)
            page.keyboard.press("Enter")
            opened.wait("/admin key/.test(text('link'))")
            assert page.input_value("#key") == ""
            assert texts(opened, "#instances tr") == []
            opened.wait("document.activeElement.id === 'key'")
        page.fill("#key", "sesame")
        page.keyboard.press("Enter")
        ready(opened)
        assert page.is_hidden("#keyed")
        page.fill("#prompt", "Hello")
        page.press("#prompt", "Enter")
        opened.wait("/: done, /.test(text('request'))")
        assert "sesame" not in page.content()
        assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
        page.goto("about:blank")
