"""Which KV heads a tensor-parallel rank holds: known to the model, the KV pool and the transfer of pages."""

from __future__ import annotations


def heads_of_rank(total: int, rank: int, size: int) -> tuple[int, int]:
    """[first, stop) of `total` KV heads at rank `rank` of `size`.

    One of `total` and `size` divides the other; with fewer heads than ranks, several ranks hold the same.
    """
    if total >= size:
        return rank * (total // size), (rank + 1) * (total // size)
    head = rank * total // size
    return head, head + 1
