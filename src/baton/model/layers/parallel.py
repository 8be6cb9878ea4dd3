"""Tensor parallelism as an object that is passed in: which rank am I, and how do ranks add up.

Theory.  With TP = n every rank holds 1/n of each matrix and of the attention heads, and all hold the
same activations.  A layer meets twice: after the attention's output projection and after the MLP's down
projection each rank has a partial sum, which `all_reduce` completes.  The vocabulary is cut too: an
embedding is complete after a sum, and logits are gathered on rank 0, which alone samples; the sampled
tokens are broadcast.

A group belongs to the object that made it: no default process group, no environment variables, so that
several may live in one process (as in tests).  On a CPU it is memory that the ranks of one host share
(`shared_ranks.py`); where they cannot, and between hosts, it is gloo, bound to the loopback address, or to
the one that the other hosts reach.  Every collective ends within the group's timeout, with an error that
names it.  (NCCL's in a CUDA graph have no timeout of their own: the engine fails an instance from which it
hears nothing for `--step-timeout`.)
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from baton.model.layers.meeting import MeetingStore
from baton.model.layers.shared_ranks import SharedRanks, sum_in_order

log = logging.getLogger(__name__)


class TensorParallel:
    """Rank `rank` of `size`.  With size 1 every method returns at once and needs no group."""

    def __init__(
        self, rank: int = 0, size: int = 1, group: Any = None, shared: SharedRanks | None = None
    ) -> None:
        """`group`: of `torch.distributed`; not needed with `shared`."""
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank}: must be from 0 to tensor_parallel_size - 1 = {size - 1}")
        if size > 1 and group is None and shared is None:
            raise ValueError(f"tensor_parallel_size {size} needs a process group")
        self.rank = rank
        self.size = size
        self._group = group
        self._shared = shared

    @classmethod
    def connect(
        cls,
        rank: int,
        size: int,
        rendezvous: str,
        device: str,
        timeout_s: float,
        host: str = "127.0.0.1",
    ) -> TensorParallel:
        """Meets the other ranks in the file `rendezvous`, or, with ranks on several hosts, through the socket
        `fd:N`.  Waits for them for at most `timeout_s`.  `host`: at which address they reach this rank."""
        if size == 1:
            return cls()
        timeout = timedelta(seconds=timeout_s)
        store: Any
        if rendezvous.startswith("fd:"):
            store = MeetingStore(int(rendezvous.removeprefix("fd:")), timeout_s)
        else:
            store = dist.FileStore(rendezvous, size)  # type: ignore[attr-defined]
            store.set_timeout(timeout)
        if device == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            return cls(rank, size, dist.ProcessGroupNCCL(store, rank, size, options))
        if not rendezvous.startswith("fd:"):
            shared = SharedRanks.connect(store, rank, size, timeout_s)
            if shared is not None:
                return cls(rank, size, shared=shared)
            log.info(
                "rank %d meets the others by TCP: it cannot map their memory, or has no native library", rank
            )
        gloo: Any = dist.ProcessGroupGloo  # type: ignore[attr-defined,unused-ignore]
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=host)]
        options._timeout = timeout
        return cls(rank, size, gloo(store, rank, size, options))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sums `tensor` over the ranks, in place, and returns it."""
        if self._shared is not None:
            return self._shared.all_reduce(tensor)
        if self.size == 2 or (self.size > 1 and tensor.device.type != "cpu"):
            self._group.allreduce([tensor]).wait()
        elif self.size > 1:
            # Gloo adds up in an order that depends on where in the tensor an element is.
            parts = [torch.empty_like(tensor) for _ in range(self.size)]
            self._group.allgather([parts], [tensor]).wait()
            sum_in_order(parts, tensor)
        return tensor

    def gather_columns(self, tensor: Tensor) -> Tensor | None:
        """[rows, n] on each rank → [rows, size * n] on rank 0, in rank order; None on the others."""
        if self.size == 1:
            return tensor
        if self._shared is not None:
            return self._shared.gather_columns(tensor)
        options = dist.GatherOptions()
        options.rootRank = 0
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)] if self.rank == 0 else []
        self._group.gather([parts] if parts else [], [tensor], options).wait()
        return torch.cat(parts, dim=-1) if parts else None

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Overwrites `tensor` with rank 0's and returns it."""
        if self._shared is not None:
            return self._shared.broadcast(tensor)
        if self.size > 1:
            self._group.broadcast([tensor], dist.BroadcastOptions()).wait()
        return tensor

    def minimum(self, value: int, device: str = "cpu") -> int:
        """The smallest `value` of any rank."""
        if self.size == 1:
            return value
        return int(self.lowest(torch.tensor([value], dtype=torch.int64, device=device)).item())

    def lowest(self, tensor: Tensor) -> Tensor:
        """Makes each element of `tensor` the smallest of any rank's, in place, and returns it."""
        if self._shared is not None:
            return self._shared.lowest(tensor)
        if self.size > 1:
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.MIN  # type: ignore[assignment]
            self._group.allreduce([tensor], options).wait()
        return tensor

    def close(self) -> None:
        if self._shared is not None:
            self._shared.close()
        group, self._group = self._group, None
        if group is not None and hasattr(group, "shutdown"):
            group.shutdown()
