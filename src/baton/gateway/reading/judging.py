"""What a model is asked about pairs of texts, and what its answer means."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from operator import mul

from baton.gateway.errors import BadRequest, InternalError
from baton.gateway.served_model import Activation, Judge, ServedModel
from baton.gateway.text.tokenizer import Tokenizer, TokenizerError
from baton.protocol.params.pooling import SCORES, Pooling, unpack_vector

Scorer = Callable[[list[float]], float]
"""From the model's results for a pair to its score."""


def judging(judge: Judge, tokenizer: Tokenizer) -> Pooling:
    """The logits of no and yes, or all scores.  Raises `TokenizerError` if one of those is no token."""
    if judge.head:
        return SCORES
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


def activated(values: list[float], activation: Activation) -> list[float]:
    """Results of scores."""
    if activation == "sigmoid":
        return [likelihood(-value, 0.0) for value in values]
    if activation == "softmax":
        largest = max(values)
        weights = [math.exp(value - largest) for value in values]
        return [weight / sum(weights) for weight in weights]
    return values


def scorer_of(served: ServedModel, use_activation: bool | None = None) -> Scorer | None:
    """None: pairs are compared by their vectors."""
    if served.judge is None:
        return None
    plain = use_activation is False
    if served.judge.head:
        activation: Activation = "identity" if plain else served.activation
        return lambda values: activated(values, activation)[0]
    return (lambda values: values[1] - values[0]) if plain else (lambda values: likelihood(*values))


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


def scores_of(results: Sequence[bytes], num_queries: int, scorer: Scorer | None) -> Iterator[float]:
    """One for each document.  Without a `scorer`, which takes each result for a pair's, so many vectors of
    queries come before those of the documents.  Raises `InternalError` for NaN."""
    queries = [] if scorer is not None else [checked(unpack_vector(data)) for data in results[:num_queries]]
    for index, data in enumerate(results[len(queries) :]):
        values = checked(unpack_vector(data))
        if scorer is not None:
            yield scorer(values)
        else:
            yield sum(map(mul, queries[index % len(queries)], values))


def checked(values: list[float]) -> list[float]:
    """Raises `InternalError` for what is no number: JSON cannot say it."""
    if not all(map(math.isfinite, values)):
        raise InternalError("the model gave NaN or infinity", code="not_finite")
    return values
