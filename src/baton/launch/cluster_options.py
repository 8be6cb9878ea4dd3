"""How many instances a server runs, what each is for, and how they hand requests over.

The instances of one server are equal but for their names and labels, and divide the machine: the cores among
all their ranks, and the memory that is free among their KV pools.  Sizes that were given (`--max-num-seqs`,
`--kv-cache-memory-bytes`, …) are those of *each* instance.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import msgspec

from baton.gateway.member import Label
from baton.ipc.cores import usable_cores
from baton.launch.limits import OptionError, check_range
from baton.launch.options import Plan
from baton.protocol.config import InstanceConfig

Transfer = Literal["auto", "shared_memory", "tcp", "nixl"]
_MAX_INSTANCES = 64


@dataclass(frozen=True)
class ClusterOptions:
    """The flags of `baton serve` that concern its instances as a group."""

    prefill: int = 0
    decode: int = 0
    mixed: int | None = None
    """None: one if there is no other."""
    disaggregation_threshold: int | None = None
    """Uncached prompt tokens below which a request is prefilled where it decodes; None: by measured cost."""
    max_preparing: int = 64
    kv_lease: float = 10.0
    """Seconds."""
    transfer: Transfer = "auto"
    transfer_checksums: bool = False
    transfer_host: str | None = None
    """None: that of the peers."""
    peer_host: str | None = None
    """None: engines and workers of this machine only."""

    @property
    def runs_none(self) -> bool:
        """A gateway whose instances all join from elsewhere."""
        return self.mixed == 0 and not self.prefill and not self.decode


class InstancePlan(NamedTuple):
    """One instance of a server."""

    label: Label
    config: InstanceConfig


def plan_instances(plan: Plan, options: ClusterOptions) -> tuple[InstancePlan, ...]:
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
        transfer_host=options.transfer_host or host or "127.0.0.1",
        max_preparing=options.max_preparing,
        lease_s=options.kv_lease,
    )


def check_cluster(options: ClusterOptions) -> None:
    """Raises `OptionError` that names the flag and the fix."""
    for flag, count in (
        ("--prefill", options.prefill),
        ("--decode", options.decode),
        ("--mixed", options.mixed or 0),
    ):
        check_range(flag, count, 0, _MAX_INSTANCES, "a number of instances")
    check_range("--max-preparing", options.max_preparing, 1, 1 << 16, "requests")
    check_range("--kv-lease", options.kv_lease, 0.5, 3600, "seconds")
    check_range("--disaggregation-threshold", options.disaggregation_threshold, 0, 2**31 - 1, "tokens")
    if options.transfer not in get_args(Transfer):
        raise OptionError(f"--transfer {options.transfer}: give one of {', '.join(get_args(Transfer))}")
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
