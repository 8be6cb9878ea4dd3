"""Nodes of a real Ray that come and go under load: is an answer wrong, and how long until all goes on?

    python benchmarks/ray_nodes.py [--rounds 3] [--only one two] [--out FILE]

Needs `ray`, and nothing outside of this machine: `ray.cluster_utils.Cluster` starts each node's processes
here.  The embedded model in float32, and `baton serve --ray` with two layouts, each on three nodes that have
room for one instance, or one host of an instance:

* **one**: two instances on a node each; the third node is a spare.
* **two**: one instance on two nodes (`--nodes 2`), so nobody is there to go on with its requests.

Clients read answers one after another, greedy ones and drawn ones with seeds.  In each round a node that has
an instance is killed without grace (SIGKILL to all its processes); Ray finds out, and the instance is placed
with the spare; then a node is added, which is the next spare.

| column | what it is |
| --- | --- |
| go on | the longest pause between two chunks of a stream, from the kill until all instances serve again |
| whole again | from the kill until all instances serve again, on the spare |
| wrong | answers with another token than undisturbed, and requests that failed; the goal is 0 |
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster

from _common import Table, machine, print_machine, summary, write_json
from nodes import STREAMS, Clients, read, until

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.deploy.ray_server import Server, add_node, processes_of, ray_cluster

LAYOUTS = {"one": ("--mixed", "2"), "two": ("--mixed", "1", "-tp", "2", "--nodes", "2")}
INSTANCES = {"one": 2, "two": 1}
FLAGS = ("--dtype", "float32", "--num-threads", "1", "--log-level", "error")


@dataclass
class Loss:
    layout: str
    goes_on_s: float
    whole_s: float


def parents(pid: int) -> set[int]:
    found: set[int] = set()
    with suppress(OSError):
        while pid > 1:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
            found.add(pid)
    return found


def victim(cluster: Cluster, server: Server) -> Any:
    """A node that has an instance, or a part of one."""
    above = set().union(*(parents(pid) for pid in processes_of(server.port)))
    for node in cluster.worker_nodes:
        if any(one.process.pid in above for one in node.all_processes["raylet"]):
            return node
    raise RuntimeError("no node has an instance")


def incarnations(server: Server) -> set[str]:
    """Of those that serve."""
    shown = server.instances()["instances"]
    return {one["incarnation"] for one in shown if one["state"] == "ready"}


def lose(layout: str, cluster: Cluster, server: Server, clients: Clients) -> Loss:
    before, node = incarnations(server), victim(cluster, server)
    begun = clients.answers
    until(lambda: clients.answers >= begun + STREAMS, "streams run")
    at = time.monotonic()
    cluster.remove_node(node, allow_graceful=False)

    def whole() -> bool:
        now = incarnations(server)
        return len(now) == INSTANCES[layout] and now != before and not server.instances()["unplaced"]

    until(whole, "all instances serve again")
    took = time.monotonic() - at
    answered = clients.answers
    until(lambda: clients.answers >= answered + 2 * STREAMS, "streams go on")
    add_node(cluster)
    return Loss(layout, clients.pause(at, at + took), took)


def run(layout: str, rounds: int, folder: Path) -> tuple[list[Loss], Clients]:
    with ray_cluster(0) as cluster:
        for _ in range(3):
            add_node(cluster)
        server = Server(cluster.address, folder, *LAYOUTS[layout], *FLAGS)
        try:
            until(lambda: server.process.poll() is None and ready(server, layout), "all instances serve")
            clients = Clients(server, [read(server, number) for number in range(STREAMS)])
            try:
                losses = [lose(layout, cluster, server, clients) for _ in range(rounds)]
            finally:
                clients.end()
        finally:
            server.close()
    return losses, clients


def ready(server: Server, layout: str) -> bool:
    with suppress(OSError, Exception):
        return len(incarnations(server)) == INSTANCES[layout]
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="nodes that are killed in each layout")
    parser.add_argument("--only", nargs="+", choices=tuple(LAYOUTS), default=tuple(LAYOUTS))
    parser.add_argument("--out")
    options = parser.parse_args()
    facts = machine()
    print_machine(facts)
    columns = ("instance on nodes", "killed", "go on: median, worst s", "whole again: median, worst s")
    table = Table("a node of Ray is killed", (*columns, "answers", "wrong"))
    found: dict[str, Any] = {}
    for layout in options.only:
        with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
            losses, clients = run(layout, options.rounds, Path(folder))
        on, whole = (summary([getattr(one, name) for one in losses]) for name in ("goes_on_s", "whole_s"))
        cells = (f"{on['p50']:.2f}, {on['max']:.2f}", f"{whole['p50']:.1f}, {whole['max']:.1f}")
        table.row(layout, len(losses), *cells, clients.answers, len(clients.wrong))
        rows = [asdict(one) for one in losses]
        found[layout] = {"losses": rows, "answers": clients.answers, "wrong": clients.wrong}
    table.print()
    for layout in found:
        for text in found[layout]["wrong"][:5]:
            print("WRONG", layout, text[:300])
    write_json(options.out, {"benchmark": "ray_nodes", "machine": facts, "results": found})


if __name__ == "__main__":
    main()
