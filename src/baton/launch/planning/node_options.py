"""`--nodes` and what belongs to it: the hosts of one instance, as flags and as configuration."""

from __future__ import annotations

import socket
from dataclasses import replace

import msgspec

from baton.launch.limits import OptionError
from baton.launch.options import ServeOptions
from baton.launch.planning.cluster_options import bracketed, check_reachable, is_loopback
from baton.launch.planning.plan import ServerPlan
from baton.protocol.config import Nodes

DEFAULT_PORT = 8009
"""Of the leader, where --leader is not given."""


def over_hosts(plan: ServerPlan, options: ServeOptions) -> ServerPlan:
    """The plan of the leader's host.  Raises `OptionError`."""
    if options.nodes == 1:
        if options.leader is not None or options.node:
            raise OptionError(
                f"--leader {options.leader}: of an instance on several hosts; give --nodes here, and "
                "--instance --node 1 (2, ...) on the others"
            )
        return plan
    size = options.tensor_parallel_size
    if size % options.nodes:
        raise OptionError(
            f"--nodes {options.nodes}: each host has as many ranks as the others; give a "
            f"--tensor-parallel-size ({size}) that is a multiple"
        )
    if options.ray is not None:
        return plan  # its instances are elsewhere, and plan for themselves
    host, port = leader_address(options)
    check_reachable("--leader", host)
    if options.node_host is not None:
        check_reachable("--node-host", options.node_host)
    nodes = Nodes(
        count=options.nodes,
        listen=f"tcp://{bracketed(host)}:{port}",
        host=options.node_host or host,
        timeout_s=options.node_timeout,
        model=options.model,
        revision=options.revision,
        checkpoint=plan.served.checkpoint,
    )
    return replace(plan, instance=msgspec.structs.replace(plan.instance, nodes=nodes))


def check_nodes(options: ServeOptions) -> None:
    """Of the leader.  Raises `OptionError` if something would pass in clear that nobody agreed to."""
    if options.nodes == 1:
        return
    several = (options.prefill, options.decode, options.mixed) not in ((0, 0, None), (0, 0, 1))
    if several and options.ray is None:
        raise OptionError(
            f"--nodes {options.nodes}: this server runs one instance then; start others with --instance "
            "--join, each with its own --nodes and --leader"
        )
    if options.ray is not None and (options.leader, options.node_host) != (None, None):
        raise OptionError("--leader, --node-host: not with --ray, which chooses the hosts; leave them away")
    host = options.host if options.ray is not None else leader_address(options)[0]
    open_ = options.collective_encryption == "on" and not options.insecure_cluster
    if open_ and not is_loopback(host):
        raise OptionError(
            f"--nodes {options.nodes}: what ranks exchange within each step (gloo, NCCL) is neither "
            "encrypted nor authenticated, whatever the cluster's secret; where the network between these "
            "hosts is private, give --collective-encryption off"
        )


def leader_address(options: ServeOptions) -> tuple[str, int]:
    """Raises `OptionError` if there is none that other hosts could use."""
    if options.leader is not None:
        host, _, port = options.leader.rpartition(":")
        return host.strip("[]"), int(port)
    host = options.peer_host or options.host
    if host in ("0.0.0.0", "::"):
        raise OptionError(
            f"--nodes {options.nodes}: say at which address of this machine the other hosts reach it: "
            f"--leader HOST:{DEFAULT_PORT}"
        )
    return host, DEFAULT_PORT


def own_address(leader: str, port: int) -> str:
    """That by which this host reaches the leader.  Raises `OptionError`."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(leader, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # (of UDP: nothing is sent)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise OptionError(f"--leader {leader}:{port}: {error.strerror or error}") from None
