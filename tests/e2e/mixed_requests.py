"""Requests of every kind that clients send, their answers, and how to compare two of them.

Answers are compared to the byte: text, token ids, token names in log-probabilities, why it ended.  Only
the log-probabilities themselves may differ in the last digits: a row of a matrix product is rounded a little
differently in a batch of another size.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from openai import AsyncOpenAI

from tests.e2e.workload import model_name

_WORDS = (
    "river stone lamp garden paper window green seven letter music table bread winter "
    "story yellow market cloud silver number quiet"
).split()
_STOPS = [[" the"], [" and", "."], ["e"], ["\n", " a "], ["zebra"]]
_LOGPROB_TOLERANCE = 0.0


@dataclass
class Choice:
    """One choice of an answer."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish: str | None = None
    stop_reason: Any = None
    logprobs: list[tuple[str, float]] = field(default_factory=list)
    """Of each token and its alternatives, in the order in which they were given."""


Answer = list[Choice]


@dataclass
class Ask:
    """One request; `cut` is after how many chunks its client goes away (None: never)."""

    number: int
    chat: bool
    stream: bool
    body: dict[str, Any]
    cut: int | None = None
    expected: Answer = field(default_factory=list)


def make_asks(
    count: int, seed: int, *, longest_prompt: int, longest_output: int, cut_share: float = 0.1
) -> list[Ask]:
    """Half greedy, half with a seed; half streamed; every fifth a chat; some with shared beginnings."""
    rng = random.Random(seed)
    shared = " ".join(rng.choices(_WORDS, k=90))
    asks = []
    for number in range(count):
        words = rng.randint(1, longest_prompt if rng.random() < 0.3 else max(1, longest_prompt // 8))
        text = " ".join(rng.choices(_WORDS, k=words))
        if rng.random() < 0.3:
            text = f"{shared} {text}"
        chat, stream = number % 5 == 4, rng.random() < 0.5
        body = _settings(rng, number, chat, longest_output)
        body |= {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
        cut = rng.randint(0, 15) if stream and rng.random() < cut_share else None
        asks.append(Ask(number, chat, stream, body, cut))
    return asks


def _settings(rng: random.Random, number: int, chat: bool, longest_output: int) -> dict[str, Any]:
    body: dict[str, Any] = {"max_tokens": rng.randint(1, longest_output)}
    extra: dict[str, Any] = {"return_token_ids": True, "ignore_eos": rng.random() < 0.6}
    if number % 2:
        body |= {"temperature": 0.9, "top_p": 0.95, "seed": rng.randrange(2**31)}
        if rng.random() < 0.3:
            extra["top_k"] = 20
    else:
        body["temperature"] = 0.0
    if rng.random() < 0.25:
        body |= {"logprobs": True, "top_logprobs": 3} if chat else {"logprobs": 3}
    if rng.random() < 0.2:
        body |= {"presence_penalty": 0.6, "frequency_penalty": 0.4}
    if rng.random() < 0.2:
        extra["repetition_penalty"] = 1.2
    if rng.random() < 0.25:
        body["stop"] = rng.choice(_STOPS)
    if rng.random() < 0.15:
        body["n"] = rng.randint(2, 3)
    if rng.random() < 0.1:
        extra["min_tokens"] = min(5, body["max_tokens"])
    return body | {"extra_body": extra}


async def get_answer(
    client: AsyncOpenAI, ask: Ask, *, may_leave: bool, on_news: Callable[[], None] | None = None
) -> Answer:
    """Sends one request.  `may_leave`: the client goes away where `ask.cut` says."""
    endpoint: Any = client.chat.completions if ask.chat else client.completions
    response = await endpoint.create(model=await model_name(client), stream=ask.stream, **ask.body)
    answer: Answer = [Choice() for _ in range(ask.body.get("n", 1))]
    if not ask.stream:
        for choice in response.choices:
            _take(answer[choice.index], choice, choice.message.content if ask.chat else choice.text)
        return answer
    chunks = 0
    async for chunk in response:
        if not chunk.choices:
            continue
        if on_news is not None:
            on_news()
        (choice,) = chunk.choices
        _take(answer[choice.index], choice, choice.delta.content if ask.chat else choice.text)
        chunks += 1
        if may_leave and ask.cut is not None and chunks > ask.cut:
            await response.close()
            break
    return answer


def _take(into: Choice, new: Any, text: str | None) -> None:
    into.text += text or ""
    into.token_ids += getattr(new, "token_ids", None) or []
    into.finish = new.finish_reason or into.finish
    into.stop_reason = getattr(new, "stop_reason", None) or into.stop_reason
    if new.logprobs is None:
        return
    if hasattr(new.logprobs, "content"):
        for token in new.logprobs.content or []:
            into.logprobs.append((token.token, token.logprob))
            into.logprobs += [(other.token, other.logprob) for other in token.top_logprobs]
    else:
        for token, value, tops in zip(
            new.logprobs.tokens, new.logprobs.token_logprobs, new.logprobs.top_logprobs, strict=True
        ):
            into.logprobs.append((token, value))
            into.logprobs += list(tops.items())


def difference(ask: Ask, answer: Answer) -> str | None:
    """What is wrong with an answer, if anything.  Of one whose client left, a beginning is enough."""
    for index, (expected, got) in enumerate(zip(ask.expected, answer, strict=True)):
        wrong = _differs(expected, got, beginning=ask.cut is not None)
        if wrong:
            return f"request {ask.number}, choice {index}: {wrong}; it was {ask.body}"
    return None


def _differs(expected: Choice, got: Choice, *, beginning: bool) -> str | None:
    if beginning:
        if not expected.text.startswith(got.text):
            return f"{got.text!r} is no beginning of {expected.text!r}"
        expected = Choice(
            got.text, expected.token_ids[: len(got.token_ids)], got.finish, got.stop_reason,
            expected.logprobs[: len(got.logprobs)],
        )  # fmt: skip
    for name in ("token_ids", "text", "finish", "stop_reason"):
        if getattr(expected, name) != getattr(got, name):
            return f"{name} is {getattr(got, name)!r} instead of {getattr(expected, name)!r}"
    if len(expected.logprobs) != len(got.logprobs):
        return f"{len(got.logprobs)} log-probabilities instead of {len(expected.logprobs)}"
    for (token, value), (other, other_value) in zip(expected.logprobs, got.logprobs, strict=True):
        if token != other or abs(value - other_value) > _LOGPROB_TOLERANCE:
            return f"log-probability {other!r} {other_value} instead of {token!r} {value}"
    return None


async def in_parallel(asks: list[Ask], at_once: int, one: Callable[[Ask], Awaitable[None]]) -> None:
    """`one` for each of them, so many at a time."""
    left = iter(asks)

    async def work() -> None:
        for ask in left:
            await one(ask)

    await asyncio.gather(*(work() for _ in range(at_once)))


async def learn(client: AsyncOpenAI, asks: list[Ask], at_once: int = 1) -> None:
    """Remembers the answer to each as what is right."""

    async def one(ask: Ask) -> None:
        ask.expected = await get_answer(client, ask, may_leave=False)

    await in_parallel(asks, at_once, one)


async def compare(client: AsyncOpenAI, asks: list[Ask], at_once: int) -> list[str]:
    """Asks again, so many at a time.  Returns what is different."""
    wrong: list[str] = []

    async def one(ask: Ask) -> None:
        what = difference(ask, await get_answer(client, ask, may_leave=True))
        if what:
            wrong.append(what)

    await in_parallel(asks, at_once, one)
    return wrong
