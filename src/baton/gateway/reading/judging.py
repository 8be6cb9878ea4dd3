"""What a model is asked about pairs of texts, and what its answer means."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from operator import mul

from baton.gateway.errors import BadRequest, InternalError
from baton.gateway.served_model import Judge
from baton.gateway.text.tokenizer import Tokenizer, TokenizerError
from baton.protocol.pooling import Pooling, unpack_vector


def judging(judge: Judge, tokenizer: Tokenizer) -> Pooling:
    """The logits of no and yes.  Raises `TokenizerError` if one of them is no token."""
    labels = []
    for word in (judge.no, judge.yes):
        ids = tokenizer.encode(word, add_special_tokens=False)
        if len(ids) != 1:
            raise TokenizerError(
                f"--convert classify: {word!r} is {len(ids)} tokens of this model, not one; it is for models "
                "that answer with one token (classifier_from_token in config.json names others)"
            )
        labels.append(ids[0])
    return Pooling("labels", labels=tuple(labels), normalize=False)


def likelihood(no: float, yes: float) -> float:
    """Of yes, if it is one of the two."""
    difference = no - yes
    return 1 / (1 + math.exp(difference)) if difference < 700 else 0.0


def truncate_question(ids: Sequence[int], most: int, judge: Judge, tokenizer: Tokenizer) -> Sequence[int]:
    """At most so many tokens: the end of the document is cut off, and what follows it stays.  Raises
    `BadRequest` if there is no room for a document."""
    if len(ids) <= most:
        return ids
    ending = tokenizer.encode(judge.ending, add_special_tokens=False)
    least = len(tokenizer.encode(judge.prompt("", "", ""), add_special_tokens=False))
    if most <= least:
        raise BadRequest(
            f"truncate_prompt_tokens: give more than {least}; so many the question has without its texts",
            param="truncate_prompt_tokens",
        )
    return [*ids[: most - len(ending)], *ending]


def scores_of(results: Sequence[bytes], num_queries: int | None) -> Iterator[float]:
    """One for each document.  `num_queries` None: each result has the logits of no and yes of a pair; else so
    many vectors of queries come before those of the documents.  Raises `InternalError` for NaN."""
    queries = [checked(unpack_vector(data)) for data in results[: num_queries or 0]]
    for index, data in enumerate(results[len(queries) :]):
        values = checked(unpack_vector(data))
        if num_queries is None:
            yield likelihood(*values)
        else:
            yield sum(map(mul, queries[index % len(queries)], values))


def checked(values: list[float]) -> list[float]:
    """Raises `InternalError` for what is no number: JSON cannot say it."""
    if not all(map(math.isfinite, values)):
        raise InternalError("the model gave NaN or infinity", code="not_finite")
    return values
