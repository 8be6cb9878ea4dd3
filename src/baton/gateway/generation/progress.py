"""How far the prompts of a request are, while they are computed: for clients that ask (`return_progress`)."""

from __future__ import annotations

from typing import NamedTuple

from baton.gateway.generation.generation import Generation


class Progress(NamedTuple):
    """In tokens, with llama.cpp's names."""

    total: int
    cache: int
    """Of them, those that came from the prefix cache."""
    processed: int
    """Of them, those whose KV is there, cached ones too."""
    time_ms: int
    """Since the prompt was begun, the first one of several."""


def progress_of(generation: Generation) -> Progress | None:
    """Of all prompts together, each by its first choice; None while no instance has said anything."""
    cached = computed = milliseconds = 0
    known = False
    for sequence in generation.sequences[:: generation.choices]:
        request, length = sequence.request, len(sequence.prompt)
        if request is None:  # over, or not submitted yet
            known |= sequence.settled
            cached += sequence.num_cached or 0
            computed += length if sequence.settled else 0
            continue
        cached += min(request.num_cached, length)
        if request.num_generated:
            known = True
            computed += length
        elif request.progress is not None:
            known = True
            computed += min(request.progress[0], length)
        if request.progress is not None:
            milliseconds = max(milliseconds, request.progress[1])
    if not known:
        return None
    if not milliseconds and generation.first_token is not None:
        queued_s = generation.sequences[0].queued_s or 0.0
        milliseconds = round(1000 * max(0.0, generation.first_token - generation.arrived - queued_s))
    return Progress(generation.num_prompt, cached, computed, milliseconds)
