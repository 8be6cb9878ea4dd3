"""Everything restarted under load, one after the other: `benchmarks/rolling_restart.py`, made small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CLUSTER = ("--instances", "2", "--gateways", "2", "--streams", "2", "--rounds", "1")
DELAY = ("--drain-delay", "600", "--at-once")
FLAGS = "--executor simulated --simulated-cost 0.002 --max-model-len 1024"


def test_no_request_notices_that_everything_is_restarted(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    command = [sys.executable, str(ROOT / "benchmarks/rolling_restart.py"), *CLUSTER, *DELAY]
    ended = subprocess.run([*command, "--flags", FLAGS, "--out", str(found)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    result = json.loads(found.read_text())
    assert [phase["restarts"] for phase in result["phases"]] == [2, 2]
    for phase in result["phases"]:
        answers = [one for one in result["answers"] if phase["began"] <= one["began"] <= phase["ended"]]
        assert answers
        assert [(one["failure"], one["seam"]) for one in answers if one["failure"] or one["seam"]] == []
