"""Prometheus, if it is here: `apt-get install prometheus`, or BATON_PROMETHEUS=DIRECTORY of its programs."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy" / "grafana" / "baton.json"
RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
RULES_TEST = ROOT / "deploy" / "prometheus" / "rules_test.yml"
CONFIG = ROOT / "deploy" / "prometheus" / "prometheus.yml"


def program(name: str) -> str:
    """Its path; skips the test if it is not there."""
    path = os.environ.get("BATON_PROMETHEUS", "") + os.pathsep + os.environ.get("PATH", "")
    found = shutil.which(name, path=path)
    if found is None:
        pytest.skip(f"no {name} here (Debian: apt-get install prometheus; or BATON_PROMETHEUS=DIRECTORY)")
    return found


def queries() -> dict[str, str]:
    """Of the dashboard, by panel and legend, with its variables filled in."""
    found = {}
    for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]:
        for target in panel.get("targets", []):
            query = target["expr"].replace("$__rate_interval", "1m")
            query = query.replace("$model_name", ".*").replace("$instance", ".*")
            assert "$" not in query, query
            found[f"{panel['title']}: {target['refId']}"] = query
    return found


def names(text: str) -> set[str]:
    """Of Baton's metrics in a query or a document."""
    return set(re.findall(r"\bbaton:[a-z0-9_]+", text))
