"""`--nodes` and what belongs to it, as flags."""

from __future__ import annotations

from typing import Any

import pytest

from baton.launch.limits import OptionError
from baton.launch.options import ServeOptions
from baton.launch.planning.cluster_secret import check_open
from baton.launch.planning.node_options import DEFAULT_PORT, check_nodes, over_hosts
from baton.launch.planning.plan import make_plan
from baton.protocol.config import ONE_HOST, Nodes

FAR = "10.1.2.3:8009"


def test_an_instance_is_on_one_host_unless_it_is_said() -> None:
    options = ServeOptions(executor="simulated", tensor_parallel_size=2)
    check_nodes(options)
    instance = over_hosts(make_plan(options), options).instance
    assert instance.nodes == ONE_HOST
    assert instance.ranks_per_host == 2


@pytest.mark.parametrize("leader", [None, "127.0.0.1:9000"])
def test_ranks_are_divided_among_the_hosts(leader: str | None) -> None:
    options = ServeOptions(
        executor="simulated", tensor_parallel_size=4, nodes=2, node_timeout=3.0, leader=leader
    )
    check_open(options)
    check_nodes(options)
    plan = make_plan(options)
    instance = over_hosts(plan, options).instance
    assert instance.nodes == Nodes(
        count=2,
        listen=f"tcp://{leader or f'127.0.0.1:{DEFAULT_PORT}'}",
        timeout_s=3.0,
        checkpoint=plan.served.checkpoint,
    )
    assert instance.ranks_per_host == 2


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "--leader 10.1.2.3: it would listen there for everybody"),
        ({"cluster_secret": ("x",)}, "neither encrypted nor authenticated.*--collective-encryption off"),
        ({"insecure_cluster": True, "prefill": 1}, "this server runs one instance then"),
        ({"insecure_cluster": True, "ray": "local"}, "--leader, --node-host: not with --ray"),
        ({"ray": "local", "leader": None, "tensor_parallel_size": 3}, "each host has as many ranks"),
        ({"insecure_cluster": True, "leader": None, "host": "0.0.0.0"}, "--leader HOST:8009"),
        ({"insecure_cluster": True, "tensor_parallel_size": 3}, "each host has as many ranks"),
        ({"insecure_cluster": True}, "--leader 10.1.2.3: not an address of this machine"),
        ({"nodes": 1}, "give --nodes here"),
        ({"nodes": 1, "leader": None, "node": 1}, "give --nodes here"),
    ],
)
def test_what_does_not_go_together_is_refused(given: dict[str, Any], words: str) -> None:
    settings = {"executor": "simulated", "tensor_parallel_size": 4, "nodes": 2, "leader": FAR, **given}
    options = ServeOptions(**settings)

    def start() -> None:
        check_open(options)
        check_nodes(options)
        over_hosts(make_plan(options), options)

    with pytest.raises(OptionError, match=words):
        start()
