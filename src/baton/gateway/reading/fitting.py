"""The newest part of a conversation that the context has room for (`truncation: auto` of /v1/responses)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from baton.gateway.errors import ContextTooLong

Messages = Sequence[Mapping[str, Any]]


def fitting(messages: list[dict[str, Any]], fits: Callable[[list[dict[str, Any]]], bool]) -> None:
    """Leaves out the oldest messages, in place, until `fits`; what the first ones tell the model stays, the
    last one stays, and a tool's result is never without its call.  `fits` may raise `ContextTooLong` as well;
    it is asked a few times, as by halves."""

    def tried(some: list[dict[str, Any]]) -> bool:
        try:
            return fits(some)
        except ContextTooLong:
            return False

    if tried(messages):
        return
    first = next((i for i, one in enumerate(messages) if one["role"] not in ("system", "developer")), 0)
    head = messages[:first]
    begins = [i for i, one in enumerate(messages) if i > first and one["role"] != "tool"]
    low, high = 0, len(begins) - 1  # (the last beginning is what is taken if nothing fits)
    while low < high:
        middle = (low + high) // 2
        if tried([*head, *messages[begins[middle] :]]):
            high = middle
        else:
            low = middle + 1
    if begins:
        messages[:] = [*head, *messages[begins[low] :]]
