"""How soon first tokens come and what streams beside notice: `--max-num-batched-tokens auto` and numbers.

    python benchmarks/first_token.py MODEL [--budgets 2048,auto] [--rounds 5] [--server-args "…"] [--out FILE]
                                     [--beside vllm=http://127.0.0.1:8001]

One server for each budget, all of the same checkout and all there at once (one that has nothing to do does
nothing); rounds go from one to the next, so that whatever else the machine does meets all of them.  What is
compared is the median over rounds of the ratio to the first budget, of the same round.  Prompts are random.
What two servers with the same policy differ by (`--budgets 2048,2047,auto`) says what a ratio is worth.
A server of another engine that serves the same model and runs already takes part by `--beside NAME=URL`.

| load | what is sent | what is measured |
| --- | --- | --- |
| closed | 48 requests, 16 at a time, 128 tokens each, 32 answered | times to the first token, throughput |
| poisson | 96 of these at 70 % of the rate that the first budget served in that loop | the same, and gaps |
| long | 1,900 tokens while 8 streams run | the longest gap of the streams, the time to its first token |
| decode | 16 prompts of 16 tokens, 64 answered | throughput |
| prefill | 1,900 tokens alone | the time to the first token |
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import statistics
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import uvloop

from _common import Table, machine, percentile, print_machine, write_json
from baton.bench.client import Endpoint, Outcome, send
from baton.bench.metrics import calculate
from baton.bench.serve import run
from baton.bench.server import first_model, own_server
from baton.bench.workload import arrival_times, random_requests, vocabulary_of

_PROMPT, _ANSWER, _REQUESTS, _AT_A_TIME = 128, 32, 48, 16
_LOAD, _ARRIVALS = 0.7, 96
_LONG, _STREAMS, _STREAM_TOKENS = 1900, 8, 160
Row = dict[str, float]


class Load:
    """The requests of one round: the same for every budget, others in the next round."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.served: list[float] = []
        """Requests a second that the first budget served in the load `closed`, of each round that counts.  (A
        server that has just started is slower, and at half of the load hardly two prompts ever meet.)"""
        self.seed = 0

    @property
    def rate(self) -> float:
        """Requests a second of the load `poisson`; 0 as long as it is not known."""
        return _LOAD * statistics.median(self.served) if self.served else 0.0

    async def closed(self, endpoint: Endpoint) -> Row:
        requests = random_requests(_REQUESTS, _PROMPT, _ANSWER, self._vocab_size, self.seed)
        outcomes, seconds = await run(endpoint, requests, [0.0] * _REQUESTS, _AT_A_TIME)
        return _latencies(outcomes, seconds)

    async def poisson(self, endpoint: Endpoint) -> Row:
        requests = random_requests(_ARRIVALS, _PROMPT, _ANSWER, self._vocab_size, self.seed + 1)
        outcomes, seconds = await run(endpoint, requests, arrival_times(_ARRIVALS, self.rate, 1.0, self.seed))
        return _latencies(outcomes, seconds)

    async def long(self, endpoint: Endpoint) -> Row:
        streams = random_requests(_STREAMS, _PROMPT, _STREAM_TOKENS, self._vocab_size, self.seed + 2)
        [prompt] = random_requests(1, _LONG, 8, self._vocab_size, self.seed + 3)
        first = random_requests(_STREAMS, 16, 1, self._vocab_size, self.seed + 4)
        tasks = [asyncio.create_task(send(endpoint, request)) for request in streams]
        for request in first:  # (answered in order: when the last one is, all streams run)
            await send(endpoint, request)
        arriving = await send(endpoint, prompt)
        outcomes = await asyncio.gather(*tasks)
        _check([*outcomes, arriving])
        gaps = [gap for outcome in outcomes for gap in outcome.itls]
        began, ended = arriving.start, arriving.times[0]
        beside = [
            after - before
            for outcome in outcomes
            for before, after in zip(outcome.times, outcome.times[1:], strict=False)
            if after > began and before < ended
        ]
        return {
            "longest_gap_ms": max(beside, default=max(gaps)) * 1e3,
            "ttft_ms": arriving.ttft * 1e3,
            "streams_tok_s": _STREAMS * _STREAM_TOKENS / max(outcome.e2el for outcome in outcomes),
        }

    async def decode(self, endpoint: Endpoint) -> Row:
        requests = random_requests(_AT_A_TIME, 16, 64, self._vocab_size, self.seed + 5)
        outcomes, seconds = await run(endpoint, requests, [0.0] * _AT_A_TIME)
        return {"tok_s": _latencies(outcomes, seconds)["tok_s"]}

    async def prefill(self, endpoint: Endpoint) -> Row:
        [request] = random_requests(1, _LONG, 1, self._vocab_size, self.seed + 6)
        outcome = await send(endpoint, request)
        _check([outcome])
        return {"ttft_ms": outcome.ttft * 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", help="directory of a checkpoint")
    parser.add_argument(
        "--budgets", default="2048,auto", help="the first is what the others are compared with"
    )
    parser.add_argument("--loads", default="closed,poisson,long,decode,prefill")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--server-args", default="", help="further flags of all servers")
    parser.add_argument(
        "--beside", action="append", default=[], metavar="NAME=URL", help="a server that runs already"
    )
    parser.add_argument("--out")
    args = parser.parse_args()
    facts = machine()
    print_machine(facts)
    flags = ["--max-num-seqs", "64", *shlex.split(args.server_args)]
    budgets, loads = args.budgets.split(","), args.loads.split(",")
    load = Load(vocabulary_of(Path(args.model)))
    rounds: list[dict[str, dict[str, Row]]] = []
    with ExitStack() as stack:
        endpoints = {}
        for budget in budgets:
            flag = ["--max-num-batched-tokens", budget]
            url, _ = stack.enter_context(own_server(args.model, [*flags, *flag]))
            endpoints[budget] = Endpoint(url, first_model(url, None))
        for name, _, url in (beside.partition("=") for beside in args.beside):
            budgets.append(name)
            endpoints[name] = Endpoint(url, first_model(url, None))
        for number in range(-1, args.rounds):  # the first round is a warm-up
            load.seed = 100 * (number + 1)
            order = budgets if number % 2 == 0 else budgets[::-1]
            of_order = {budget: endpoints[budget] for budget in order}
            if number < 0:
                _round(load, [name for name in loads if name != "poisson"], budgets[0], of_order)
                load.served.clear()
            else:
                rounds.append(_round(load, loads, budgets[0], of_order))
    result = _result(rounds, budgets)
    _show(result, budgets)
    limits = {"requests_a_second": load.rate, "server": flags}
    write_json(
        args.out, {"machine": facts, "arguments": vars(args), **limits, "result": result, "rounds": rounds}
    )


def _round(
    load: Load, loads: list[str], first: str, endpoints: dict[str, Endpoint]
) -> dict[str, dict[str, Row]]:
    found: dict[str, dict[str, Row]] = {}
    for name in loads:
        if name == "poisson" and not load.rate:
            continue
        measure: Callable[[Endpoint], Coroutine[Any, Any, Row]] = getattr(load, name)
        found[name] = {}
        for budget, endpoint in endpoints.items():
            found[name][budget] = row = uvloop.run(measure(endpoint))
            print(name, budget, *(f"{key} {value:.1f}" for key, value in row.items()), flush=True)
        if name == "closed":
            load.served.append(found[name][first]["req_s"])
    return found


def _check(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        if outcome.error:
            raise SystemExit(f"a request failed: {outcome.error}")


def _latencies(outcomes: list[Outcome], seconds: float) -> Row:
    _check(outcomes)
    metrics = calculate(outcomes, seconds)
    ttfts = [outcome.ttft for outcome in outcomes]
    gaps = [gap for outcome in outcomes for gap in outcome.itls]
    return {
        "ttft_ms": metrics.latencies["ttft"].mean,
        "ttft_p50_ms": metrics.latencies["ttft"].median,
        "ttft_p99_ms": percentile(ttfts, 99) * 1e3,
        "e2el_ms": metrics.latencies["e2el"].mean,
        "tpot_ms": metrics.latencies["tpot"].mean,
        "itl_p50_ms": percentile(gaps, 50) * 1e3,
        "itl_p99_ms": percentile(gaps, 99) * 1e3,
        "tok_s": metrics.output_throughput,
        "req_s": metrics.request_throughput,
    }


def _result(rounds: list[dict[str, dict[str, Row]]], budgets: list[str]) -> dict[str, Any]:
    """load → value → budget → median, and median of the ratios to the first budget."""
    result: dict[str, Any] = {}
    for name in rounds[0]:
        for value in rounds[0][name][budgets[0]]:
            row = result.setdefault(name, {})[value] = {}
            for budget in budgets:
                ratios = [one[name][budget][value] / one[name][budgets[0]][value] for one in rounds]
                row[budget] = {
                    "median": statistics.median(one[name][budget][value] for one in rounds),
                    "ratio": statistics.median(ratios),
                    "ratios": sorted(round(ratio, 3) for ratio in ratios),
                }
    return result


def _show(result: dict[str, Any], budgets: list[str]) -> None:
    for name, rows in result.items():
        table = Table(name, ("", *budgets, *(f"{budget} / {budgets[0]}" for budget in budgets[1:])))
        for value, row in rows.items():
            medians = [f"{row[budget]['median']:.1f}" for budget in budgets]
            ratios = [
                f"{row[budget]['ratio']:.2f} ({row[budget]['ratios'][0]:.2f}-{row[budget]['ratios'][-1]:.2f})"
                for budget in budgets[1:]
            ]
            table.row(value, *medians, *ratios)
        table.print()


if __name__ == "__main__":
    main()
