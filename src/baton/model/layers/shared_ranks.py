"""Ranks of one host add up in memory that they share.

Theory.  Each rank has two *slots* in one memfd, which it uses in turn.  To add up, a rank copies its part
into a slot, waits at a *barrier* until all ranks have done so (`model/cpu/native/ranks.cpp`), and reads the
others' slots.  It writes the same slot again behind the other one's barrier: a rank that has come to that has
read all that it needs of the first.  What is larger than a slot goes in pieces.

Every rank computes the same sums in the order of ranks, so all have the same bits, whatever is summed beside
them.  Two ranks each read everything.  With more ranks and many numbers each adds up a part, in a slot, and
reads the other parts' sums behind a second barrier: else each would read all parts of all.

A rank waits actively for a moment (BATON_SPIN_US, giving its core to others that want it), then it sleeps,
and looks up each `_LOOK_NS`: so signals are handled, and a rank that has died is noticed.  Between sums
nothing wakes up.  Processes that cannot map each other's memory, or have no native library, have gloo instead
(`parallel.py`).
"""

from __future__ import annotations

import mmap
import os
import select
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from baton.ipc.memory import create_memory
from baton.ipc.processes.process import open_pidfd
from baton.ipc.ticket import PeerDied
from baton.model.cpu.library import rank_functions

_SLOT = 1 << 20
"""Bytes: pieces stay in caches."""
_LINE = 64
_AT_ONCE = 1 << 16
"""Bytes that one call adds up, and more ranks than two behind one barrier."""
_SUM, _SUMS_OF_PARTS, _LOWEST, _BROADCAST, _GATHER = (kind << 40 for kind in range(1, 6))
"""What ranks come to a barrier for; and the piece's size."""
_LOOK_NS = 50_000_000
_SPIN_NS = int(os.environ.get("BATON_SPIN_US") or 200) * 1000


class SharedRanks:
    """Rank `rank`'s end of the memory.  Its methods are collectives: all ranks call the same in the same
    order, with tensors of the same sizes, each from one thread.

    They raise `PeerDied` if a rank has died, and `RuntimeError`, as process groups do, which names a rank
    that did not come within `timeout_s`, or that came for something else.
    """

    @classmethod
    def connect(cls, store: Any, rank: int, size: int, timeout_s: float) -> SharedRanks | None:
        """Meets the others through `store` (of `torch.distributed`); None, on all ranks, if one cannot."""
        memory = -1
        try:
            if rank == 0 and rank_functions() is not None:
                memory = create_memory("baton-ranks", size * (_LINE + 2 * _SLOT))
            if rank == 0:
                store.set("memory", f"/proc/{os.getpid()}/fd/{memory}" if memory >= 0 else "-")
            shared = cls._open(store.get("memory").decode(), rank, size, timeout_s)
            store.set(f"process {rank}", str(os.getpid()) if shared is not None else "-")
            processes = [store.get(f"process {other}").decode() for other in range(size)]
        finally:
            if memory >= 0:
                os.close(memory)  # (all have mapped it)
        if shared is None or "-" in processes:
            return None
        shared._watch(processes)
        return shared

    @classmethod
    def _open(cls, path: str, rank: int, size: int, timeout_s: float) -> SharedRanks | None:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            return cls(descriptor, rank, size, timeout_s) if rank_functions() is not None else None
        finally:
            os.close(descriptor)

    def __init__(self, memory: int, rank: int, size: int, timeout_s: float) -> None:
        """`memory`: a memfd of `size` lines and twice as many slots; it stays the caller's."""
        functions = rank_functions()
        assert functions is not None
        self._functions = functions
        self._rank = rank
        self._size = size
        self._timeout_s = timeout_s
        self._bytes = torch.frombuffer(mmap.mmap(memory, os.fstat(memory).st_size), dtype=torch.uint8)
        self._lines = self._bytes.data_ptr()
        self._first_slots = [self._lines + size * (_LINE + turn * _SLOT) for turn in range(2)]
        """Addresses, of even and of odd turns."""
        self._number = 0
        self._turn = 0
        self._slots: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        """Each rank's, of even and of odd turns."""
        self._peers: dict[int, int] = {}
        """pidfds of the others."""

    def _watch(self, processes: list[str]) -> None:
        for rank, process in enumerate(processes):
            if rank != self._rank:
                self._peers[rank] = open_pidfd(int(process))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sums a contiguous `tensor` over the ranks, in place, and returns it."""
        count, bfloat16 = tensor.numel(), tensor.dtype is torch.bfloat16
        if count * tensor.element_size() > _AT_ONCE or not (bfloat16 or tensor.dtype is torch.float32):
            return self._all_reduce_in_pieces(tensor)
        assert tensor.is_contiguous()
        if count:
            slots = self._first_slots[self._turn % 2]
            self._turn += 1
            given = tensor.data_ptr(), count, bfloat16, slots, _SLOT
            self._wait(self._functions.all_reduce, _SUM | count * tensor.element_size(), *given)
        return tensor

    @torch.inference_mode()  # (to which the caller's tensors may belong)
    def _all_reduce_in_pieces(self, tensor: Tensor) -> Tensor:
        flat = tensor.view(-1)
        length = _SLOT // tensor.element_size()
        for begin in range(0, len(flat), length):
            self._add_up(flat[begin : begin + length])
        return tensor

    def _add_up(self, piece: Tensor) -> None:
        slots = self._come(_SUM, piece)
        count = len(piece)
        if self._size == 2 or count * piece.element_size() <= _AT_ONCE:
            sum_in_order([slot[:count] for slot in slots], piece)
            return
        length = -(-count // self._size)
        parts = [slice(rank * length, min((rank + 1) * length, count)) for rank in range(self._size)]
        own = parts[self._rank]
        sum_in_order([slot[own] for slot in slots], piece[own])
        slots[self._rank][own].copy_(piece[own])  # (nobody else has read this part)
        self._wait(self._functions.barrier, _SUMS_OF_PARTS | count)
        for slot, part in zip(slots, parts, strict=True):
            piece[part].copy_(slot[part])

    @torch.inference_mode()
    def lowest(self, tensor: Tensor) -> Tensor:
        """Makes each element of a contiguous `tensor`, of a slot at most, the smallest of any rank's."""
        flat = tensor.view(-1)
        for slot in self._come(_LOWEST, flat):
            torch.minimum(flat, slot[: len(flat)], out=flat)
        return tensor

    @torch.inference_mode()
    def broadcast(self, tensor: Tensor) -> Tensor:
        """Overwrites a contiguous `tensor` with rank 0's and returns it."""
        flat = tensor.view(-1)
        length = _SLOT // tensor.element_size()
        for begin in range(0, len(flat), length):
            piece = flat[begin : begin + length]
            piece.copy_(self._come(_BROADCAST, piece)[0][: len(piece)])
        return tensor

    @torch.inference_mode()
    def gather_columns(self, tensor: Tensor) -> Tensor | None:
        """[rows, n] on each rank → [rows, size * n] on rank 0, in rank order; None on the others."""
        rows, width = tensor.shape
        length = _SLOT // tensor.element_size()
        columns = min(width, length)
        step = max(length // columns, 1)
        whole = tensor.new_empty(rows, self._size * width) if self._rank == 0 else None
        for row in range(0, rows, step):
            for column in range(0, width, columns):
                piece = tensor[row : row + step, column : column + columns]
                slots = self._come(_GATHER, piece, gives=whole is None)
                if whole is None:
                    continue
                for rank, slot in enumerate(slots):
                    first = rank * width + column
                    there = whole[row : row + step, first : first + piece.shape[1]]
                    there.copy_(slot[: piece.numel()].view(piece.shape) if rank else piece)
        return whole

    def _come(self, kind: int, piece: Tensor, gives: bool = True) -> list[Tensor]:
        """Each rank's slot, in which its piece is, if it `gives` it: to be read before this rank comes
        again."""
        if piece.dtype not in self._slots:
            self._slots[piece.dtype] = self._views(piece.dtype)
        slots = self._slots[piece.dtype][self._turn % 2]
        self._turn += 1
        if gives:
            slots[self._rank][: piece.numel()].view(piece.shape).copy_(piece)
        self._wait(self._functions.barrier, kind | piece.numel() * piece.element_size())
        return slots

    def _views(self, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        first = self._size * _LINE
        every = self._bytes[first:].view(2, self._size, _SLOT).view(dtype)
        return list(every[0]), list(every[1])

    def _wait(self, function: Callable[..., int], what: int, *arguments: int) -> None:
        """Until all have come to the next barrier, which is in `function`, for the same."""
        self._number += 1
        place = self._lines, self._rank, self._size, self._number, what
        found = function(*place, _SPIN_NS, _LOOK_NS, *arguments)
        if found == -1:
            return
        until = time.monotonic() + self._timeout_s
        while found >= 0:
            self._look_after(found, until)
            found = function(*place, 0, _LOOK_NS, *arguments)
        if found != -1:
            raise RuntimeError(
                f"rank {-2 - found} computes something else than rank {self._rank}: ranks must compute the "
                "same things in the same order"
            )

    def _look_after(self, missing: int, until: float) -> None:
        poll = select.poll()
        for descriptor in self._peers.values():
            poll.register(descriptor, select.POLLIN)
        ended = {descriptor for descriptor, _ in poll.poll(0)}
        for rank, descriptor in self._peers.items():
            if descriptor in ended:
                raise PeerDied(f"process of rank {rank}", "its part of a sum")
        if time.monotonic() >= until:
            raise RuntimeError(
                f"rank {missing} did not come to what the ranks compute together within {self._timeout_s:g} s"
            )

    def close(self) -> None:
        """Unmaps the memory; a second call does nothing."""
        for descriptor in self._peers.values():
            os.close(descriptor)
        self._peers.clear()
        self._slots.clear()
        self._bytes = torch.empty(0, dtype=torch.uint8)


def sum_in_order(parts: Sequence[Tensor], out: Tensor) -> None:
    """Of two ranks' parts or more, in the order of ranks."""
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out.add_(part)
