"""The other end of `same_answer.py`: a process that holds one engine and says what exactly it answered.

Runs in the environment of the engine, so nothing of Baton is imported here.  An order is a line of JSON,
`{"prompts": [[id, …], …], "output_len": N, "fresh": true}`: prompts that come at once, and whether the
engine forgets its prefix cache first.  The reply has, for each prompt, the N tokens that greedy decoding
chose, their log-probabilities as the engine gives them, and how much of the prompt was cached.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

from answering import NotOffered

Answer = tuple[list[int], list[float], int | None]
"""The tokens, the log-probability of each, and how many of the prompt's tokens came from the prefix cache
(None: the engine does not say)."""


@dataclass(frozen=True)
class Settings:
    """What an engine is started with."""

    model: str
    """Directory of the checkpoint."""
    dtype: str
    """bfloat16 or float32."""
    threads: int
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    """Tokens of a step at most: a longer prompt is cut."""
    kv_cache_bytes: int
    converted: str
    """Directory for what the engine makes of the checkpoint, if it cannot read it as it is."""


@dataclass(frozen=True)
class Engine:
    """An engine that is ready."""

    version: str
    complete: Callable[[list[list[int]], int], list[Answer]]
    """(prompts as token ids, output tokens of each) → the answers, in the order of the prompts."""
    forget: Callable[[], None]
    """Empties the prefix cache."""


def serve(load: Callable[[Settings], Engine]) -> None:
    """Loads the engine, then answers orders until the input ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the engine prints

    def reply(**content: object) -> None:
        replies.write(json.dumps(content) + "\n")
        replies.flush()

    try:
        engine = load(Settings(**json.loads(sys.argv[1])))
    except NotOffered as error:
        reply(error=str(error))
        return
    reply(version=engine.version)
    for line in sys.stdin:
        order = json.loads(line)
        if order["fresh"]:
            engine.forget()
        answers = engine.complete(order["prompts"], order["output_len"])
        reply(answers=answers)
