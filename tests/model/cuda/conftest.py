"""Kernels in Triton are run in its interpreter, on a CPU; on a GPU where there is one (`where`)."""

from __future__ import annotations

from tests.model.cuda.where import THERE, interpret


def pytest_ignore_collect(collection_path: object) -> bool | None:
    """Without Triton (`pip install baton-llm[cuda]`) there is nothing to test."""
    return None if THERE else str(collection_path).endswith(".py")


interpret()
