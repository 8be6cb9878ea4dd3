"""A step's layers as one native call: `native/program.cpp`, which tells why; here is what it works on.

The model is described once, when it has been loaded: addresses of packed weights and of everything else that
stays.  A step adds its tokens and rows, and room for what is computed.  Room is kept from step to step,
and so are the tensors that results are handed out in: they are overwritten by the next step.

A program holds addresses of weights, not the weights: when others are loaded another one must be made.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.model.attention import AttentionStep, CpuAttention
from baton.model.cpu.experts import MixtureTwin
from baton.model.cpu.kernels import address_of
from baton.model.cpu.library import INT, POINTER, Native, native
from baton.model.cpu.native_kernels import NativeKernels
from baton.model.cpu.products import ProductTwin, twin_of
from baton.model.decoder.blocks import Block
from baton.model.decoder.coverage import MAX_ROTARIES, MAX_WINDOWS, Whole, in_pytorch, products, why_apart
from baton.model.decoder.mixture import MLP, Mixture
from baton.model.layers.layers import RMSNorm
from baton.model.ops.fused import ACTIVATIONS

OPERATIONS = (
    "embedding",
    "add norm",
    "product qkv",
    "attention",
    "quantize",
    "product o",
    "product gate+up",
    "gate",
    "product down",
    "product head",
    "router",
    "gather",
    "experts gate+up",
    "experts gate",
    "experts down",
    "experts sum",
)
"""`Operation` of native/program.cpp."""

Int32Array = npt.NDArray[np.int32]


class _Layer(ctypes.Structure):
    _fields_ = (
        ("attention_norm", POINTER),
        ("qkv", ProductTwin),
        ("query_norm", POINTER),
        ("key_norm", POINTER),
        ("wide", INT),
        ("sinks", POINTER),
        ("output", ProductTwin),
        ("attention_out_norm", POINTER),
        ("mlp_norm", POINTER),
        ("mixture", POINTER),
        ("gate_up", ProductTwin),
        ("activation", INT),
        ("down", ProductTwin),
        ("mlp_out_norm", POINTER),
        ("window", INT),
        ("rotary", INT),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        ("is_bf16", INT),
        ("forms", INT),
        ("num_layers", INT),
        ("hidden", INT),
        ("intermediate", INT),
        ("eps", ctypes.c_double),
        ("plus", ctypes.c_double),
        ("residual", ctypes.c_double),
        ("embedding_factor", ctypes.c_double),
        ("logits_factor", ctypes.c_double),
        ("logits_cap", ctypes.c_double),
        ("geometry", POINTER),
        ("tile_positions", INT),
        ("num_windows", INT),
        ("windows", INT * MAX_WINDOWS),
        ("cos", POINTER * MAX_ROTARIES),
        ("sin", POINTER * MAX_ROTARIES),
        ("rotary_stride", INT),
        ("query_factors", POINTER),
        ("layers", POINTER),
        ("mixture", POINTER),
        ("embedding_groups", POINTER),
        ("embedding", POINTER),
        ("row_places", POINTER),
        ("column_places", POINTER),
        ("norm", POINTER),
        ("head", ProductTwin),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        ("tokens", INT),
        ("ids", POINTER),
        ("num_rows", INT),
        ("num_decodes", INT),
        ("starts", POINTER),
        ("counts", POINTER),
        ("tables", POINTER),
        ("table_stride", INT),
        ("pool", POINTER),
        ("arena", POINTER),
        ("wanted", POINTER),
        ("num_wanted", INT),
        ("whole", INT),
        ("logits", POINTER),
        ("chosen", POINTER),
        ("nanoseconds", POINTER),
        ("clock", INT),
        ("num_runs", INT),
        ("num_items", INT * MAX_WINDOWS),
        ("num_last_items", INT),
        ("slots", INT),
        ("partials", POINTER),
        ("finished", POINTER),
    )


_MOST_ROOMS = 64
"""Shapes of steps that are remembered."""


class Program:
    """Embedding, layers, last norm and head of a model that `program_of` took."""

    def __init__(self, library: Native, model: Whole, backend: CpuAttention, kernels: NativeKernels) -> None:
        self._run = library.function("run_program", POINTER, POINTER, INT, INT)
        self._plan = library.function("plan_step", POINTER, POINTER)
        self._bytes = library.function("step_bytes", POINTER, POINTER, POINTER)
        self._backend, self._kernels = backend, kernels
        config, dtype = model.config, model.norm.weight.dtype
        windows = list({block.attention.window: None for block in model.layers})
        self._mixtures = _mixtures(model)
        self._layers = (_Layer * len(model.layers))(
            *(
                _layer(block, windows.index(block.attention.window), self._mixtures.get(number))
                for number, block in enumerate(model.layers)
            )
        )
        self.chosen: Tensor | None = None
        """[mixtures, T, chosen] int32: the experts of each token, of the last step with `record_chosen`."""
        self.record_chosen = False
        """Then the last layer computes all tokens, as if the whole were wanted."""
        groups = model.embedding.groups_address
        embedding, row_places, column_places = (None,) * 3 if groups else model.embedding.addresses()
        self._model = _Model(
            is_bf16=dtype == torch.bfloat16,
            forms=functools.reduce(operator.or_, (1 << product.form.number for product in products(model))),
            num_layers=len(model.layers),
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            eps=config.norm_eps,
            plus=float(config.norm_plus_one),
            residual=config.residual_factor,
            embedding_factor=model.embedding_factor,
            logits_factor=config.logits_factor,
            logits_cap=config.logits_cap or 0.0,
            geometry=kernels.geometry_address,
            tile_positions=backend.tile_positions,
            num_windows=len(windows),
            windows=(INT * MAX_WINDOWS)(*(window or 0 for window in windows)),
            rotary_stride=model.rotaries[0].cos.stride(0),
            layers=ctypes.addressof(self._layers),
            mixture=next(map(ctypes.addressof, self._mixtures.values()), None),
            embedding_groups=groups,
            embedding=embedding,
            row_places=row_places,
            column_places=column_places,
            norm=model.norm.weight.data_ptr(),
            head=twin_of(model.head.product),
        )
        self._rotaries = model.rotaries
        self._reached = 0
        """Columns of block tables for whose positions there are angles."""
        self._last = len(model.layers) + 1
        self._hidden_size, self._vocab_size, self._dtype = config.hidden_size, config.vocab_size, dtype
        self._step = _Step()
        self._addresses = ctypes.addressof(self._model), ctypes.addressof(self._step)
        self._nanoseconds = (ctypes.c_int64 * len(OPERATIONS))()
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._logits_room = torch.empty(0)
        self._hidden = self._logits = self._logits_room
        self._shape = 0, 0, 0, 0
        """Of the step that there is room for now: tokens, rows, columns of tables, rows with logits."""
        self._rooms: dict[tuple[int, int, int, int], tuple[Tensor, Tensor]] = {}
        """By shape: its hidden states and logits, which lie in the room that there is."""

    def __call__(
        self,
        tokens: Int32Array,
        rows: AttentionStep,
        wanted: npt.NDArray[np.int64] | None,
        on_layers: Callable[[int], None] | None = None,
        whole: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """As `Decoder`.  What it returns is valid until the next call."""
        step, tables = self._step, rows.block_tables
        assert tokens.itemsize == tables.itemsize == rows.starts.itemsize == rows.counts.itemsize == 4
        if tables.strides[1] != tables.itemsize:
            tables = np.ascontiguousarray(tables)
        stride = tables.strides[0] // tables.itemsize
        shape = len(tokens), len(rows.starts), stride, len(tokens) if wanted is None else len(wanted)
        step.ids, step.tables = address_of(tokens), address_of(tables)
        step.starts, step.counts = address_of(rows.starts), address_of(rows.counts)
        step.num_decodes = rows.num_decodes
        step.whole = whole
        step.wanted = None if wanted is None else address_of(wanted)
        step.pool = self._backend.pool.data_ptr()
        if shape != self._shape:
            self._make_room(*shape)
        if tables.shape[1] > self._reached:
            self._reach(tables.shape[1])
        step.chosen = self._room_for_chosen(len(tokens)) if self.record_chosen and self._mixtures else None
        self._plan(*self._addresses)
        step.partials, step.finished = self._kernels.room_for(step.slots)
        if on_layers is None:
            self._run(*self._addresses, 0, self._last)
        else:
            for part in range(self._last):
                self._run(*self._addresses, part, part + 1)
                if part + 1 < self._last:
                    on_layers(part + 1)
        return self._hidden, self._logits

    def _room_for_chosen(self, tokens: int) -> int:
        experts = next(iter(self._mixtures.values())).experts
        self.chosen = torch.empty((len(self._mixtures), tokens, experts.chosen), dtype=torch.int32)
        return self.chosen.data_ptr()

    def measure(self, clock: int = time.CLOCK_MONOTONIC) -> None:
        """From now on, adds up what each operation takes, by a clock of `time`."""
        self._step.clock = clock
        self._step.nanoseconds = ctypes.addressof(self._nanoseconds)

    def take_nanoseconds(self) -> dict[str, int]:
        """Of each operation since `measure` or the last call of this."""
        found = dict(zip(OPERATIONS, self._nanoseconds, strict=True))
        if not self._mixtures:
            found = {name: found[name] for name in OPERATIONS[: OPERATIONS.index("router")]}
        ctypes.memset(self._nanoseconds, 0, ctypes.sizeof(self._nanoseconds))
        return found

    def _reach(self, columns: int) -> None:
        described = self._model
        for index, rotary in enumerate(self._rotaries):
            rotary.reach(columns * self._backend.shape.block_size)
            described.cos[index], described.sin[index] = rotary.cos.data_ptr(), rotary.sin.data_ptr()
        growth = self._rotaries[0].growth
        described.query_factors = None if growth is None else growth.data_ptr()
        self._reached = columns

    def _make_room(self, tokens: int, rows: int, stride: int, wanted: int) -> None:
        step = self._step
        step.tokens, step.num_rows, step.table_stride, step.num_wanted = tokens, rows, stride, wanted
        self._shape = tokens, rows, stride, wanted
        if (found := self._rooms.get(self._shape)) is None:
            if len(self._rooms) >= _MOST_ROOMS:
                self._rooms.clear()
            found = self._rooms[self._shape] = self._find_room(tokens, wanted)
        self._hidden, self._logits = found
        step.arena, step.logits = self._arena.data_ptr(), self._logits.data_ptr()

    def _find_room(self, tokens: int, wanted: int) -> tuple[Tensor, Tensor]:
        """Of the step whose shape was set: its hidden states and logits."""
        needed = ctypes.c_int64()
        self._step.arena = None
        self._bytes(*self._addresses, ctypes.addressof(needed))
        if needed.value > len(self._arena):
            self._rooms.clear()  # (the old arena goes before the new one comes)
            self._hidden = self._arena = torch.empty(0, dtype=torch.uint8)
            self._arena = torch.empty(needed.value, dtype=torch.uint8)
        if wanted * self._vocab_size > len(self._logits_room):
            self._rooms.clear()
            self._logits = self._logits_room = torch.empty(0)
            self._logits_room = torch.empty(wanted * self._vocab_size)
        logits = self._logits_room[: wanted * self._vocab_size].view(wanted, self._vocab_size)
        x = self._arena[: tokens * self._hidden_size * self._dtype.itemsize]
        return x.view(self._dtype).view(tokens, self._hidden_size), logits


def program_of(model: Whole) -> Program | None:
    """Where all of the model is native code, on one rank; None elsewhere."""
    library, backend = native(), model.backend
    if in_pytorch(model) or why_apart(model):
        return None
    assert library is not None
    assert isinstance(backend, CpuAttention)
    assert isinstance(backend.kernels, NativeKernels)
    return Program(library, model, backend, backend.kernels)


def _mixtures(model: Whole) -> dict[int, MixtureTwin]:
    """By layers."""
    found: dict[int, MixtureTwin] = {}
    for number, block in enumerate(model.layers):
        if isinstance(block.mlp, Mixture):
            native = block.mlp.native()
            assert native is not None
            found[number] = native.twin(len(found), block.mlp.shared is not None, block.mlp.tokens)
    return found


def _layer(block: Block, window: int, mixture: MixtureTwin | None) -> _Layer:
    attention = block.attention
    mlp = block.mlp if isinstance(block.mlp, MLP) else block.mlp.shared
    norms = attention.wide_norms or attention.head_norms
    return _Layer(
        attention_norm=_weight(block.attention_norm),
        qkv=twin_of(attention.qkv.product),
        query_norm=None if norms is None else norms.queries.data_ptr(),
        key_norm=None if norms is None else norms.keys.data_ptr(),
        wide=attention.wide_norms is not None,
        sinks=None if attention.sinks is None else attention.sinks.scores.data_ptr(),
        output=twin_of(attention.output.product),
        attention_out_norm=_weight(block.attention_result_norm),
        mlp_norm=_weight(block.mlp_norm),
        mixture=None if mixture is None else ctypes.addressof(mixture),
        gate_up=ProductTwin() if mlp is None else twin_of(mlp.gate_up.product),
        activation=0 if mlp is None else ACTIVATIONS.index(mlp.config.activation),
        down=ProductTwin() if mlp is None else twin_of(mlp.down.product),
        mlp_out_norm=_weight(block.mlp_result_norm),
        window=window,
        rotary=attention.rotary_index,
    )


def _weight(norm: RMSNorm | None) -> int | None:
    return None if norm is None else norm.weight.data_ptr()
