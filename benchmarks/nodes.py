"""One instance on several hosts: are its answers those of one rank, what do faults cost, and what a ticket.

    python benchmarks/nodes.py [--prompts 24] [--rounds 2] [--only answers bfloat16 ...] [--out FILE]

Needs root and nothing outside of this machine: other hosts are network namespaces, each with a link (veth) of
its own.  The embedded model and real servers, with a cluster's secret.

**Answers.**  The same requests, greedy ones and drawn ones with seeds, all at once to one rank, then to 2 and
4 ranks on 2 hosts and to 4 ranks on 4 hosts, in float32: numbers of ranks add in different orders, which in
bfloat16 changes tokens wherever the ranks are.  Also beside as many ranks on one host, and that in bfloat16,
too: the same sums in the same order, so where the ranks are must change nothing.

**Faults.**  2 ranks on 2 hosts, in float32, while clients read answers one after another, `--rounds` times:

| column | what it is |
| --- | --- |
| fails | whether the instance had to start again |
| whole again | from the kill, or the moment when the link is back, until requests are served once more |
| longest pause | between two chunks of a stream, from the fault until the instance is whole again |
| wrong | answers with another token than those that one rank gives undisturbed |

**Tickets.**  From a rank 0 that writes a ticket to the other rank's report of it at the engine, microseconds:
on one host, across the link (link process and relay on the way, in clear and encrypted), and beside it small
messages over a plain TCP connection on the same link, there and back.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from _common import Table, machine, print_machine, summary, write_json
from _tickets import local_tickets, round_trips, tickets_across
from baton.launch.planning.cluster_secret import read_secrets
from baton.protocol.rules.cluster_secret import NO_SECRETS

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.e2e.nodes import Hosts, NodeHost, write_secret
from tests.e2e.server import Server

PORT = 8009
DEADLINE_S = 180.0
TOKENS = 96
STREAMS = 3
FLAGS = ("--num-threads", "1", "--log-level", "error")
EXACT = ("--dtype", "float32")
"""Two numbers of ranks add in different orders; in bfloat16 that changes tokens."""
OWN = ("--dtype", "bfloat16")
LAYOUTS = ((2, 2), (4, 2), (4, 4))
"""(ranks, hosts)"""
FAULTS = ("relay", "rank", "link process", "link down 1 s", "link down 20 s")


def body_of(number: int) -> dict[str, Any]:
    """Every other request is drawn, with a seed."""
    rng = random.Random(number)
    drawn = {"temperature": 0.9, "top_p": 0.95, "seed": number} if number % 2 else {"temperature": 0}
    return {
        "prompt": [rng.randrange(10, 500) for _ in range(rng.randint(20, 200))],
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        **drawn,
    }


def read(server: Server, number: int, pauses: list[tuple[float, float]] | None = None) -> list[int]:
    """The tokens of one request.  Raises `RuntimeError` or `httpx.HTTPError` if it fails."""
    found: list[int] = []
    last = time.monotonic()
    address = f"{server.url}/v1/completions"
    with httpx.stream("POST", address, json=body_of(number), timeout=DEADLINE_S, trust_env=False) as answer:
        if answer.status_code != 200:
            raise RuntimeError(answer.read().decode())
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(str(event))
                now = time.monotonic()
                if pauses is not None:
                    pauses.append((last, now))
                last = now
                found += [token for choice in event["choices"] for token in choice["token_ids"] or []]
    return found


def read_all(server: Server, count: int) -> list[list[int]]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda number: read(server, number), range(count)))


@contextmanager
def spread(
    hosts: Hosts, secret: str, ranks: int, count: int, *flags: str
) -> Iterator[tuple[Server, list[NodeHost]]]:
    """An instance of so many ranks on `count` hosts, ready."""
    leader = f"{hosts.here}:{PORT}"
    secrets = ("--cluster-secret", secret)
    shape = ("-tp", str(ranks), "--nodes", str(count), "--leader", leader, "--collective-encryption", "off")
    with ExitStack() as stack:
        nodes = []
        for number in range(1, count):
            host = NodeHost(hosts.names[number - 1], number, leader, *FLAGS, *secrets)
            stack.enter_context(host)
            nodes.append(host)
        server = stack.enter_context(Server(*FLAGS, *secrets, *shape, *flags))
        server.wait_ready(DEADLINE_S)
        yield server, nodes


def answers(options: argparse.Namespace, hosts: Hosts, secret: str) -> dict[str, Any]:
    columns = ("requests whose tokens differ", "of", "from one rank's", "from as many on one host")
    table = Table("float32, embedded model", columns)
    found: dict[str, Any] = {}
    alone = {ranks: read_from_one_host(ranks, options.prompts) for ranks in (1, 2, 4)}
    for ranks, count in LAYOUTS:
        with spread(hosts, secret, ranks, count, *EXACT) as (server, _):
            got = read_all(server, options.prompts)
        name = f"{ranks} ranks on {count} hosts"
        differ = {of: sum(map(operator.ne, got, alone[of])) for of in (1, ranks)}
        table.row(name, len(got), differ[1], differ[ranks])
        found[name] = {"requests": len(got), "from_one": differ[1], "from_one_host": differ[ranks]}
    table.print()
    return found


def bfloat16(options: argparse.Namespace, hosts: Hosts, secret: str) -> dict[str, Any]:
    """Where the ranks are, in the model's own numbers."""
    table = Table(
        "bfloat16, embedded model", ("requests whose tokens differ", "of", "from as many on one host")
    )
    found: dict[str, Any] = {}
    for ranks, count in LAYOUTS:
        with spread(hosts, secret, ranks, count, *OWN) as (server, _):
            got = read_all(server, options.prompts)
        differ = sum(map(operator.ne, got, read_from_one_host(ranks, options.prompts, *OWN)))
        name = f"{ranks} ranks on {count} hosts"
        table.row(name, len(got), differ)
        found[name] = {"requests": len(got), "from_one_host": differ}
    table.print()
    return found


def read_from_one_host(ranks: int, count: int, *flags: str) -> list[list[int]]:
    with Server(*FLAGS, *(flags or EXACT), "-tp", str(ranks)) as server:
        server.wait_ready(DEADLINE_S)
        return read_all(server, count)


@dataclass
class Fault:
    kind: str
    failed: bool
    whole_s: float
    pause_s: float


class Clients:
    """Threads that read answers, one after another, and compare them."""

    def __init__(self, server: Server, expected: list[list[int]]) -> None:
        self._server = server
        self._expected = expected
        self._over = False
        self.pauses: list[tuple[float, float]] = []
        self.wrong: list[str] = []
        self.answers = 0
        self._threads = [threading.Thread(target=self._read, args=(one,)) for one in range(STREAMS)]
        for thread in self._threads:
            thread.start()

    def _read(self, number: int) -> None:
        while not self._over:
            try:
                tokens = read(self._server, number, self.pauses)
                if tokens != self._expected[number]:
                    self.wrong.append(f"request {number}: {tokens}, not {self._expected[number]}")
            except (httpx.HTTPError, RuntimeError) as error:
                self.wrong.append(f"request {number}: {error!r}")
            self.answers += 1

    def end(self) -> None:
        self._over = True
        for thread in self._threads:
            thread.join()

    def pause(self, since: float, until: float) -> float:
        """The longest that began before `until` and ended after `since`."""
        return max(
            (end - begin for begin, end in self.pauses if begin <= until and end >= since), default=0.0
        )


def standing(server: Server) -> dict[str, Any]:
    (found,) = server.http.get("/cluster/instances").raise_for_status().json()["instances"]
    one: dict[str, Any] = found
    return one


def until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {DEADLINE_S:g} s: {what}")
        time.sleep(0.02)


def link_of(server: Server) -> int:
    """The process id of the link process: the last child of the engine that started it."""
    return max(server.children()["worker"])


def strike(kind: str, server: Server, node: NodeHost, hosts: Hosts, clients: Clients) -> Fault:
    before = standing(server)["incarnation"]
    at = time.monotonic()
    if kind.startswith("link down"):
        hosts.down(1)
        time.sleep(float(kind.split()[2]))
        hosts.up(1)
        counted = time.monotonic()
    else:
        victims = {"relay": node.relay, "rank": lambda: node.workers()[-1]}
        victim = victims.get(kind, lambda: link_of(server))()
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        counted = at
        until(lambda: standing(server)["incarnation"] != before, f"{kind}: the loss is noticed")
    answered = clients.answers
    until(lambda: standing(server)["state"] == "ready", f"{kind}: whole again")
    whole = time.monotonic() - counted
    failed = standing(server)["incarnation"] != before
    until(lambda: clients.answers >= answered + STREAMS, f"{kind}: streams go on")
    return Fault(kind, failed, whole, clients.pause(at, counted + whole))


def faults(options: argparse.Namespace, hosts: Hosts, secret: str) -> dict[str, Any]:
    with Server(*FLAGS, *EXACT) as one:
        one.wait_ready(DEADLINE_S)
        expected = [read(one, number) for number in range(STREAMS)]
    struck: list[Fault] = []
    # An instance that dies again and again, and serves less than a minute in between, is given up.
    often = ("--max-restarts", "1000")
    with spread(hosts, secret, 2, 2, *EXACT, *often) as (server, (node,)):
        clients = Clients(server, expected)
        try:
            for _ in range(options.rounds):
                for kind in FAULTS:
                    until(lambda: clients.answers >= STREAMS, "streams run")
                    time.sleep(0.5)
                    struck.append(strike(kind, server, node, hosts, clients))
        finally:
            clients.end()
    columns = ("2 ranks on 2 hosts", "times", "fails", "whole again: median, worst s", "longest pause s")
    table = Table("faults while streams run", columns)
    for kind in FAULTS:
        rows = [one for one in struck if one.kind == kind]
        whole = summary([one.whole_s for one in rows])
        pause = max(one.pause_s for one in rows)
        cells = (sum(one.failed for one in rows), f"{whole['p50']:.2f}, {whole['max']:.2f}", f"{pause:.2f}")
        table.row(kind, len(rows), *cells)
    table.print()
    print(f"{len(clients.wrong)} of {clients.answers} answers are wrong or failed")
    for text in clients.wrong[:5]:
        print("WRONG", text[:300])
    rows = [asdict(one) for one in struck]
    return {"faults": rows, "answers": clients.answers, "wrong": clients.wrong}


def tickets(options: argparse.Namespace, hosts: Hosts, secret: str) -> dict[str, Any]:
    count, there = options.tickets, hosts.names[0]
    secrets = read_secrets([secret])
    rows = {
        "one host": local_tickets(count),
        "across the link, in clear": tickets_across(there, f"{hosts.here}:8011", NO_SECRETS, count),
        "across the link, encrypted": tickets_across(there, f"{hosts.here}:8012", secrets, count),
        "TCP there and back": round_trips(there, f"{hosts.addresses[0]}:8013", count),
    }
    table = Table("a ticket there and its report back, microseconds", ("", "median", "p99", "worst"))
    found = {name: summary(times) for name, times in rows.items()}
    for name, one in found.items():
        table.row(name, *(f"{one[what] * 1e6:.0f}" for what in ("p50", "p99", "max")))
    table.print()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--prompts", type=int, default=24, help="requests that are compared")
    parser.add_argument("--rounds", type=int, default=2, help="how often each fault strikes")
    parser.add_argument("--tickets", type=int, default=2000)
    parser.add_argument("--only", nargs="+", choices=("answers", "bfloat16", "faults", "tickets"))
    parser.add_argument("--out")
    options = parser.parse_args()
    facts = machine()
    print_machine(facts)
    parts = {"answers": answers, "bfloat16": bfloat16, "faults": faults, "tickets": tickets}
    result: dict[str, Any] = {}
    hosts = Hosts(3)
    try:
        with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
            secret = write_secret(Path(folder) / "secret")
            for name, part in parts.items():
                if options.only is None or name in options.only:
                    result[name] = part(options, hosts, secret)
    finally:
        hosts.close()
    write_json(options.out, {"benchmark": "nodes", "machine": facts, "results": result})


if __name__ == "__main__":
    main()
