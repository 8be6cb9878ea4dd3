"""The dashboard is what its script makes, and each alert has a test that promtool runs.

That every query finds series is in `tests/e2e/test_observed.py`: it needs a server.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys

import yaml

from tests.observe.prometheus import CONFIG, DASHBOARD, ROOT, RULES, RULES_TEST, program, queries


def test_the_dashboard_is_what_the_script_makes():
    command = [sys.executable, str(ROOT / "tools" / "make_dashboard.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_panels_lie_beside_each_other():
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
    assert len(queries()) > 80


def test_each_alert_is_tested():
    (group,) = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    alerts = {rule["alert"] for rule in group["rules"]}
    fired, silent = set(), set()
    for test in yaml.safe_load(RULES_TEST.read_text(encoding="utf-8"))["tests"]:
        for one in test["alert_rule_test"]:
            (fired if one["exp_alerts"] else silent).add(one["alertname"])
    assert fired == alerts
    assert silent <= alerts
    for rule in group["rules"]:
        assert {"summary", "description"} <= rule["annotations"].keys()
        assert rule["labels"]["severity"] in ("info", "warning", "critical")


def test_promtool_accepts_the_rules_and_their_tests():
    promtool = program("promtool")
    for command in (["check", "config", str(CONFIG)], ["test", "rules", str(RULES_TEST)]):
        done = subprocess.run([promtool, *command], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_notices_another_threshold(tmp_path):
    """The tests of the rules can fail."""
    promtool = program("promtool")
    rules = RULES.read_text(encoding="utf-8")
    (tmp_path / "rules_test.yml").write_text(RULES_TEST.read_text(encoding="utf-8"))
    for old, new in (
        ("> 0.95", "> 0.99"),
        ("== 0\n        for: 1m", "== 2\n        for: 1m"),
        ("> 0.05", "> 0.5"),
    ):
        assert old in rules
        (tmp_path / "rules.yml").write_text(rules.replace(old, new))
        done = subprocess.run(
            [promtool, "test", "rules", str(tmp_path / "rules_test.yml")], capture_output=True, text=True
        )
        assert done.returncode != 0, new
        assert re.search("FAILED", done.stdout + done.stderr)
