"""How many instances a server runs, what each is for, and how they hand requests over.

The instances of one server are equal but for their names and labels, and divide the machine: the cores among
all their ranks, and the memory that is free among their KV pools.  Sizes that were given (`--max-num-seqs`,
`--kv-cache-memory-bytes`, …) are those of *each* instance.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import NamedTuple

import msgspec

from baton.gateway.cluster.member import Label
from baton.ipc.processes.cores import usable_cores
from baton.launch.limits import OptionError
from baton.launch.options import ClusterOptions
from baton.launch.planning.plan import ServerPlan
from baton.protocol.config import InstanceConfig


class InstancePlan(NamedTuple):
    """One instance of a server."""

    label: Label
    config: InstanceConfig


def plan_instances(plan: ServerPlan, options: ClusterOptions) -> tuple[InstancePlan, ...]:
    """The instances, prefilling ones first.  Raises `OptionError`."""
    check_cluster(options)
    labels = _labels(options)
    base = configure(plan.instance, options, instances=len(labels))
    plans: list[InstancePlan] = []
    for label in labels:
        name = f"{label}-{sum(other.label == label for other in plans)}"
        plans.append(InstancePlan(label, msgspec.structs.replace(base, name=name)))
    return tuple(plans)


def configure(config: InstanceConfig, options: ClusterOptions, *, instances: int) -> InstanceConfig:
    """The configuration of each of `instances` on this machine, but for its name."""
    host = options.peer_host
    return msgspec.structs.replace(
        config,
        num_threads=config.num_threads or _share_of_cores(config, instances),
        memory_shares=max(1, instances),
        peer_endpoint=f"tcp://{bracketed(host)}:0" if host else "ipc://*",
        transfer=options.transfer,
        transfer_checksums=options.transfer_checksums,
        transfer_encryption=options.transfer_encryption == "on",
        transfer_host=options.transfer_host or host or "127.0.0.1",
        max_preparing=options.max_preparing,
        lease_s=options.kv_lease,
    )


def check_cluster(options: ClusterOptions) -> None:
    """The addresses, on this machine.  Raises `OptionError` that names the flag and the fix."""
    for flag, host in (("--peer-host", options.peer_host), ("--transfer-host", options.transfer_host)):
        if host is not None:
            check_reachable(flag, host)


def check_reachable(flag: str, host: str) -> None:
    """Others are told this address: it must be one of this machine's, and a single one."""
    try:
        family, _, _, _, (address, *_) = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise OptionError(f"{flag} {host}: {error.strerror}; give an address of this machine") from None
    if ipaddress.ip_address(str(address).partition("%")[0]).is_unspecified:
        raise OptionError(
            f"{flag} {host}: it means every address and names none; give the one under which the other "
            "hosts reach this machine"
        )
    try:
        with socket.create_server((host, 0), family=family):
            pass
    except OSError:
        raise OptionError(
            f"{flag} {host}: not an address of this machine; instances here could not listen on it"
        ) from None


def is_loopback(host: str) -> bool:
    """Whether it means this machine, and nobody else reaches it."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_loopback for entry in found)


def bracketed(host: str) -> str:
    """An address as it stands before a port."""
    return f"[{host}]" if ":" in host else host


def _labels(options: ClusterOptions) -> list[Label]:
    mixed = options.mixed
    if mixed is None:
        mixed = 0 if options.prefill or options.decode else 1
    counts: tuple[tuple[Label, int], ...] = (
        ("prefill", options.prefill),
        ("decode", options.decode),
        ("mixed", mixed),
    )
    return [label for label, count in counts for _ in range(count)]


def _share_of_cores(config: InstanceConfig, instances: int) -> int | None:
    """None: one instance takes them all, as its workers do by themselves."""
    if instances <= 1:
        return None
    return max(1, usable_cores() // (instances * config.tensor_parallel_size))
