"""Attention's kernels in C++ (native/attention.cpp, native/kv_write.cpp), as `kernels` asks for them."""

from __future__ import annotations

import ctypes

import numpy as np
from torch import Tensor

from baton.model.cpu.kernels import HeadNorms, KernelShape, Reads, Runs, address_of
from baton.model.cpu.library import INT, POINTER, Native


class _Geometry(ctypes.Structure):
    """`Geometry` of native/tiles.h."""

    _fields_ = (
        ("is_bf16", INT),
        ("num_heads", INT),
        ("num_kv_heads", INT),
        ("dim", INT),
        ("block", INT),
        ("block_stride", INT),
        ("scale", ctypes.c_double),
        ("piece_blocks", INT),
        ("kv_int8", INT),
        ("soft_cap", ctypes.c_double),
    )


class _Turn(ctypes.Structure):
    """`Turn` of native/tiles.h."""

    _fields_ = (
        ("cos", POINTER),
        ("sin", POINTER),
        ("stride", INT),
        ("query_norm", POINTER),
        ("key_norm", POINTER),
        ("eps", ctypes.c_double),
        ("plus", ctypes.c_double),
        ("query_factors", POINTER),
    )


class NativeKernels:
    """See `kernels.Kernels`."""

    def __init__(self, shape: KernelShape, library: Native) -> None:
        self.name = f"C++ {library.instruction_set}"
        self._shape = shape
        self._geometry = _Geometry(
            shape.bfloat16,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.block_size,
            shape.block_stride,
            shape.scale,
            shape.piece_blocks,
            shape.kv_int8,
            shape.soft_cap,
        )
        self.geometry_address = ctypes.addressof(self._geometry)
        self._write = library.function("write", POINTER, POINTER, POINTER, INT, POINTER, INT, POINTER, INT)
        self._turn = _Turn()
        self._rotate = library.function("rotate_and_write", *[POINTER] * 6, INT)
        self._attend = library.function(
            "attend", *[POINTER] * 3, INT, POINTER, POINTER, INT, POINTER, INT, INT, *[POINTER] * 3
        )
        self._grow(0)

    def _grow(self, slots: int) -> None:
        """Room for partial results; see `attend` in native/attention.cpp."""
        shape = self._shape
        self._slots = slots
        self._partials = np.empty(
            (slots, shape.num_heads, shape.tile_positions, shape.head_dim + 2), np.float32
        )
        self._finished = np.zeros((slots, shape.num_heads), np.int32)
        self._addresses = address_of(self._partials), address_of(self._finished)

    def turns(self, norms: HeadNorms | None, grows: bool) -> bool:
        return True

    def write(self, layer: int, keys: Tensor, values: Tensor, runs: Runs) -> None:
        self._write(
            self.geometry_address,
            layer,
            keys.data_ptr(),
            keys.stride(0),
            values.data_ptr(),
            values.stride(0),
            runs.address,
            len(runs.runs),
        )

    def rotate_and_write(
        self,
        layer: int,
        qkv: Tensor,
        queries: Tensor,
        cos: Tensor,
        sin: Tensor,
        growth: Tensor | None,
        norms: HeadNorms | None,
        runs: Runs,
    ) -> None:
        turn = self._turn
        turn.cos, turn.sin, turn.stride = cos.data_ptr(), sin.data_ptr(), cos.stride(0)
        turn.query_factors = None if growth is None else growth.data_ptr()
        turn.query_norm = None if norms is None else norms.queries.data_ptr()
        turn.key_norm = None if norms is None else norms.keys.data_ptr()
        if norms is not None:
            turn.eps, turn.plus = norms.eps, norms.plus
        self._rotate(
            self.geometry_address,
            layer,
            qkv.data_ptr(),
            queries.data_ptr(),
            ctypes.addressof(turn),
            runs.address,
            len(runs.runs),
        )

    def room_for(self, slots: int) -> tuple[int, int]:
        """Addresses of `partials` and `finished` for so many slots; valid until more are asked for."""
        if slots > self._slots:
            self._grow(2 * slots)
        return self._addresses

    def attend(
        self, layer: int, queries: Tensor, out: Tensor, reads: Reads, sinks: Tensor | None = None
    ) -> None:
        self._attend(
            self.geometry_address,
            layer,
            queries.data_ptr(),
            queries.stride(0),
            out.data_ptr(),
            reads.items_address,
            len(reads.items),
            reads.tables_address,
            reads.tables.shape[1],
            reads.window,
            None if sinks is None else sinks.data_ptr(),
            *self.room_for(reads.slots),
        )
