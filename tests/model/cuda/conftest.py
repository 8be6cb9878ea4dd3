"""Kernels in Triton are run in its interpreter, on a CPU.

Triton decides for or against its interpreter when it is imported and when a kernel is declared, so both
happen here, before any test.  The environment is as before afterwards: servers that other tests start do
not see it.
"""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest

THERE = importlib.util.find_spec("triton") is not None


def pytest_ignore_collect(collection_path: object) -> bool | None:
    """Without Triton (`pip install baton-llm[cuda]`) there is nothing to test."""
    return None if THERE else str(collection_path).endswith(".py")


def _import_interpreted() -> None:
    if "triton" in sys.modules:
        raise pytest.UsageError("something imported triton before tests/model/cuda: run these tests alone")
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import triton

        import baton.model.attention.triton_backend
        import baton.model.cuda.rows
        import baton.model.cuda.sampling  # noqa: F401

        triton.knobs.propagate_env = False
        triton.knobs.runtime.interpret = True
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


if THERE:
    _import_interpreted()
