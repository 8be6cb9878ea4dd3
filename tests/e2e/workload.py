"""Requests of mixed lengths and settings, their solo answers, and the same under load."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

from openai import AsyncOpenAI

_WORDS = (
    "river stone lamp garden paper window green seven letter music table bread winter "
    "story yellow market cloud silver number quiet"
).split()


@dataclass
class Job:
    """One completion request; `cut` is after how many chunks the client goes away (None: never)."""

    prompt: list[int] | str
    settings: dict[str, Any]
    cut: int | None = None
    delay_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None


def make_jobs(
    count: int, seed: int, *, longest_prompt: int, longest_output: int, cut_share: float = 0.0
) -> list[Job]:
    """Mixed lengths, half greedy and half sampled with seeds, some with shared beginnings."""
    rng = random.Random(seed)
    shared = " ".join(rng.choices(_WORDS, k=60))
    jobs = []
    for number in range(count):
        words = rng.choices(_WORDS, k=rng.randint(1, longest_prompt // 3))
        text = " ".join(words)
        if rng.random() < 0.3:
            text = f"{shared} {text}"
        settings: dict[str, Any] = {"max_tokens": rng.randint(1, longest_output)}
        if number % 2:
            settings |= {"temperature": 0.9, "top_p": 0.95, "seed": rng.randrange(2**31)}
        else:
            settings |= {"temperature": 0.0}
        extra: dict[str, Any] = {"ignore_eos": rng.random() < 0.7, "return_token_ids": True}
        if rng.random() < 0.2:
            extra["repetition_penalty"] = 1.1
        settings["extra_body"] = extra
        cut = rng.randint(0, 12) if rng.random() < cut_share else None
        jobs.append(Job(text, settings, cut, delay_s=rng.random() * 2.0))
    return jobs


async def run_job(client: AsyncOpenAI, job: Job, *, cancel: bool) -> tuple[list[int], str | None]:
    """Streams the job; with `cancel`, leaves after `job.cut` chunks.  Returns (tokens, finish reason)."""
    tokens: list[int] = []
    finish: str | None = None
    stream = await client.completions.create(
        model=(await model_name(client)), prompt=job.prompt, stream=True, **job.settings
    )
    chunks = 0
    async for chunk in stream:
        if not chunk.choices:
            continue
        choice = chunk.choices[0]
        tokens.extend(getattr(choice, "token_ids", None) or [])
        finish = choice.finish_reason or finish
        chunks += 1
        if cancel and job.cut is not None and chunks > job.cut:
            await stream.close()
            break
    return tokens, finish


_names: dict[str, str] = {}


async def model_name(client: AsyncOpenAI) -> str:
    key = str(client.base_url)
    if key not in _names:
        _names[key] = (await client.models.list()).data[0].id
    return _names[key]


async def solo(client: AsyncOpenAI, jobs: list[Job]) -> None:
    """Runs each job alone and remembers its answer."""
    for job in jobs:
        job.tokens, job.finish = await run_job(client, job, cancel=False)


async def together(client: AsyncOpenAI, jobs: list[Job]) -> list[str]:
    """Runs all jobs at once, cutting those that are to be cut.  Returns what differed from solo."""

    async def one(number: int, job: Job) -> str | None:
        await asyncio.sleep(job.delay_s)
        tokens, finish = await run_job(client, job, cancel=True)
        if job.cut is not None:
            same = job.tokens[: len(tokens)] == tokens
            return None if same else f"job {number} (cut): {tokens} is no prefix of {job.tokens}"
        if tokens != job.tokens or finish != job.finish:
            return f"job {number}: {finish} {tokens} instead of {job.finish} {job.tokens} ({job.settings})"
        return None

    results = await asyncio.gather(*(one(number, job) for number, job in enumerate(jobs)))
    return [line for line in results if line]
