"""What was made of prompts as OpenAI's answer: embeddings."""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Iterator, Sequence

from baton.gateway.errors import InternalError
from baton.gateway.generation.generation import Completion, Generation, Update
from baton.gateway.rendering.formats import Part, encode, usage
from baton.protocol.pooling import unpack_vector

_WORK = 16
"""Of writing a vector (`formats.TURN`)."""


class PooledRenderer:
    """What all of them have in common: they are not streamed."""

    def __init__(self, generation: Generation, model: str) -> None:
        self.generation = generation
        self.model = model

    def whole(self, completions: list[Completion]) -> Iterator[Part]:
        raise NotImplementedError

    def begin(self) -> bytes:
        return b""

    def chunk(self, update: Update) -> bytes:
        return b""

    def parts(self, update: Update) -> Iterator[Part]:
        yield from ()

    def end(self) -> bytes:
        return b""

    def results(self) -> list[bytes]:
        """Packed float32, one for each prompt.  Raises `InternalError` for one that is missing: the server
        ended the request (`POST /pause`)."""
        found = [sequence.pooled for sequence in self.generation.sequences]
        if not all(found):
            raise InternalError(
                "the server ended the request before its prompts were computed", code="aborted"
            )
        return found


class EmbeddingRenderer(PooledRenderer):
    """/v1/embeddings.  `packed`: vectors as base64 of their bytes."""

    def __init__(self, generation: Generation, model: str, *, packed: bool) -> None:
        super().__init__(generation, model)
        self._packed = packed

    def whole(self, completions: list[Completion]) -> Iterator[Part]:
        head = {
            "id": self.generation.request_id,
            "object": "list",
            "created": int(time.time()),
            "model": self.model,
        }
        yield 0, encode(head)[:-1] + b',"data":['
        for index, vector in enumerate(self.results()):
            comma = b"," if index else b""
            yield _WORK, comma + self._item(index, vector)
        yield 0, b'],"usage":' + encode(usage(self.generation)) + b"}"

    def _item(self, index: int, vector: bytes) -> bytes:
        if self._packed:
            embedding: str | list[float] = base64.b64encode(vector).decode()
        else:
            embedding = checked(unpack_vector(vector))
        return encode({"index": index, "object": "embedding", "embedding": embedding})


def checked(values: Sequence[float]) -> list[float]:
    """Raises `InternalError` for what is no number: JSON cannot say it."""
    if not all(map(math.isfinite, values)):
        raise InternalError("the model gave NaN or infinity", code="not_finite")
    return list(values)
