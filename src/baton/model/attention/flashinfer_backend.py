"""Paged attention on a CUDA device by FlashInfer's kernels; Baton's own store keys and values.

Theory.  A layer of the pool, `pool[:, layer, 0 | 1]`, is [blocks, KV heads, position, element] with the
strides of the whole pool: FlashInfer's layout HND.  Its kernels take the strides as they are, the same for
keys and values, so nothing is copied, and pages are handed over as with the other backends.

A *wrapper* of FlashInfer is used in two steps: `plan` looks at how long each row is, on the host, and cuts
contexts into parts for all multiprocessors; `run` computes one layer.  For each window decode rows have a
wrapper, and other rows have another; all share one workspace, because one step runs at a time.  `plan`
copies to the device and writes pinned memory that it has copied from before, so it belongs to the device's
half of a step (`executor.streams.queue`): it runs before the first layer that needs it, behind the last
plan's copy, for which an event is waited; that copy stands at the front of the step before.

Of a layer with a window only pages from the first that is seen on are listed: positions count from there,
which shifts queries and keys alike.

*Graphs.*  A wrapper for graphs has a fixed number of rows and buffers of its own; what `run` launches is the
same whatever was planned, and reads what `plan` left in the buffers.  So a graph has wrappers of its own, and
is planned before each replay (`before_replay`).  Rows that a batch has not see the first position of block 0.

Parts are cut as the whole batch needs it, so a row's bits depend on the batch: `--deterministic` is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.model.attention.base import AttentionShape, AttentionStep, Int32Array, Upload
from baton.model.attention.triton_backend import TritonAttention
from baton.model.ops import flashinfer

WORKSPACE_BYTES: Final = 512 << 20
"""For the parts of all rows; as much as `executor.devices.graphs` lets a graph's splits be."""
_GRAPH_BYTES: Final = 1 << 20
"""Of a graph's plan, on the device and pinned: some 100 bytes a row; by itself a wrapper takes 8 MiB."""
_TILE: Final = 16
"""Query heads that a program of decode rows computes at a time."""
_GROUP_OF_TENSOR_CORES: Final = 4
"""From so many query heads a KV head on decode rows are computed by the kernels for chunks, whose products of
matrices they fill; there are none of the other kind for some numbers of heads."""
_LAYOUT: Final = "HND"
_KERNELS: Final = "fa2"
"""Of the kinds that FlashInfer has: any device from 8.0 on, any strides, windows and soft-caps."""


class Library(Protocol):
    """What is used of the package `flashinfer`."""

    BatchDecodeWithPagedKVCacheWrapper: Callable[..., Any]
    BatchPrefillWithPagedKVCacheWrapper: Callable[..., Any]


def library() -> Library:
    """The package; importing it takes seconds."""
    import flashinfer as package

    found: Library = package
    return found


@dataclass(frozen=True)
class PageLists:
    """The pages of rows, one after the other."""

    indptr: Int32Array
    """[R + 1] row r has the pages [indptr[r], indptr[r + 1])"""
    indices: Int32Array
    """[indptr[R]] blocks"""
    last: Int32Array
    """[R] positions in the last page of each, 1 to the block size"""


def page_lists(
    starts: npt.NDArray[Any],
    counts: npt.NDArray[Any],
    tables: npt.NDArray[Any],
    size: int,
    window: int | None,
    rows: int = 0,
) -> PageLists:
    """Of [R] rows with [R, W] block tables, whose last `counts` positions are a step's; up to `rows` further
    ones have the first position of block 0."""
    ends = starts.astype(np.int64) + counts
    firsts = np.zeros_like(ends)
    if window is not None:
        firsts = np.maximum(starts.astype(np.int64) - (window - 1), 0) // size
    pages = -(-ends // size) - firsts
    row = np.repeat(np.arange(len(pages)), pages)
    column = np.arange(len(row)) - (np.cumsum(pages) - pages)[row] + firsts[row]
    more = max(rows - len(pages), 0)
    return PageLists(
        np.concatenate(([0], np.cumsum(np.concatenate((pages, np.ones(more, np.int64)))))).astype(np.int32),
        np.concatenate((tables[row, column], np.zeros(more, tables.dtype))).astype(np.int32),
        np.concatenate(((ends - 1) % size + 1, np.ones(more, np.int64))).astype(np.int32),
    )


class _Wrapper:
    """One of FlashInfer, and what it was planned for last."""

    def __init__(self, made: Any, device: torch.device) -> None:
        self._made, self._device = made, device
        self._copied: Any = None
        self._planned: object = None

    def plan(self, of: object, arguments: dict[str, Any]) -> None:
        """Unless it was planned for `of` last."""
        if self._planned is of:
            return
        if self._copied is not None:
            self._copied.synchronize()
        self._made.plan(**arguments)
        if self._device.type == "cuda":
            self._copied = self._copied or torch.cuda.Event()  # type: ignore[no-untyped-call,unused-ignore]
            self._copied.record()
        self._planned = of

    def run(self, queries: Tensor, layer: tuple[Tensor, Tensor], out: Tensor) -> None:
        """[n, heads, head_dim], also `out`"""
        self._made.run(queries, layer, out=out)


@dataclass(eq=False)
class _Part:
    """Rows that one wrapper computes."""

    wrapper: _Wrapper
    tokens: slice
    """Of the step's."""
    arguments: dict[str, Any] | None
    """Of `plan`; None: it was planned before."""

    def run(self, queries: Tensor, layer: tuple[Tensor, Tensor], out: Tensor) -> None:
        if self.arguments is not None:
            self.wrapper.plan(self, self.arguments)
        self.wrapper.run(queries[self.tokens], layer, out[self.tokens])


@dataclass(frozen=True)
class FlashInferPlan:
    """Of a step."""

    places: Tensor
    """[T] int64 on the device: block * block size + offset"""
    positions: Tensor
    """[T] int32 on the device"""
    parts: dict[int | None, list[_Part]] = field(default_factory=dict)
    """By window."""


@functools.cache
def _workspace(device: torch.device, size: int) -> Tensor:
    """Of all wrappers of a device.  (FlashInfer wants zeros at first.)"""
    return torch.zeros(size, dtype=torch.uint8, device=device)


class FlashInferAttention(TritonAttention):
    """For what `ops.flashinfer.why_not` has no reason against, where Triton serves."""

    def __init__(
        self, shape: AttentionShape, library: Library, workspace_bytes: int = WORKSPACE_BYTES
    ) -> None:
        super().__init__(shape)
        self._library = library
        self._workspace = _workspace(shape.device, workspace_bytes)
        self._group = shape.num_heads // shape.num_kv_heads
        self._matrices = self._group >= _GROUP_OF_TENSOR_CORES
        self._layers: list[tuple[Tensor, Tensor]] = []
        self._decodes = {window: self._wrapper(self._decode_wrapper()) for window in shape.windows}
        self._chunks = {window: self._wrapper(self._chunk_wrapper()) for window in shape.windows}
        self._of_graphs: dict[tuple[int, int], dict[int | None, _Wrapper]] = {}

    @property
    def kernel_name(self) -> str:
        return f"FlashInfer {flashinfer.installed()}"

    def bind(self, pool: Tensor) -> None:
        super().bind(pool)
        self._layers = [(pool[:, layer, 0], pool[:, layer, 1]) for layer in range(self.shape.num_layers)]

    # Wrappers

    def _wrapper(self, made: Any) -> _Wrapper:
        return _Wrapper(made, self.shape.device)

    def _decode_wrapper(self, **fixed: Any) -> Any:
        return self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, _LAYOUT, use_tensor_cores=self._matrices, backend=_KERNELS, **fixed
        )

    def _chunk_wrapper(self) -> Any:
        return self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, _LAYOUT, backend=_KERNELS)

    def _graph_wrapper(self, rows: int, width: int) -> _Wrapper:
        def zeros(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=self.shape.device)

        made = self._decode_wrapper(
            use_cuda_graph=True,
            paged_kv_indptr_buffer=zeros(rows + 1),
            paged_kv_indices_buffer=zeros(rows * width),
            paged_kv_last_page_len_buffer=zeros(rows),
        )
        made.reset_workspace_buffer(
            self._workspace, torch.empty(_GRAPH_BYTES, dtype=torch.uint8, device=self.shape.device)
        )
        return self._wrapper(made)

    # Once a step

    def prepare(self, step: AttentionStep) -> FlashInferPlan:
        plan = FlashInferPlan(*self._written(step))
        decodes, rows = step.num_decodes, len(step.counts)
        kinds = ((0, decodes, self._decodes), (decodes, rows, self._chunks))
        for window in self.shape.windows:
            parts = []
            for first, stop, wrappers in kinds:
                if first == stop:
                    continue
                counts = step.counts[first:stop]
                lists = self._lists(step.starts[first:stop], counts, step.block_tables[first:stop], window)
                indices = self._tensor(lists.indices)
                given = self._arguments(window, lists, indices)
                if wrappers is self._chunks:
                    given = self._of_chunks(given, counts)
                tokens = slice(0, decodes) if wrappers is self._decodes else slice(decodes, None)
                parts.append(_Part(wrappers[window], tokens, given))
            plan.parts[window] = parts
        return plan

    def _lists(
        self, starts: Int32Array, counts: Int32Array, tables: Int32Array, window: int | None
    ) -> PageLists:
        return page_lists(starts, counts, tables, self.shape.block_size, window)

    def _arguments(self, window: int | None, lists: PageLists, indices: Tensor) -> dict[str, Any]:
        """Of a plan of decode rows.  Lengths stay on the host, which reads them, pages are on the device."""
        shape = self.shape
        return {
            "indptr": torch.from_numpy(lists.indptr),
            "indices": indices,
            "last_page_len": torch.from_numpy(lists.last),
            "num_qo_heads": shape.num_heads,
            "num_kv_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "page_size": shape.block_size,
            "window_left": -1 if window is None else window - 1,
            "logits_soft_cap": shape.soft_cap,
            "q_data_type": shape.dtype,
            "kv_data_type": shape.dtype,
            "sm_scale": shape.scale,
            "non_blocking": True,
        }

    def _of_chunks(self, given: dict[str, Any], counts: Int32Array) -> dict[str, Any]:
        names = {
            "indptr": "paged_kv_indptr",
            "indices": "paged_kv_indices",
            "last_page_len": "paged_kv_last_page_len",
            "head_dim": "head_dim_qk",
        }
        first = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        renamed = {names.get(name, name): value for name, value in given.items()}
        return {**renamed, "qo_indptr": torch.from_numpy(first), "causal": True}

    # Graphs

    def plan_of_decodes(
        self, places: Tensor, positions: Tensor, tables: Tensor, items: Tensor, longest: int
    ) -> FlashInferPlan:
        wrappers = self._of_graphs[tables.shape[0], tables.shape[1]]
        everything = slice(0, None)
        parts = {window: [_Part(wrapper, everything, None)] for window, wrapper in wrappers.items()}
        return FlashInferPlan(places, positions, parts)

    def before_replay(
        self, rows: int, width: int, step: AttentionStep, upload: Upload
    ) -> Callable[[], None] | None:
        wrappers = self._of_graphs.get((rows, width))
        if wrappers is None:
            wrappers = {window: self._graph_wrapper(rows, width) for window in self.shape.windows}
            self._of_graphs[rows, width] = wrappers
        planned = []
        for window, wrapper in wrappers.items():
            lists = page_lists(
                step.starts, step.counts, step.block_tables, self.shape.block_size, window, rows
            )
            planned.append((wrapper, self._arguments(window, lists, upload(lists.indices))))

        def replan() -> None:
            for wrapper, arguments in planned:
                wrapper.plan(planned, arguments)

        return replan

    def splits_of(self, longest: int) -> int:
        """Rows are cut until all multiprocessors have something to do: a row has a tile of query heads, and
        those of a group fill a part of another."""
        return _TILE + self._group

    # For each layer

    def attend(
        self, layer: int, queries: Tensor, window: int | None, plan: Any, sinks: Tensor | None = None
    ) -> Tensor:
        if sinks is not None:
            raise ValueError("FlashInfer's kernels for paged KV have no sinks")
        out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        for part in plan.parts[window]:
            part.run(queries, self._layers[layer], out)
        return out.flatten(1)
