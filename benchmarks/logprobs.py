"""What 16 streams notice of requests that ask for the log-probabilities of the whole vocabulary.

    python benchmarks/logprobs.py MODEL [--rounds 3] [--streams 16] [--tokens 60] [--out FILE]

Starts `baton serve MODEL --max-logprobs -1`.  In each round the streams run once beside nothing, once beside
each kind of request, which is sent again and again meanwhile: the log-probabilities of all of a prompt's
tokens, the same of an answer's, streamed, and of four clients at once (of whom two are served at a time).
Printed are the medians of the rounds; the gaps between tokens are the client's, which shares the cores.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import statistics
import threading
import time
from typing import Any

from _common import Table, machine, percentile, print_machine, write_json
from baton.bench.server import own_server

_PROMPT = list(range(10, 40))
_KINDS: dict[str, tuple[int, dict[str, Any] | None]] = {
    "nothing": (0, None),
    "prompt_logprobs -1, 30 tokens": (1, {"prompt": _PROMPT, "max_tokens": 1, "prompt_logprobs": -1}),
    "logprobs -1, 30 tokens": (1, {"prompt": _PROMPT, "max_tokens": 30, "logprobs": -1, "ignore_eos": True}),
    "the same, streamed": (
        1,
        {"prompt": _PROMPT, "max_tokens": 30, "logprobs": -1, "ignore_eos": True, "stream": True},
    ),
    "of four clients": (4, {"prompt": _PROMPT, "max_tokens": 1, "prompt_logprobs": -1}),
}


def _ask(host: str, port: int, body: dict[str, Any]) -> int:
    """Bytes of the answer."""
    connection = http.client.HTTPConnection(host, port, timeout=300)
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response, size = connection.getresponse(), 0
    while piece := response.read(1 << 20):
        size += len(piece)
    connection.close()
    if response.status != 200:
        raise SystemExit(f"status {response.status}")
    return size


def _beside(
    host: str, port: int, clients: int, body: dict[str, Any], stop: Any, done: Any, size: Any
) -> None:
    """Sends the request again and again, `clients` at a time."""

    def one() -> None:
        while not stop.is_set():
            got = _ask(host, port, body)
            with done.get_lock():
                done.value += 1
                size.value = got

    threads = [threading.Thread(target=one) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _stream(host: str, port: int, tokens: int, number: int, gaps: list[float]) -> None:
    connection = http.client.HTTPConnection(host, port, timeout=300)
    body = {"prompt": [50 + number] * 16, "max_tokens": tokens, "ignore_eos": True, "stream": True, "seed": 1}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    last = None
    for line in connection.getresponse():
        if line.startswith(b"data: {"):
            now = time.perf_counter()
            if last is not None:
                gaps.append(now - last)
            last = now
    connection.close()


def _round(host: str, port: int, kind: str, streams: int, tokens: int) -> dict[str, float]:
    clients, body = _KINDS[kind]
    stop, done, size = multiprocessing.Event(), multiprocessing.Value("i", 0), multiprocessing.Value("q", 0)
    other = None
    if body is not None:
        arguments = (host, port, clients, body, stop, done, size)
        other = multiprocessing.Process(target=_beside, args=arguments)
        other.start()
        time.sleep(0.5)
    gaps: list[float] = []
    threads = [
        threading.Thread(target=_stream, args=(host, port, tokens, number, gaps)) for number in range(streams)
    ]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    answered = float(done.value)
    if other is not None:
        stop.set()
        other.join()
    return {
        "p50": percentile(gaps, 50) * 1e3,
        "p99": percentile(gaps, 99) * 1e3,
        "longest": max(gaps) * 1e3,
        "answered": answered,
        "seconds": seconds,
        "bytes": float(size.value),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--out")
    options = parser.parse_args()
    facts = machine()
    print_machine(facts)
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in _KINDS}
    with own_server(options.model, ["--max-logprobs", "-1"]) as (address, _):
        host, port = address.removeprefix("http://").split(":")
        for number in range(options.rounds + 1):
            for kind in _KINDS:
                result = _round(host, int(port), kind, options.streams, options.tokens)
                if number:  # (the first round warms up)
                    found[kind].append(result)
    table = Table(
        f"Gaps between tokens of {options.streams} streams, ms, median of {options.rounds} rounds",
        ["beside", "p50", "p99", "longest", "p99, times quiet", "answered", "MB each"],
    )
    medians = {
        kind: {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        for kind, rows in found.items()
    }
    for kind, row in medians.items():
        table.row(
            kind,
            *(f"{row[name]:.1f}" for name in ("p50", "p99", "longest")),
            f"{row['p99'] / medians['nothing']['p99']:.2f}",
            f"{row['answered']:.0f}",
            f"{row['bytes'] / 1e6:.0f}",
        )
    table.print()
    write_json(options.out, {"machine": facts, "rounds": found, "medians": medians})


if __name__ == "__main__":
    main()
