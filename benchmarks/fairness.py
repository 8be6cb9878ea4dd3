"""What a flood of one user costs another one: times to the first token, and who gets 429.

    python benchmarks/fairness.py [--flood 200] [--prompt 1500] [--before PYTHON] [--out fairness.json]

**First tokens.**  One user sends `--flood` prompts of `--prompt` tokens at once.  From then on another one
sends a short prompt every second, until the flood is served.  Measured are the times to the first token of
the other user's requests, those of the flood, and how long the flood takes.  With fair queuing, with
`--no-fair-queuing`, and with `--before`, the interpreter of another checkout, as it is there.

**Places.**  The flood comes to a queue of `--max-waiting` places; the other user's requests come when it is
full, as those of another `user`, or of a better priority.  Counted is how many of them are refused.

The executor is simulated: a step takes 2 ms and 50 us for each token of a prompt (20,000 a second), as sleep.
So the numbers are those of the queues, and other load on the machine adds to them little.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import uvloop

from _clients import Server, long_model, random_prompt, serving, stream
from _common import Table, machine, percentile, print_machine, write_json
from _ideal import Timed

_COST = "0.002,5e-5,1e-5"
_SHORT, _ANSWER = 50, 16
_PACE_S = 1.0
_ASKED = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--flood", type=int, default=200)
    parser.add_argument("--prompt", type=int, default=1500)
    parser.add_argument("--max-waiting", type=int, default=40)
    parser.add_argument("--before", help="python of another checkout, to compare with")
    parser.add_argument("--out")
    args = parser.parse_args()
    facts = machine()
    print_machine(facts)
    kinds: dict[str, tuple[str, tuple[str, ...]]] = {
        "fair": (sys.executable, ()),
        "--no-fair-queuing": (sys.executable, ("--no-fair-queuing",)),
    }
    if args.before:
        kinds["before"] = (args.before, ())
    result: dict[str, Any] = {"machine": facts, "arguments": vars(args), "first_tokens": {}, "places": {}}
    for kind, (python, flags) in kinds.items():
        result["first_tokens"][kind] = uvloop.run(_first_tokens(python, flags, args))
        result["places"][kind] = _places(python, flags, args)
    _show(result)
    write_json(args.out, result)


async def _first_tokens(python: str, flags: tuple[str, ...], args: argparse.Namespace) -> dict[str, Any]:
    draw = random.Random(1)
    with long_model(4096) as model, serving(model, *_executor(), *flags, python=python) as server:
        await stream(server, random_prompt(_SHORT, draw), _ANSWER)
        flood = [
            asyncio.create_task(stream(server, random_prompt(args.prompt, draw), _ANSWER, user="flood"))
            for _ in range(args.flood)
        ]
        others: list[asyncio.Task[Timed]] = []
        while not all(task.done() for task in flood):
            await asyncio.sleep(_PACE_S)
            prompt = random_prompt(_SHORT, draw)
            others.append(asyncio.create_task(stream(server, prompt, _ANSWER, user="other")))
        few, many = await asyncio.gather(*others), await asyncio.gather(*flood)
    first = [timed.first_token_s for timed in few]
    flooded = [timed.first_token_s for timed in many]
    return {
        "others": len(first),
        "other_median_s": statistics.median(first),
        "other_p95_s": percentile(first, 95),
        "other_most_s": max(first),
        "flood_median_s": statistics.median(flooded),
        "flood_s": max(timed.times[-1] for timed in many) - min(timed.sent for timed in many),
    }


def _places(python: str, flags: tuple[str, ...], args: argparse.Namespace) -> dict[str, Any]:
    """Refusals of requests that come while the queue is full."""
    draw = random.Random(2)
    places = ("--max-waiting", str(args.max_waiting), "--max-num-seqs", "4")
    found: dict[str, Any] = {}
    with long_model(4096) as model, serving(model, *_executor(), *places, *flags, python=python) as server:
        for name, more in (("other user", {"user": "other"}), ("better priority", {"priority": -1})):
            with ThreadPoolExecutor(2 * args.max_waiting + _ASKED) as threads:
                sent = [
                    threads.submit(_ask, server, draw, args.prompt, {"user": "flood"})
                    for _ in range(2 * args.max_waiting)
                ]
                time.sleep(1.0)
                sure = []
                for _ in range(_ASKED):
                    sure.append(threads.submit(_ask, server, draw, _SHORT, more | {"max_tokens": 1}))
                    time.sleep(0.02)
                asked, flooded = [one.result() for one in sure], [one.result() for one in sent]
            waits = [wait for status, wait in (*asked, *flooded) if status == 429]
            found[name] = {
                "asked": len(asked),
                "refused": sum(status == 429 for status, _ in asked),
                "retry_after_s": sorted(set(waits)),
            }
    return found


def _ask(server: Server, draw: random.Random, length: int, more: dict[str, Any]) -> tuple[int, int]:
    """(status, `Retry-After`) of one request."""
    body = {"prompt": random_prompt(length, draw), "max_tokens": _ANSWER, "ignore_eos": True, **more}
    url = f"http://{server.host}:{server.port}/v1/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            answer.read()
            return int(answer.status), 0
    except urllib.error.HTTPError as error:
        error.read()
        return error.code, int(error.headers.get("retry-after") or 0)


def _executor() -> tuple[str, ...]:
    return ("--executor", "simulated", "--simulated-cost", _COST, "--num-gpu-blocks-override", "20000")


def _show(result: dict[str, Any]) -> None:
    table = Table(
        "Time to the first token of the other user, in seconds",
        ("queuing", "requests", "median", "p95", "longest", "flood: median", "flood: all of it"),
    )
    for kind, row in result["first_tokens"].items():
        values = [f"{value:.2f}" for name, value in row.items() if name != "others"]
        table.row(kind, row["others"], *values)
    table.print()
    table = Table("Refused while the queue is full", ("queuing", "who", "asked", "refused", "Retry-After"))
    for kind, rows in result["places"].items():
        for who, row in rows.items():
            waits = row["retry_after_s"]
            shown = f"{waits[0]} to {waits[-1]} s" if waits else "-"
            table.row(kind, who, row["asked"], row["refused"], shown)
    table.print()


if __name__ == "__main__":
    main()
