"""On which device the tests of kernels run: a CPU, in Triton's interpreter, or a GPU.

`make gpu` sets BATON_TEST_DEVICE=cuda: then the same cases run on the device, and so do those that would take
the interpreter too long (`ON_DEVICE`).  Tests make their numbers on the CPU: both compute with the same.

Triton decides for or against its interpreter when it is imported and when a kernel is declared, so both
happen in `interpret`, before any test.  The environment is as before afterwards: servers that other tests
start do not see it.

The interpreter multiplies matrices with numpy's library, which may add up a row otherwise in another place of
the matrix (OpenBLAS with AVX2 does).  A device does not, so here products are added up one after the other.
"""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest
import torch

DEVICE = torch.device(os.environ.get("BATON_TEST_DEVICE", "cpu"))
if DEVICE.type == "cuda":
    DEVICE = torch.device("cuda", DEVICE.index or 0)  # (as an executor names it)
ON_CPU = DEVICE.type == "cpu"
THERE = importlib.util.find_spec("triton") is not None
"""Whether Triton is installed."""
ON_DEVICE = pytest.mark.skipif(ON_CPU, reason="only on a GPU: `make gpu` (BATON_TEST_DEVICE=cuda)")
_interpreted = False


def interpret() -> None:
    """From now on kernels are interpreted in this process, if `DEVICE` is a CPU."""
    global _interpreted
    if not ON_CPU or _interpreted or not THERE:
        return
    if "triton" in sys.modules:
        raise pytest.UsageError(
            "something imported triton before the tests of kernels: run these tests alone"
        )
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import triton

        import baton.model.attention.triton_backend
        import baton.model.cuda.products.kernels
        import baton.model.cuda.rows
        import baton.model.cuda.sampling  # noqa: F401

        _add_up_in_order()
        triton.knobs.propagate_env = False
        triton.knobs.runtime.interpret = True
        _interpreted = True
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


def _add_up_in_order() -> None:
    import numpy as np
    from triton.runtime import interpreter

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        found = np.zeros_like(d.data)
        for column, row in zip(a.data.T, b.data, strict=True):
            found += np.multiply(column[:, None], row[None], dtype=found.dtype)
        return interpreter.TensorHandle(found + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


def serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Baton's kernels compute from now on, as they do on a GPU anyway."""
    if ON_CPU:
        from baton.model.ops import triton

        monkeypatch.setattr(triton, "serve", lambda device: True)
