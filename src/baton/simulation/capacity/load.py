"""What comes: requests with their times and sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from random import Random
from typing import NamedTuple


class Asked(NamedTuple):
    """One request."""

    at: float
    """Seconds since the beginning."""
    prompt: int
    """Tokens of it, to be computed."""
    output: int


class Hour(NamedTuple):
    """Some time of a day."""

    name: str
    per_s: float
    """Requests a second; at the end of it, if `until` says none other."""
    prompt: int
    output: int
    """Tokens in the mean, each from half of it to one and a half."""
    steady: bool = True
    """The load is as in the hour before."""


def day(hours: Sequence[Hour], seconds: float, seed: int = 1) -> list[Asked]:
    """Poisson arrivals through hours of so many seconds each."""
    random, found, at = Random(seed), [], 0.0
    for number, hour in enumerate(hours):
        at = number * seconds
        while (at := at + random.expovariate(hour.per_s)) < (number + 1) * seconds:
            found.append(Asked(at, _around(hour.prompt, random), _around(hour.output, random)))
    return found


def _around(mean: int, random: Random) -> int:
    return max(1, round(mean * random.uniform(0.5, 1.5)))


def standard_day() -> list[Hour]:
    """24 hours: documents at night are read and summed up (long prompts), by day people chat (long answers),
    with a burst of documents at noon; between them the load turns from the one to the other."""
    night = (6.2, 3600, 60)
    noon = (7.5, 500, 420)
    hours = []
    for number in range(24):
        weight, steady = _of_day(number)
        mixed = [a + weight * (b - a) for a, b in zip(night, noon, strict=True)]
        hours.append(Hour(f"{number:02d}", mixed[0], round(mixed[1]), round(mixed[2]), steady))
    burst = hours[13]
    hours[13] = burst._replace(name="13 burst", per_s=6.5, prompt=3600, output=60, steady=False)
    hours[14] = hours[14]._replace(steady=False)
    return hours


def _of_day(number: int) -> tuple[float, bool]:
    """How much of an hour is chat, and whether the hour before was the same."""
    if number < 7 or number >= 21:
        return 0.0, number != 21
    if 9 <= number < 19:
        return 1.0, number != 9
    weight = {7: 1 / 3, 8: 2 / 3, 19: 2 / 3, 20: 1 / 3}[number]
    return weight, False


def rates(requests: Sequence[Asked], width_s: float) -> Iterator[tuple[float, float, float]]:
    """(time, prompt tokens a second, answer tokens a second) of each stretch of time."""
    last = max((one.at for one in requests), default=0.0)
    sums = [[0, 0] for _ in range(math.floor(last / width_s) + 1)]
    for one in requests:
        entry = sums[math.floor(one.at / width_s)]
        entry[0] += one.prompt
        entry[1] += one.output
    for number, (prompts, answers) in enumerate(sums):
        yield number * width_s, prompts / width_s, answers / width_s
