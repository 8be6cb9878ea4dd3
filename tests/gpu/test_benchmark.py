"""`benchmarks/gpu.py` runs from end to end, on a CPU: so no silly error costs a GPU's minutes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.model.cuda.where import THERE

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.skipif(not THERE, reason="Triton is not installed: pip install 'baton-llm[cuda]'"),
    pytest.mark.slow,
]


def figures_of(out: Path, *parts: str) -> list[dict]:
    asked = [word for part in parts for word in ("--part", part)]
    command = [sys.executable, "benchmarks/gpu.py", "--tiny", "--device", "cpu", "--out", str(out), *asked]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return [json.loads(line)["figure"] for line in out.read_text().splitlines()]


def test_limits_and_kernels(tmp_path: Path):
    found = figures_of(tmp_path / "figures", "device", "kernels")
    assert not [figure for figure in found if "FAILED" in figure["note"]]
    whats = " / ".join(figure["what"] for figure in found)
    for what in (
        "copy",
        "attention, 1 rows",
        "chunk of",
        "rotate and store",
        "SwiGLU",
        "top-k",
        "product qkv",
    ):
        assert what in whats, what
    timed = [figure for figure in found if figure["part"] == "kernels" and figure["what"] != "whole part"]
    assert all(figure["seconds"] > 0 and figure["limit_s"] > 0 for figure in timed)


@pytest.mark.parametrize("part", ["qwen3-0.6b", "llama-8b"])
def test_a_models_steps(tmp_path: Path, part: str):
    found = figures_of(tmp_path / "figures", part)
    whats = [figure["what"] for figure in found]
    assert [what.split(" rows")[0] for what in whats if what.startswith("decode")] == [
        "decode, 1", "decode, 2", "decode, 1", "decode, 1",
    ]  # fmt: skip
    assert any(what.startswith("prompt of") for what in whats)
    assert "attention by Triton" in found[0]["note"]


def test_the_offline_benchmark(tmp_path: Path):
    """Through `LLM`, with an instance of its own; `workload` draws what nano-vllm's bench.py draws."""
    found = figures_of(tmp_path / "figures", "nano")
    assert any("output tokens" in figure["what"] and figure["rate"] > 0 for figure in found)
    script = (
        "import sys; sys.path.insert(0, 'benchmarks'); from _gpu.nano import workload;"
        "prompts, lengths = workload(256, 100, 1024, 10_000); print(len(prompts), sum(lengths))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["256", "133966"], done.stderr
