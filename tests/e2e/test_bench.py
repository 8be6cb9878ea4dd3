"""`baton bench` as a user types it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.cli.main import app
from baton.model.checkpoint.hub import resolve_model
from tests.e2e.server import Server
from tests.e2e.test_cli import baton


def test_throughput(tmp_path: Path) -> None:
    path = tmp_path / "results" / "throughput.json"
    result = baton(
        *"bench throughput --num-prompts 5 --input-len 20 --output-len 7 --dtype float32".split(),
        *("--output-json", str(path)),
    )
    assert result.returncode == 0, result.stderr
    last = result.stdout.strip().splitlines()[-1]
    found = re.fullmatch(
        r"Throughput: ([\d.]+) requests/s, ([\d.]+) total tokens/s, ([\d.]+) output tokens/s", last
    )
    assert found, last
    facts = json.loads(path.read_text())
    assert (facts["total_input_tokens"], facts["total_output_tokens"]) == (100, 35)
    assert facts["output_tokens_per_second"] == pytest.approx(float(found[3]), abs=0.01)
    assert facts["tokens_per_second"] == pytest.approx(facts["output_tokens_per_second"] * 135 / 35)
    assert facts["load_time"] > 0


def test_serving_with_a_server_of_its_own(tmp_path: Path) -> None:
    path, picture, page = tmp_path / "serve.json", tmp_path / "serve.png", tmp_path / "new" / "serve.html"
    result = baton(
        *"bench serve --num-prompts 6 --random-input-len 20 --random-output-len 9".split(),
        *(
            "--max-concurrency",
            "3",
            "--server-args",
            "--dtype float32 --max-model-len 128",
            "--goodput",
            "ttft:60000 tpot:60000",
        ),
        *("--save-detailed", "--result-filename", str(path), "--metric-percentiles", "50,90"),
        *("--report", str(page), *(("--plot", str(picture)) if has_matplotlib() else ())),
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert re.search(r"Successful requests: +6\n", result.stdout)
    assert "P90 E2EL (ms):" in result.stdout
    facts = json.loads(path.read_text())
    assert (facts["completed"], facts["failed"], facts["total_output_tokens"]) == (6, 0, 54)
    assert facts["request_goodput"] == pytest.approx(facts["request_throughput"])
    assert facts["output_lens"] == [9] * 6
    assert all(1 <= len(gaps) + 1 <= 9 for gaps in facts["itls"])
    assert facts["request_rate"] == "inf"
    text = page.read_text()
    assert re.search(r"<dt>Succeeded</dt><dd>6</dd>.*<dt>Output tokens</dt><dd>54</dd>", text)
    assert text.count("<svg") == 4
    assert "--num-prompts 6" in text, "the command stands in it"
    if has_matplotlib():
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_peers_take_turns(tmp_path: Path) -> None:
    """Another engine is stood for by a second Baton."""
    path = tmp_path / "peers.json"
    result = subprocess.run(
        [
            *(sys.executable, "benchmarks/peers.py", str(resolve_model(None)), "--rounds", "2"),
            *("--peer", f"baton@again={sys.prefix}", "--work", "3x8x5", "1x8x5"),
            *("--out", str(path), "--converted", str(tmp_path / "converted")),
        ],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    facts = json.loads(path.read_text())
    assert [work["requests"] for work in facts["work"]] == [3, 1]
    for work in facts["work"]:
        assert set(work["engines"]) == {"baton", "baton@again"}
        assert all(len(row["output_tok_s"]) == 2 for row in work["engines"].values())
        assert work["engines"]["baton"]["ratios"] == [1.0, 1.0]
    assert all(engine["resident_bytes"] > 1 << 20 for engine in facts["engines"].values())


def has_matplotlib() -> bool:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def test_serving_a_server_that_runs(server: Server) -> None:
    result = baton(
        *f"bench serve --base-url {server.url} --num-prompts 5 --request-rate 100".split(),
        *"--random-input-len 9 --random-output-len 4 --random-range-ratio 0.5".split(),
        *"--percentile-metrics ttft".split(),
    )
    assert result.returncode == 0, result.stderr
    assert "Request rate configured (RPS):" in result.stdout
    assert "ITL" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (
            "throughput --input-len 2000 --output-len 100",
            2,
            "--input-len 2000, --output-len 100: the context is",
        ),
        ("throughput /no/such/model", 2, "no such directory"),
        ("serve --base-url nowhere", 2, "--base-url nowhere"),
        ("serve --base-url http://127.0.0.1:1", 1, "/v1/models"),
        ("serve --goodput fast", 2, "--goodput fast"),
        ("serve --percentile-metrics ttfb", 2, "'ttfb'"),
        ("serve --metric-percentiles 200", 2, "--metric-percentiles 200"),
        ("serve --request-rate 0", 2, "--request-rate 0"),
        ("serve --report /dev/null/page.html", 2, "--report /dev/null/page.html: cannot write it"),
    ],
)
def test_a_mistake_is_one_line(arguments: str, code: int, words: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments.split()])
    assert result.exit_code == code, result.stderr
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
