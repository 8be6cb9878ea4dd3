"""`make gpu`: tests that fail, hang or kill their process stop no other, and what is known is written."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

TESTS = """
import os, time
import pytest

def test_first(): ...
def test_wrong(): assert 1 + 1 == 3, "sums"
def test_dies(): os._exit(9)
@pytest.mark.skip(reason="no such thing")
def test_left_out(): ...
def test_hangs():
    time.sleep(1000)
def test_last(): ...
"""


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """`import_tool(name)`, with everything written below `tmp_path`."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    for name in ("gpu_run", "gpu_packages"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module


def test_a_test_that_dies_or_hangs_stops_no_other(
    tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = tools("gpu_run")
    monkeypatch.setattr(run, "WORK", tmp_path)
    (tmp_path / "test_some.py").write_text(TESTS)
    pytest_ = (sys.executable, "-m", "pytest", "-q", "-p", "tests.gpu.recording", "-p", "no:cacheprovider")
    some = run.Part(
        "some", (*pytest_, "--rootdir", str(tmp_path), str(tmp_path / "test_some.py")), 120.0, True
    )
    slow = run.Part("slow", (sys.executable, "-c", "import time; time.sleep(1000)"), 2.0)
    quick = run.Part("quick", (sys.executable, "-c", "print('here')"), 60.0)
    broken = run.Part("broken", (sys.executable, "-c", "raise SystemExit(3)"), 60.0)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", "BATON_GPU_TEST_S": "5"}
    reported: list[int] = []
    stages = [[slow, quick], [some], [broken]]
    outcomes = run.run_all(stages, 200.0, environment, lambda found: reported.append(len(found)))
    assert {outcome.name: outcome.ended for outcome in outcomes} == {
        "slow": "not done in time",
        "quick": "done",
        "some": "failed",
        "broken": "failed",
    }
    assert reported == [4, 4, 4]
    tests = {name.rpartition("::")[2]: test for name, test in outcomes[2].tests.items()}
    assert {name: test["outcome"] for name, test in tests.items()} == {
        "test_first": "passed",
        "test_wrong": "failed",
        "test_dies": "failed",
        "test_left_out": "skipped",
        "test_hangs": "failed",
        "test_last": "passed",
    }
    assert "sums" in tests["test_wrong"]["message"]
    assert tests["test_dies"]["message"] == "the process died"
    assert tests["test_hangs"]["message"] == "not done within 5 s"
    assert "no such thing" in tests["test_left_out"]["message"]
    text = run.table(outcomes, [], ["a device"])
    assert re.search(r"\| some \| failed \| [0-9.]+ \| 2 \| 3 \| 1 \| 0 \|", text)
    assert "the process died" in text


def test_what_there_is_no_time_for_is_not_reached(
    tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = tools("gpu_run")
    monkeypatch.setattr(run, "WORK", tmp_path)
    slow = run.Part("slow", (sys.executable, "-c", "import time; time.sleep(1000)"), 100.0)
    after = run.Part("after", (sys.executable, "-c", ""), 100.0)
    outcomes = run.run_all([[slow], [after]], 3.0, dict(os.environ), lambda found: None)
    assert [outcome.ended for outcome in outcomes] == ["not done in time", "not reached"]


def test_parts_name_files_that_are_there(tools: Any):
    stages = tools("gpu_run").stages_of("cuda", 470.0)
    words = [word for stage in stages for part in stage for word in part.command if word.startswith("tests/")]
    words += [
        word.partition("=")[2]
        for stage in stages
        for part in stage
        for word in part.command
        if "=tests/" in word
    ]
    assert len(words) > 8
    assert not [word for word in words if not (ROOT / word).exists()]
    alone = [len(stage) for stage in stages if any("figures" in part.name for part in stage)]
    assert alone == [1] * len(alone), "what is timed has the device for itself"


def test_packages_that_are_missing_are_unpacked(tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    packages = tools("gpu_packages")
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    monkeypatch.setattr(packages, "WHEELS", wheels)
    monkeypatch.setattr(packages, "SITE", site)
    monkeypatch.setattr(packages, "LIBRARY", tmp_path / "_native.so")
    for name in (
        "batonnothing-1.0-py3-none-any.whl",
        "batonother-1.0-cp27-cp27m-win32.whl",
        "numpy-0.1-py3-none-any.whl",
    ):
        with zipfile.ZipFile(wheels / name, "w") as archive:
            archive.writestr("batonnothing/__init__.py", "")
            archive.writestr("batonnothing-1.0.data/purelib/batonbeside.py", "")
    (wheels / f"native-{packages._build().sources_digest()}.so").write_text("compiled")
    said = packages.unpack()
    assert "batonnothing 1.0 unpacked" in said
    assert any("batonother" in line and "not for this Python" in line for line in said)
    assert not [line for line in said if line.startswith("numpy")]
    assert (site / "batonnothing" / "__init__.py").exists()
    assert (site / "batonbeside.py").exists()
    assert (tmp_path / "_native.so").read_text() == "compiled"


def test_a_kernel_that_fails_in_the_benchmark_is_told(tools: Any):
    run = tools("gpu_run")
    good = {"part": "kernels", "what": "norms", "seconds": 1e-6, "note": "900 GB/s"}
    bad = {"part": "kernels", "what": "decode", "note": "FAILED: RuntimeError: no image"}
    assert [run.has_failed(figure) for figure in (good, bad)] == [False, True]
    text = run.table([run.Outcome("figures: kernels", "done")], [good, bad], [])
    assert (
        "* decode: FAILED: RuntimeError: no image"
        in text.partition("## Failed")[2].partition("## Figures")[0]
    )


def test_without_its_packages_it_ends_at_once(tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each part would end with an error of its own that says less."""
    packages = tools("gpu_packages")
    monkeypatch.setattr(packages, "WHEELS", tmp_path)
    monkeypatch.setattr(packages, "SITE", tmp_path / "site")
    monkeypatch.setattr(packages, "LIBRARY", tmp_path / "_native.so")
    monkeypatch.setattr(packages, "_pinned", lambda: ["pytest==9", "batonnothing==1"])
    monkeypatch.setattr(sys, "argv", ["gpu_packages.py", "unpack"])
    with pytest.raises(SystemExit) as end:
        packages.main()
    assert end.value.code == 1


def test_its_tests_are_found_with_the_packages_that_it_brings(tools: Any):
    """What the machine has, and requirements.txt, and nothing else of this environment."""
    stages = tools("gpu_run").stages_of("cuda", 470.0)
    words = [word for stage in stages for part in stage for word in part.command]
    elsewhere = {ROOT / word.removeprefix("--ignore=") for word in words if word.startswith("--ignore=")}
    named = {ROOT / word for word in words if word.startswith("tests/")}
    within = {file for place in named for file in place.glob("test_*.py")} - elsewhere
    paths = sorted(
        str(path.relative_to(ROOT)) for path in within | {path for path in named if path.is_file()}
    )
    command = [sys.executable, "-m", "tests.gpu.bare", "-q", "--collect-only", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [*command, "-p", "pytest_timeout", "-p", "tests.gpu.recording", *paths],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert not [path for path in paths if path not in done.stdout]


def test_each_package_is_one_of_this_environment(tools: Any):
    """So constraints.txt has its version, or it has none of its own."""
    pinned = tools("gpu_packages")._pinned()
    assert len(pinned) > 10
    assert not [one for one in pinned if "==" not in one]


def test_results_keep_the_first_failure(tools: Any, tmp_path: Path):
    lines: list[dict[str, Any]] = [
        {"collected": ["a", "b", "c"]},
        {"begin": "a"},
        {"end": "a", "outcome": "failed", "message": "wrong", "seconds": 1.0},
        {"end": "a", "outcome": "failed", "message": "the device is lost", "seconds": 0.0},
        {"begin": "b"},
    ]
    file = tmp_path / "results"
    file.write_text("\n".join(map(json.dumps, lines)))
    found = tools("gpu_run").read_results(file)
    assert found["a"]["message"] == "wrong"
    assert found["b"]["message"] == "the process died"
    assert found["c"]["outcome"] == "not reached"
