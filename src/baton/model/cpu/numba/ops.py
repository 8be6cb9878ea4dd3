"""The operations of `fused` by numba kernels (`steps`), where there is no C++ build."""

from __future__ import annotations

import struct

import numpy as np
import torch
from torch import Tensor

from baton.model.cpu.kernels import address_of
from baton.model.cpu.numba.kernels import kernel, run_task
from baton.model.cpu.numba.task import NEXT, NORM_EPS, TASK_BYTES, X
from baton.model.description.model import Activation
from baton.model.ops.fused import PLAIN, Activations, Form, FusedOps, Result, addresses
from baton.model.weights.quantized import Unscaled

_ELEMENTS_OF_A_THREAD = 16384
_SIX, _SEVEN = struct.Struct("=6q"), struct.Struct("=7q")


class NumbaOps(FusedOps):
    """For contiguous tensors of one dtype, bfloat16 or float32, on a CPU."""

    def __init__(self, dtype: torch.dtype, int8: bool = False) -> None:
        super().__init__(int8)
        self._kind = "pairs" if dtype == torch.bfloat16 else "singles"
        self._task = np.zeros(TASK_BYTES // 8, np.int64)
        self._address = address_of(self._task)
        self._fields = memoryview(self._task)  # type: ignore[arg-type]
        self._eps = self._task.view(np.float32)[NORM_EPS // 4 :]
        self._scratch = np.empty(0, np.uint8)

    def add_norm(
        self,
        x: Tensor,
        y: Result | None,
        weight: Tensor | None,
        eps: float,
        form: Form | None = None,
        plus: float = 0.0,
        factor: float = 1.0,
    ) -> Activations:
        if weight is None or plus or factor != 1:  # no kernel
            return super().add_norm(x, y, weight, eps, form, plus, factor)
        self._eps[0] = eps
        rows, n = x.shape
        return self._run("add_norm", x, y, weight, rows, n, form or self.form)

    def gated_mul(
        self, gate_up: Result, form: Form | None = None, activation: Activation = "silu"
    ) -> Activations:
        if activation != "silu":  # no kernel
            return super().gated_mul(gate_up, form, activation)
        values = gate_up.values if isinstance(gate_up, Unscaled) else gate_up
        n = values.shape[1] // 2
        return self._run("silu_mul", values, gate_up, None, values.shape[0], n, form or self.form)

    def quantize(self, x: Tensor, form: Form | None = None) -> Activations:
        form = form or self.form
        if form.kind != "int8":
            return super().quantize(x, form)
        rows, n = x.shape
        return self._run("quantize", x.contiguous(), None, None, rows, n, form)

    def _run(
        self, name: str, x: Tensor, y: Result | None, weight: Tensor | None, rows: int, n: int, form: Form
    ) -> Activations:
        if form.kind == "groups":  # has no kernel of its own
            found = self._run(name, x, y, weight, rows, n, PLAIN)
            assert isinstance(found, Tensor)
            return super().quantize(found, form)
        threads = min(1 + rows * n // _ELEMENTS_OF_A_THREAD, torch.get_num_threads())
        room = threads * (n + 16) * 4 + 64
        if self._scratch.nbytes < room:
            self._scratch = np.zeros(room, np.uint8)
        out = self._result(x, rows, n, form)
        weights, _ = addresses(weight)
        _SIX.pack_into(self._fields, NEXT, 0, 0, rows, 0, address_of(self._scratch), 0)
        _SEVEN.pack_into(self._fields, X, x.data_ptr(), *addresses(y), weights, *addresses(out), n)
        run_task(kernel(f"{name}_{self._kind}").address, self._address, threads)
        return out
