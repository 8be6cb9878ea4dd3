"""Flags of a server's instances as a group, and of an instance that joins another server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from baton.launch.options.flag import Options, flag

MAX_INSTANCES = 64


@dataclass(frozen=True, kw_only=True)
class ClusterOptions(Options):
    title: ClassVar[str] = "Instances"

    prefill: int = flag(
        0,
        "Instances that prefill and hand over to others.",
        least=0,
        most=MAX_INSTANCES,
        unit="a number of instances",
    )
    decode: int = flag(
        0,
        "Instances that decode what was prefilled elsewhere.",
        least=0,
        most=MAX_INSTANCES,
        unit="a number of instances",
    )
    mixed: int | None = flag(
        None,
        "Instances that do both; 0 alone: all join from elsewhere.",
        least=0,
        most=MAX_INSTANCES,
        unit="a number of instances",
        unset="one, if there are no others",
    )
    disaggregation_threshold: int | None = flag(
        None,
        "A request with fewer uncached prompt tokens is prefilled where it decodes; 0: never.",
        least=0,
        most=2**31 - 1,
        unit="tokens",
        unset="by measured cost",
    )
    max_preparing: int = flag(
        64,
        "Requests for which a prefilling instance asks others for room at the same time.",
        least=1,
        most=1 << 16,
        unit="requests",
    )
    kv_lease: float = flag(
        10.0,
        "Seconds that KV pages stay for an instance that fetches them and says nothing.",
        least=0.5,
        most=3600,
        unit="seconds",
    )
    transfer: Literal["auto", "shared_memory", "tcp", "nixl"] = flag(
        "auto",
        "How KV pages travel. auto: shared memory on one host, else TCP, from a CUDA device by way of main "
        "memory; nixl (experimental): from and into a device's memory.",
    )
    transfer_checksums: bool = flag(False, "Compare a checksum of each page after copying.")
    peer_host: str | None = flag(
        None,
        "Address of this machine at which instances on other hosts reach those here; needs --cluster-secret.",
        metavar="HOST",
        unset="this machine only; with --instance, --host",
    )
    transfer_host: str | None = flag(
        None,
        "Address at which KV pages are fetched.",
        metavar="HOST",
        unset="that of --peer-host",
    )

    cluster_secret: tuple[str, ...] = flag(
        (),
        "File with the cluster's secret (`baton cluster secret > FILE`): only who has it joins, and "
        "connections between hosts are encrypted. Given twice, both are accepted and the first is used, "
        "so that a secret can be exchanged.",
        metavar="FILE",
        variable="BATON_CLUSTER_SECRET_FILE",
        unset="none: nothing of other hosts joins",
    )
    insecure_cluster: bool = flag(
        False,
        "Listen for other hosts without a secret: whoever reaches this machine may read all prompts and give "
        "answers.",
    )
    transfer_encryption: Literal["on", "off"] = flag(
        "on",
        "Encrypt connections between hosts, if there is a --cluster-secret. off: members still prove "
        "themselves, but the network can read and change what passes; the same at all members.",
    )

    @property
    def runs_none(self) -> bool:
        """A gateway whose instances all join from elsewhere."""
        return self.mixed == 0 and not self.prefill and not self.decode


@dataclass(frozen=True, kw_only=True)
class PlacingOptions(Options):
    title: ClassVar[str] = "Instances that Ray places"

    ray: str | None = flag(
        None,
        "Have Ray place the instances of --prefill, --decode and --mixed on its nodes, and start them again "
        "elsewhere when a node is lost. auto: this machine's Ray cluster; local: one of its own, on this "
        "machine alone; or its address. Needs baton-llm[ray], here and on the nodes.",
        metavar="auto|local|HOST:PORT",
        unset="none: instances run here",
    )
    instance_cpus: float = flag(
        4.0,
        "CPUs of each instance, and its threads; with --nodes of each of its hosts.",
        least=0.01,
        most=65536,
        unit="a number",
    )
    instance_gpus: float = flag(
        0.0, "GPUs of each instance; with --nodes of each of its hosts.", least=0, most=1024, unit="a number"
    )
    instance_memory: int | None = flag(
        None,
        "Memory that Ray counts for each instance (each host of it), such as 20GiB. It limits nothing: size "
        "the KV cache by --kv-cache-memory-bytes.",
        size=True,
        unset="none is counted",
    )


def check_address(text: str | None) -> None:
    """HOST:PORT.  Raises `ValueError`."""
    if text is not None:
        host, _, port = text.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError("give HOST:PORT")


@dataclass(frozen=True, kw_only=True)
class NodesOptions(Options):
    title: ClassVar[str] = "An instance on several hosts"

    nodes: int = flag(
        1,
        "Hosts that share each layer of the model: --tensor-parallel-size divided among them. The others run "
        "baton serve --instance --node 1 (2, ...) --leader HOST:PORT; with --ray they are started by Ray.",
        least=1,
        most=256,
        unit="a number of hosts",
    )
    node: int = flag(
        0,
        "Which of the hosts of an instance this is. 0: the leader, which has the engine; others have the "
        "leader's settings.",
        least=0,
        most=255,
        unit="a number",
    )
    leader: str | None = flag(
        None,
        "Where the leader of an instance on several hosts waits for the others, with --nodes; the leader's "
        "address, with --node. Beyond this machine it needs --cluster-secret.",
        metavar="HOST:PORT",
        unset="none",
        check=check_address,
    )
    node_host: str | None = flag(
        None,
        "Address of this host at which the ranks of the others reach those here.",
        metavar="HOST",
        unset="the leader's of --leader; with --node, that by which the leader is reached",
    )
    node_timeout: float = flag(
        10.0,
        "Seconds of silence after which a host of an instance is lost, and the instance starts again.",
        least=0.2,
        most=3600,
        unit="seconds",
    )
    collective_encryption: Literal["on", "off"] = flag(
        "on",
        "What ranks on several hosts exchange within each step (gloo, NCCL) can be neither encrypted nor "
        "authenticated. off: the network between them is private. With on, --nodes beyond this machine is "
        "refused.",
    )


@dataclass(frozen=True, kw_only=True)
class JoinOptions(Options):
    title: ClassVar[str] = "An instance that joins another server"

    instance: bool = flag(
        False, "Run one instance without HTTP; needs --join, or with --node 1 (2, ...) --leader."
    )
    join: tuple[str, ...] = flag(
        (),
        "The server to join; given several times, or with a name that has several addresses, all of these. "
        "On this machine it reaches the instance by a socket that only this user can open, else at --host, "
        "which needs --cluster-secret. Without one the first --admin-key is sent to the server.",
        metavar="HOST:PORT",
        unset="none",
    )
    label: Literal["mixed", "prefill", "decode"] = flag(
        "mixed", "What the server sends to the instance at first."
    )
    name: str | None = flag(None, "Name of the instance in its cluster.", unset="LABEL-HOSTNAME-PID")
    probe_port: int | None = flag(
        None,
        "Port at --host where /health and /ready of the instance, or of one of its hosts, answer, for "
        "Kubernetes' probes.",
        least=1,
        most=65535,
        unit="a number",
        unset="none",
    )
