"""`make gpu`: everything that a GPU can show, in eight minutes, each part with a deadline of its own.

    python tools/gpu_run.py [--device cuda] [--only NAME …] [--deadline 470]

First what is missing is unpacked (`gpu_packages`).  Then stages run one after the other; the parts of a
stage run at the same time, as processes.  Tests (kernels, executors, a server) share the device and run
first; what is timed has it for itself.  A part that fails or hangs takes no other with it: a process of
tests that dies begins again behind the test that killed it.  What is known is written after each stage, into
$OUT or build/gpu:

* gpu.md: what passed, failed or was not reached, and all figures beside their limits and goals;
* gpu.json: the same for programs, with the time and message of each test;
* gpu.log: what the parts printed.

`--device cpu` tries the machinery where there is no GPU: kernels in Triton's interpreter, figures of tiny
sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "gpu"
SITE = WORK / "site"
MOST_S = 470.0
_ROUNDS = 8
"""Processes for one part of tests at most."""


@dataclass(frozen=True)
class Part:
    """A process with a deadline: tests that are recorded, or a benchmark."""

    name: str
    command: tuple[str, ...]
    deadline_s: float
    tests: bool = False


@dataclass
class Outcome:
    name: str
    ended: str = "not reached"
    """done; failed; not done in time; not reached"""
    seconds: float = 0.0
    tests: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of each test: outcome (passed, failed, skipped, not reached), message, seconds"""

    def count(self, outcome: str) -> int:
        return sum(test["outcome"] == outcome for test in self.tests.values())


def stages_of(device: str, deadline_s: float) -> list[list[Part]]:
    """What is run, in order."""
    kernels, parity = "tests/model/cuda", "tests/gpu/test_parity.py"
    elsewhere = [
        f"--ignore={kernels}/test_{name}.py"
        for name in ("attention", "compiled", "executor", "flashinfer", "imports")
    ]
    tests: dict[str, tuple[str, ...]] = {
        "attention": (f"{kernels}/test_attention.py",),
        "kernels": (kernels, *elsewhere),
        "executor": (f"{kernels}/test_executor.py", "tests/gpu/test_steps.py"),
        "families, float32": (parity, "-k", "in_float32"),
        "families, bfloat16": (parity, "-k", "bfloat16 and not bits"),
        "families, KV in 8 bits": (parity, "-k", "bfloat16 and bits"),
        "server": ("tests/gpu/test_server.py", "tests/gpu/test_ranks.py"),
        "requests": ("tests/gpu/test_requests.py",),
    }
    tiny = ("--tiny",) if device == "cpu" else ()
    figures = {
        "device": 30.0,
        "qwen3-0.6b": 60.0,
        "nano": 90.0,
        "llama-8b": 70.0,
        "qwen3-4b": 60.0,
        "kernels": 150.0,
    }
    pytest = (sys.executable, "-m", "pytest", "-q", "-p", "tests.gpu.recording", "-p", "no:cacheprovider")

    def benchmark(name: str) -> Part:
        command = (sys.executable, "benchmarks/gpu.py", "--part", name, "--device", device, *tiny)
        return Part(f"figures: {name}", (*command, "--out", str(WORK / "figures.jsonl")), figures[name])

    together = [Part(name, (*pytest, *files), 0.4 * deadline_s, True) for name, files in tests.items()]
    # (It may compile its kernels on all cores, so nothing else runs then.)
    last = Part(
        "FlashInfer", (*pytest, f"{kernels}/test_flashinfer.py", "tests/gpu/test_flashinfer.py"), 150.0, True
    )
    timed = [[benchmark(name)] for name in figures if name != "device"]
    return [[benchmark("device")], together, *timed, [last]]


def run_all(
    stages: Sequence[Sequence[Part]], deadline_s: float, environment: dict[str, str], report: Any
) -> list[Outcome]:
    """Runs the parts; `report(outcomes)` after each stage.  Nothing begins or goes on after `deadline_s`."""
    ends = time.monotonic() + deadline_s
    outcomes = {part.name: Outcome(part.name) for stage in stages for part in stage}
    for stage in stages:
        threads = []
        for part in stage:
            left = min(part.deadline_s, ends - time.monotonic())
            if left > 1:
                arguments = part, left, environment, outcomes[part.name]
                threads.append(threading.Thread(target=_run_part, args=arguments))
                threads[-1].start()
        for thread in threads:
            thread.join()
        report(list(outcomes.values()))
    return list(outcomes.values())


def _run_part(part: Part, left_s: float, environment: dict[str, str], outcome: Outcome) -> None:
    began = time.monotonic()
    results = WORK / f"{re.sub('[^a-z0-9.]+', '-', part.name.lower())}.jsonl"
    results.unlink(missing_ok=True)
    mine = environment | {"BATON_GPU_RESULTS": str(results)}
    outcome.ended = "failed"
    for _ in range(_ROUNDS if part.tests else 1):
        code = _run_process(part, left_s - (time.monotonic() - began), mine)
        if code is None:
            outcome.ended = "not done in time"
            break
        outcome.ended = "done" if code == 0 else "failed"
        if code in (
            0,
            1,
            2,
            4,
            5,
        ):  # (pytest's: all passed, some failed, collection failed, usage, none left)
            break
    outcome.seconds = round(time.monotonic() - began, 1)
    if part.tests:
        outcome.tests = read_results(results)
        if outcome.ended == "done" and outcome.count("failed"):
            outcome.ended = "failed"


def _run_process(part: Part, left_s: float, environment: dict[str, str]) -> int | None:
    """Its code; None: it was ended, with all that it had started, because its time was over."""
    if left_s <= 0:
        return None
    with (WORK / "gpu.log").open("ab") as log:
        log.write(f"\n===== {part.name}: {' '.join(part.command)}\n".encode())
        log.flush()
        process = subprocess.Popen(
            part.command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            return process.wait(left_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()


def read_results(results: Path) -> dict[str, dict[str, Any]]:
    """What `tests/gpu/recording.py` wrote: the last word of each test; begun and not ended is a failure."""
    found: dict[str, dict[str, Any]] = {}
    for line in results.read_text().splitlines() if results.exists() else []:
        told = json.loads(line)
        for test in told.get("collected", ()):
            found.setdefault(test, {"outcome": "not reached", "message": "", "seconds": 0.0})
        if "begin" in told:
            found[told["begin"]] = {"outcome": "failed", "message": "the process died", "seconds": 0.0}
        if "end" in told:
            before = found.get(told["end"], {})
            if before.get("outcome") == "failed" and before.get("message") != "the process died":
                continue  # (what failed first says more than its teardown)
            found[told["end"]] = {key: told[key] for key in ("outcome", "message", "seconds")}
    return found


def table(outcomes: Sequence[Outcome], figures: Sequence[dict[str, Any]], facts: Sequence[str]) -> str:
    """In Markdown."""
    lines = ["# make gpu", "", *(f"* {fact}" for fact in facts), ""]
    lines += ["| part | ended | seconds | passed | failed | skipped | not reached |", "|" + " --- |" * 7]
    for outcome in outcomes:
        counts = [outcome.count(name) for name in ("passed", "failed", "skipped", "not reached")]
        cells = [outcome.name, outcome.ended, outcome.seconds, *(counts if outcome.tests else [""] * 4)]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    failed = [
        f"* {name}: {test['message']}"
        for outcome in outcomes
        for name, test in outcome.tests.items()
        if test["outcome"] == "failed"
    ]
    failed += [f"* {figure['what']}: {figure['note']}" for figure in figures if has_failed(figure)]
    lines += ["", "## Failed", "", *failed] if failed else []
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from _gpu.figures import HEAD, Figure, line

    rows = [line(Figure(**figure)) for figure in figures]
    lines += ["", "## Figures", "", HEAD, *rows] if rows else []
    return "\n".join(lines) + "\n"


def has_failed(figure: dict[str, Any]) -> bool:
    """What was to be measured could not be run."""
    return str(figure["note"]).startswith("FAILED")


def read_figures() -> list[dict[str, Any]]:
    file = WORK / "figures.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line)["figure"] for line in lines if '"figure"' in line]


def device_facts(device: str, environment: dict[str, str]) -> list[str]:
    """What computes, asked in a process of its own."""
    script = (
        "import sys, torch, triton, transformers, numpy\n"
        "print(f'Python {sys.version.split()[0]}, torch {torch.__version__}, triton {triton.__version__}, '\n"
        "      f'transformers {transformers.__version__}, numpy {numpy.__version__}')\n"
        "for i in range(torch.cuda.device_count()):\n"
        "    had = torch.cuda.get_device_properties(i)\n"
        "    print(f'{had.name}, {had.total_memory / 2**30:.0f} GiB, sm_{had.major}{had.minor}, '\n"
        "          f'{had.multi_processor_count} multiprocessors')\n"
        "sys.exit(0 if torch.cuda.is_available() else 3)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    if done.returncode and (done.returncode != 3 or device == "cuda"):
        why = done.stderr.strip().splitlines()[-1:] or ["PyTorch finds no CUDA device here"]
        sys.exit(f"make gpu: {why[0]} (--device cpu tries the machinery without one)")
    return done.stdout.splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="parts with one of these in their names")
    parser.add_argument("--deadline", type=float, default=MOST_S, help=f"seconds for all ({MOST_S:.0f})")
    asked = parser.parse_args()
    began = time.monotonic()
    WORK.mkdir(parents=True, exist_ok=True)
    for name in ("gpu.log", "figures.jsonl"):
        (WORK / name).unlink(missing_ok=True)
    packages = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "gpu_packages.py"), "unpack"], capture_output=True, text=True
    )
    print(packages.stdout + packages.stderr, flush=True)
    if packages.returncode:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        sys.exit(
            f"make gpu: packages are missing (see above): run `make gpu-wheels GPU_PYTHON={version}` where "
            "there is a network, and bring build/gpu-wheels"
        )
    path = [str(ROOT / "src"), str(SITE), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PYTHONUNBUFFERED": "1",
        "BATON_TEST_DEVICE": asked.device,
        "TRITON_CACHE_DIR": str(WORK / "triton"),
        "BATON_GPU_TEST_S": "100",
    }
    facts = device_facts(asked.device, environment)
    print("\n".join(facts), flush=True)
    out = Path(os.environ.get("OUT") or WORK)

    def report(outcomes: Sequence[Outcome]) -> None:
        figures = read_figures()
        text = table(outcomes, figures, facts)
        (out / "gpu.md").write_text(text)
        told = {"facts": facts, "parts": [vars(outcome) for outcome in outcomes], "figures": figures}
        (out / "gpu.json").write_text(json.dumps(told, indent=1))
        if out != WORK:
            (out / "gpu.log").write_bytes((WORK / "gpu.log").read_bytes()[-(12 << 20) :])
        ended = [
            f"{outcome.name}: {outcome.ended}, {outcome.seconds} s" for outcome in outcomes if outcome.seconds
        ]
        print(f"{time.monotonic() - began:.0f} s: {'; '.join(ended)}", flush=True)

    stages = stages_of(asked.device, asked.deadline)
    if asked.only:
        stages = [
            [part for part in stage if any(name in part.name for name in asked.only)] for stage in stages
        ]
    left = asked.deadline - (time.monotonic() - began)
    outcomes = run_all([stage for stage in stages if stage], left, environment, report)
    print((out / "gpu.md").read_text())
    good = all(outcome.ended == "done" for outcome in outcomes) and not any(map(has_failed, read_figures()))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
