"""Memory of its own for a large tensor: it goes back to the system when the tensor does; in huge pages.

Theory.  A large block on the heap leaves a hole when it is freed.  The next small thing lies down in it,
and the next large one needs new room: buffers that a loader fills, one after the other, come to take half
as much as the model.  A mapping leaves no hole.  And it can begin where a huge page does.  The heap's
blocks do not, and of these the kernel gives huge pages, if it is asked, only to what lies between two such
places.  A core reads weights some per cent faster from huge pages.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor

from baton.ipc.huge_pages import HUGE_PAGE


def own_memory(elements: int, dtype: torch.dtype) -> Tensor:
    """[elements] on the CPU, zero.  What fills huge pages is in huge pages, if the system has them."""
    size = elements * dtype.itemsize
    if not size:
        return torch.empty(elements, dtype=dtype)
    whole = size // HUGE_PAGE * HUGE_PAGE
    # Larger by a huge page, so that one can begin in it; what nobody touches is not in memory.
    mapping = mmap.mmap(-1, size + (HUGE_PAGE if whole else 0), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = 0
    if whole:
        start = -torch.frombuffer(mapping, dtype=torch.uint8).data_ptr() % HUGE_PAGE
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):
                mapping.madvise(mmap.MADV_HUGEPAGE, start, whole)
    return torch.frombuffer(mapping, dtype=dtype, count=elements, offset=start)
