"""The files of `--cluster-secret`, and that nothing listens for other hosts without one."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Sequence

from baton.launch.limits import OptionError
from baton.launch.options import ServeOptions
from baton.launch.planning.cluster_options import is_loopback
from baton.launch.planning.node_options import leader_address
from baton.protocol.rules.cluster_secret import ClusterSecret, Secrets

log = logging.getLogger(__name__)

_MAX_BYTES = 1 << 16
_MAX_SECRETS = 2


def read_secrets(paths: Sequence[str]) -> Secrets:
    """The first one is used to speak.  Raises `OptionError` that names the file and what to do."""
    if len(paths) > _MAX_SECRETS:
        raise OptionError(
            f"--cluster-secret: {len(paths)} files; give one, or two while a secret is exchanged for another"
        )
    return Secrets(tuple(dict.fromkeys(map(_read, paths))))


def check_open(options: ServeOptions) -> None:
    """Raises `OptionError` if something would listen for members on other hosts, and everybody would be
    one."""
    if options.cluster_secret and options.insecure_cluster:
        raise OptionError("--insecure-cluster: with --cluster-secret members prove themselves; leave one out")
    if options.cluster_secret:
        return
    found = listens_openly(options)
    if found and not options.insecure_cluster:
        raise OptionError(
            f"{found[0]}: it would listen there for everybody who reaches this machine: `baton cluster "
            "secret > FILE`, and --cluster-secret FILE here and at all gateways and instances of the cluster "
            "(--insecure-cluster: without, where nobody else is on the network)"
        )


def warn_if_open(options: ServeOptions) -> None:
    """At each start."""
    if options.insecure_cluster:
        where = ", ".join(listens_openly(options)) or "nowhere but on this machine yet"
        log.warning(
            "--insecure-cluster: whoever reaches this machine may take part in the cluster, read all prompts "
            "and give answers (it listens for others at: %s); --cluster-secret ends that",
            where,
        )
    elif options.cluster_secret and options.transfer_encryption == "off":
        log.warning(
            "--transfer-encryption off: who is on the network between the cluster's hosts can read prompts "
            "and answers, and change them"
        )
    elif options.cluster_secret and options.transfer == "nixl":
        log.warning(
            "--transfer nixl: RDMA is not encrypted and asks for no grant, so who is on the network between "
            "the cluster's hosts may read KV pages; --transfer tcp encrypts them"
        )


def listens_openly(options: ServeOptions) -> list[str]:
    """What listens for members of the cluster on addresses that other hosts reach, as flags."""
    found = [("--peer-host", options.peer_host), ("--transfer-host", options.transfer_host)]
    if options.nodes > 1 and not options.node:
        found.append(("--leader", leader_address(options)[0]))
    if options.node and options.leader is not None and not is_loopback(leader_address(options)[0]):
        found.append(("--leader", leader_address(options)[0]))  # page servers, and it must not be anybody
    elif options.instance or (options.runs_none and options.uds is None):
        # An instance's engine; a gateway to which only others can give instances.
        found.insert(0, ("--host", options.host))
    return [f"{flag} {host}" for flag, host in found if host is not None and not is_loopback(host)]


def _read(path: str) -> ClusterSecret:
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            content = file.read(_MAX_BYTES)
    except OSError as error:
        raise OptionError(
            f"--cluster-secret {path}: {error.strerror}; `baton cluster secret > {path}` makes one"
        ) from None
    if stat.S_ISREG(status.st_mode) and status.st_mode & (stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP):
        raise OptionError(
            f"--cluster-secret {path}: other users may read or change it (mode {status.st_mode & 0o777:o}); "
            f"chmod 600 {path}, and make another secret if somebody else may have read it"
        )
    try:
        return ClusterSecret.parse(content.decode("utf-8", "replace"))
    except ValueError as error:
        raise OptionError(f"--cluster-secret {path}: {error}; `baton cluster secret` makes one") from None
