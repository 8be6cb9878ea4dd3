"""What was made of prompts as an answer: embeddings as OpenAI's, scores and rankings as vLLM's."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator, Sequence

from baton.gateway.errors import ApiError, InstanceUnavailable
from baton.gateway.generation.generation import Completion, Generation, Update
from baton.gateway.generation.progress import Progress
from baton.gateway.reading.judging import Scorer, activated, checked, scores_of
from baton.gateway.rendering.formats import Part, encode, usage
from baton.gateway.served_model import Activation
from baton.protocol.params.pooling import unpack_vector

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

    def failure(self, error: ApiError) -> bytes:
        return b""

    def sign_of_life(self, silent_s: float) -> bytes:
        return b""

    def progress(self, progress: Progress) -> bytes:
        return b""

    def results(self) -> list[bytes]:
        """Packed float32, one for each prompt.  Raises `InstanceUnavailable` for one that is missing: the
        server ended the request (`POST /pause`)."""
        found = [sequence.pooled for sequence in self.generation.sequences]
        if not all(found):
            raise InstanceUnavailable(
                "the server ended the request before its prompts were computed",
                code="aborted",
                retry_after_s=1,
            )
        return found


class ListRenderer(PooledRenderer):
    """What has an item for each prompt, written one by one."""

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

    def _item(self, index: int, result: bytes) -> bytes:
        raise NotImplementedError


class EmbeddingRenderer(ListRenderer):
    """/v1/embeddings.  `packed`: vectors as base64 of their bytes."""

    def __init__(self, generation: Generation, model: str, *, packed: bool) -> None:
        super().__init__(generation, model)
        self._packed = packed

    def _item(self, index: int, result: bytes) -> bytes:
        if self._packed:
            embedding: str | list[float] = base64.b64encode(result).decode()
        else:
            embedding = checked(unpack_vector(result))
        return encode({"index": index, "object": "embedding", "embedding": embedding})


class ClassifyRenderer(ListRenderer):
    """/classify.  `labels`: what each result is of."""

    def __init__(
        self, generation: Generation, model: str, labels: Sequence[str], activation: Activation
    ) -> None:
        super().__init__(generation, model)
        self._labels = labels
        self._activation: Activation = activation

    def _item(self, index: int, result: bytes) -> bytes:
        probs = activated(checked(unpack_vector(result)), self._activation)
        best = max(range(len(probs)), key=probs.__getitem__)
        return encode(
            {"index": index, "label": self._labels[best], "probs": probs, "num_classes": len(probs)}
        )


class ScoringRenderer(PooledRenderer):
    """What has a score for each document.  With a `scorer` each prompt is a question about a pair; else so
    many vectors of queries come before the documents'."""

    def __init__(self, generation: Generation, model: str, num_queries: int, scorer: Scorer | None) -> None:
        super().__init__(generation, model)
        self._num_queries = num_queries
        self._scorer = scorer
        self.scores: list[float] = []

    def scored(self) -> Iterator[Part]:
        """Fills `scores`; nothing is written."""
        for score in scores_of(self.results(), self._num_queries, self._scorer):
            self.scores.append(score)
            yield _WORK, b""


class ScoreRenderer(ScoringRenderer):
    """/score"""

    def whole(self, completions: list[Completion]) -> Iterator[Part]:
        yield from self.scored()
        answer = {
            "id": self.generation.request_id,
            "object": "list",
            "created": int(time.time()),
            "model": self.model,
            "data": [
                {"index": index, "object": "score", "score": score} for index, score in enumerate(self.scores)
            ],
            "usage": usage(self.generation),
        }
        yield 0, encode(answer)


class RerankRenderer(ScoringRenderer):
    """/rerank.  `documents` None: they are not repeated; `top` 0: all."""

    def __init__(
        self,
        generation: Generation,
        model: str,
        num_queries: int,
        scorer: Scorer | None,
        documents: Sequence[str] | None,
        top: int,
    ) -> None:
        super().__init__(generation, model, num_queries, scorer)
        self._documents = documents
        self._top = top

    def whole(self, completions: list[Completion]) -> Iterator[Part]:
        yield from self.scored()
        order = sorted(range(len(self.scores)), key=lambda index: (-self.scores[index], index))
        results: list[dict[str, object]] = []
        for index in order[: self._top or None]:
            results.append({"index": index, "relevance_score": self.scores[index]})
            if self._documents is not None:
                results[-1]["document"] = {"text": self._documents[index]}
        answer = {
            "id": self.generation.request_id,
            "model": self.model,
            "usage": usage(self.generation),
            "results": results,
        }
        yield 0, encode(answer)
