"""However a server cuts prompts, tokens and log-probabilities are the same bits: prefix hits, preemptions, …

The reference is one instance that computes few requests at a time, each prompt in one step.  BATON_CUTS=600
asks so many requests in all, in float32, bf16 and int8, with C++ and with numba (`make soak-cuts`).
"""

from __future__ import annotations

import asyncio
import os
import random
from typing import Any

import pytest
from openai import AsyncOpenAI

from baton.model.layers.int8 import why_not_int8, why_not_onednn_int8
from tests.e2e.server import Server

MANY = int(os.environ.get("BATON_CUTS", "0"))
COUNT = min(MANY // 6, 300) or 20
FORMS = {
    "bfloat16": ("--dtype", "bfloat16"),
    "float32": ("--dtype", "float32"),
    "int8": ("--dtype", "bfloat16", "--quantization", "int8"),
}
COMMON = ("--max-model-len", "2048", "--block-size", "16", "--admission-headroom", "0", "--num-threads", "1")
WHOLE = ("--max-num-seqs", "1", "--max-num-batched-tokens", "4096", "--no-enable-prefix-caching")
CUT = ("--max-num-seqs", "12", "--max-num-batched-tokens", "200")
SERVERS = {
    "alone": (
        "--num-gpu-blocks-override",
        "140",
    ),  # room for hardly more than the longest: others are thrown out
    "handed over": ("--prefill", "1", "--decode", "1", "--disaggregation-threshold", "0"),
}

Answer = list[tuple[int, list[tuple[str, float]]]]


def bodies(count: int) -> list[dict[str, Any]]:
    """Prompts of up to 1,700 tokens, many with a beginning in common, half of them greedy."""
    chance = random.Random(3)
    beginnings = [[chance.randrange(3, 1000) for _ in range(1500)] for _ in range(3)]
    found = []
    for number in range(count):
        shared = chance.choice(beginnings)[: chance.choice([0, 0, 0, 500, 515, 700, 1040, 1500])]
        rest = [chance.randrange(3, 1000) for _ in range(chance.choice([1, 5, 40, 200]))]
        greedy = {"temperature": 0.0} if number % 2 else {"temperature": 0.8, "seed": number}
        extra = {"ignore_eos": True, "return_token_ids": True, "priority": chance.randrange(2)}
        prompt = shared + rest if len(shared) + len(rest) > 1 else [5, 6, 7]
        body = {"prompt": prompt, "max_tokens": chance.choice([1, 200, 300]), "logprobs": 2}
        found.append({**body, **greedy, "model": "", "extra_body": extra})
    return found


async def ask(client: AsyncOpenAI, body: dict[str, Any]) -> Answer:
    choice = (await client.completions.create(**body)).choices[0]
    tokens = choice.token_ids  # type: ignore[attr-defined]
    assert choice.logprobs is not None
    tops = [sorted(top.items()) for top in choice.logprobs.top_logprobs or []]
    own = [("own", value) for value in choice.logprobs.token_logprobs or []]
    return [(token, [*top, mine]) for token, top, mine in zip(tokens, tops, own, strict=True)]


def ask_all(server: Server, asked: list[dict[str, Any]], at_once: int) -> list[Answer]:
    async def scenario() -> list[Answer]:
        turn = asyncio.Semaphore(at_once)
        async with server.async_client() as client:

            async def one(body: dict[str, Any]) -> Answer:
                async with turn:
                    return await ask(client, body)

            return await asyncio.gather(*map(one, asked))

    return asyncio.run(scenario())


def differences(expected: list[Answer], found: list[Answer]) -> list[str]:
    wrong = []
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        if one != other:
            at = next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), -1)
            wrong.append(f"request {number} from token {at} of {len(one)} on")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["native", "numba"] if MANY else ["native"])
@pytest.mark.parametrize("form", FORMS if MANY else ["bfloat16"])
def test_answers_do_not_depend_on_the_cuts(form: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    why_not = why_not_int8 if kernels == "native" else why_not_onednn_int8
    if form == "int8" and why_not():
        pytest.skip(why_not())
    if kernels == "numba":
        monkeypatch.setenv("BATON_NATIVE", "0")
    asked = bodies(COUNT)
    with Server(*FORMS[form], *COMMON, *WHOLE) as server:
        expected = ask_all(server, asked, 2)
    assert all(len(answer) == body["max_tokens"] for answer, body in zip(expected, asked, strict=True))
    for name, flags in SERVERS.items():
        with Server(*FORMS[form], *COMMON, *CUT, *flags) as server:
            wrong = differences(expected, ask_all(server, asked, 16))
            again = differences(expected, ask_all(server, asked, 16))  # with what is cached now
            assert not wrong + again, f"{len(wrong)}, {len(again)} of {COUNT}: {[*wrong, *again][:5]}"
            hits = server.metric("baton:prefix_cache_hits_total")
            preempted = server.metric("baton:num_preemptions_total")
            stats = server.http.get("/stats").json()
            arrived = sum(one["handovers"]["arrived"] for one in stats.get("instances", {"": stats}).values())
            print(
                f"{form}, {kernels}, {name}: {COUNT} requests, twice; {arrived} handed over, "
                f"{preempted:.0f} preemptions, {hits:.0f} tokens found in the cache"
            )
            assert hits
            assert preempted if name == "alone" else arrived
