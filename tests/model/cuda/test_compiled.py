"""Kernels are compiled for A100, H100 and B200, in a process without the interpreter; nothing spills, but
for 8 bytes of a few forms, which are named here.

What registers and shared memory they take stands in docs/cuda.md, as the pinned version of Triton makes them.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(900)
ROOT = Path(__file__).parents[3]
PINNED = re.search(r"^triton==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What `tests.model.cuda.compiled` says; nothing of another run is found in a cache."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run(
        [sys.executable, "-m", "tests.model.cuda.compiled", "--json"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


SLIGHTLY = {
    ("chunk, 20 heads a KV head", 80),
    ("chunk, heads of 128, window, soft-cap, sinks", 80),
    ("deterministic product, MXFP4, many rows", 80),
    ("deterministic experts, 4 bits", 100),
}
"""Forms of which 8 bytes a thread are in memory."""


def test_nothing_spills_but_what_is_told(compiled: dict):
    targets = {row["target"] for row in compiled["rows"]}
    assert targets == {80, 90, 100}
    assert {(row["kernel"], row["target"]) for row in compiled["rows"]} >= SLIGHTLY
    spilled = {(row["kernel"], row["target"]): row["spilled"] for row in compiled["rows"] if row["spilled"]}
    assert {form: size for form, size in spilled.items() if form not in SLIGHTLY or size > 8} == {}


def test_what_a_cpu_rounds_twice_is_rounded_twice(compiled: dict):
    """What is stored is turned and quantized as by PyTorch: products that are fused with sums gave another
    byte in a thousand.  Queries likewise: none becomes an integer before it is rounded to float32."""
    fused = {row["kernel"] for row in compiled["rows"] if row["fused"]}
    assert not {name for name in fused if "store" in name or "activations" in name}
    assert fused
    rounds = {row["kernel"] for row in compiled["rows"] if row["rounds_fused"]}
    assert rounds == {"sampling: masses of chunks", "sampling: choice"}  # (as the CPU's exponential)


def test_the_document_has_the_table(compiled: dict):
    """`python -m tests.model.cuda.compiled` prints it anew."""
    if PINNED is None or importlib.metadata.version("triton") != PINNED[1]:
        pytest.skip("another version of Triton than the pinned one: it takes other registers")
    assert compiled["table"] in (ROOT / "docs" / "cuda.md").read_text()


def test_no_batch_has_a_kernel_compiled_for_itself():
    """One variant for all numbers of rows, contexts and tables: another one is compiled for seconds, while
    requests wait."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.model.cuda.variants"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    variants = json.loads(done.stdout)
    assert len(variants) > 12
    assert {name: count for name, count in variants.items() if count != 1} == {}
