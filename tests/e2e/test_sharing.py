"""A prompt that is asked for several times at once is computed once."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from openai import AsyncOpenAI

from tests.e2e.server import Server

LENGTH = 600
"""Tokens of a prompt."""
OWN = 32
"""What each computes for itself: less than two blocks (of 16 tokens by default, or of 32)."""


def computed(server: Server) -> float:
    """Prompt tokens that were not found."""
    return server.metric("baton:prefix_cache_queries_total") - server.metric("baton:prefix_cache_hits_total")


def ask(server: Server, prompt: list[int], count: int, n: int) -> tuple[list[Any], list[int]]:
    """Token ids of all answers, and what each request's usage says was found."""

    async def all_at_once() -> list[Any]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            one = {"model": "", "prompt": prompt, "n": n, "max_tokens": 6, "temperature": 0.0}
            extra = {"ignore_eos": True, "return_token_ids": True}
            asked = [client.completions.create(**one, extra_body=extra) for _ in range(count)]
            return await asyncio.gather(*asked)

    answers = asyncio.run(all_at_once())
    found = [answer.usage.prompt_tokens_details.cached_tokens or 0 for answer in answers]
    return [choice.token_ids for answer in answers for choice in answer.choices], found


def test_eight_requests_and_n_of_eight_compute_their_prompt_once(server: Server) -> None:
    chance = random.Random(5)
    for count, n in ((8, 1), (1, 8)):
        prompt = [chance.randrange(3, 1000) for _ in range(LENGTH)]
        before = computed(server)
        answers, found = ask(server, prompt, count, n)
        assert LENGTH <= computed(server) - before <= LENGTH + 7 * OWN
        assert len(answers) == 8
        assert all(answer == answers[0] for answer in answers)
        if count > 1:
            assert sorted(found)[1] >= LENGTH - OWN, "all but one shared it"
