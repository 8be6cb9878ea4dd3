"""`routed_experts` of a choice: numpy's file format in base64, as vLLM sends it."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from io import BytesIO

from baton.gateway.generation.generation import Generation
from baton.gateway.generation.routes import routed_experts
from baton.gateway.rendering.formats import Part

_SLICE = 3 << 16
"""Bytes that are encoded at once; a multiple of 3."""
_WORK = 32
"""Of one of them, beside the name of a token."""


def encoded_routes(generation: Generation, index: int) -> Iterator[Part]:
    """A member of a choice, with the comma before it."""
    found = routed_experts(generation, index)
    if found is None:
        yield 0, b',"routed_experts":null'
        return
    import numpy as np  # (a gateway that is not asked for experts starts without it)

    file = BytesIO()
    np.save(file, found, allow_pickle=False)
    data = file.getbuffer()
    yield 0, b',"routed_experts":"'
    for first in range(0, len(data), _SLICE):
        yield _WORK, b64encode(data[first : first + _SLICE])
    yield 0, b'"'
