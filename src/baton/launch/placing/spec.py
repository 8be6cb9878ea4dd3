"""What the server tells Ray's driver to place, and what the driver tells of it: lines of JSON over pipes."""

from __future__ import annotations

from typing import Literal

import msgspec

from baton.gateway.cluster.member import Label


class Placed(msgspec.Struct, frozen=True):
    """One instance."""

    name: str
    label: Label


class Placing(msgspec.Struct, frozen=True, kw_only=True):
    """A line to the driver: what is to be there from now on.  Of later lines only `instances` differ.  The
    end of the pipe ends everything that it placed."""

    address: str
    """Of Ray: "local" starts one, "auto" finds the machine's, HOST:PORT."""
    cluster: str
    """Begins the names of actors and placement groups.  The driver ends what an earlier server has left."""
    instances: tuple[Placed, ...]
    cpus: float
    gpus: float
    memory: int
    """Bytes that an instance takes of its node's, for Ray; 0: none.  All three are of each of its hosts."""
    nodes: int = 1
    """Hosts of each instance."""
    arguments: tuple[str, ...]
    """Of `baton serve --instance`, but for the name, the label and the host."""
    loopback: bool
    """Everything is on this machine, and listens for nobody else."""
    secrets: tuple[str, ...]
    """What is in the files of `--cluster-secret`."""
    stop_after_s: float
    """What an instance gets to drain."""
    patience_s: float = 20.0
    """What Ray gets for each question, before it counts as gone."""
    adopt: bool = False
    """This server has placed these before, with another driver: what is still there is taken over."""


State = Literal["waiting", "placed", "moving", "unknown"]
"""waiting: no node has the resources; moving: the node is lost, and another one is looked for; unknown: Ray
does not answer."""


class Standing(msgspec.Struct, frozen=True):
    """How an instance stands with Ray."""

    name: str
    label: Label
    state: State
    needs: dict[str, float]
    """Of each host."""
    hosts: int = 1
    nodes: tuple[str, ...] = ()
    """Ray's, that it has."""


class Report(msgspec.Struct, frozen=True):
    """A line from the driver."""

    instances: tuple[Standing, ...] = ()
    error: str = ""
    """Why the driver gives up."""
    note: str = ""
    """For the log."""
