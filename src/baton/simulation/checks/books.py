"""What the wires of one incarnation said, and how a broken rule is raised."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from baton.engine.request import Request
from baton.protocol.messages.commands import CommandBatch

if TYPE_CHECKING:
    from baton.simulation.parties.instance import Instance


class Violation(Exception):
    """A rule is broken.  `rule` is its name in the table of `monitor.py`."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule = rule
        self.text = text

    def __reduce__(self) -> tuple[type[Violation], tuple[str, str]]:
        """So that another process may be told of it: exceptions are pickled by their `args` otherwise."""
        return Violation, (self.rule, self.text)


@dataclass
class Named:
    """Pages that P has named to D."""

    peer: str
    slot: int
    epoch: int
    """Where they were then; slot -1: exported already."""
    blocks: list[int] = field(default_factory=list)
    checked: int = 0
    """Leading tokens whose pages were looked at."""


@dataclass
class OpenFetch:
    """A `Fetch` that is not over."""

    key: tuple[str, str, int, int]
    """Of the reservation in the ledger."""
    peer: str
    ranks: set[int]
    """That have not ended it."""
    pages: list[int]
    blocks: list[int]


class Books:
    """What the wires of one incarnation said."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.sequence = 0
        self.batches: list[CommandBatch] = []
        self.synced = 0
        """Batches whose admissions are in `at_worker`."""
        self.epochs: dict[int, int] = {}
        self.at_engine: dict[int, tuple[int, list[int], Request]] = {}
        """slot → (epoch, blocks, request) from the `Admit` on until the engine has read the `Closed`."""
        self.at_worker: dict[int, int] = {}
        """slot → epoch from when the leader applied the `Admit` until it reported the `Closed`."""
        self.closed: list[tuple[int, int]] = []
        """(slot, epoch) whose closing the engine has read."""
        self.digests: dict[int, tuple[bytes, ...]] = {}
        self.indexed: dict[tuple[int, int], int] = {}
        """(slot, epoch) → leading blocks that were looked at when they were indexed."""
        self.sound: tuple[Any, ...] = ()
        """What the ledger was when it was last found in order."""
        self.violations = 0
        """Messages made to be protocol violations that the engine has read."""
        self.cancelled: list[tuple[bytes, int]] = []
        """Read by the engine in this turn."""
        self.requests: dict[bytes, dict[int, bool]] = {}
        """identity → id → whether it may still get output."""
        self.salts: dict[int, str] = {}
        """block → the salt of the request that had it indexed last."""
        self.writers: dict[int, tuple[int, set[int]]] = {}
        """slot → (epoch, full blocks of its tokens that it was to compute) of the last `Admit`."""
        self.urgency: dict[int, tuple[int, int, bool]] = {}
        """slot → (epoch, priority, patient) as the worker was told last."""
        self.gateways: dict[str, bytes] = {}
        """What a gateway calls itself → its latest connection."""
        self.asked: dict[tuple[str, int, int], tuple[str, int]] = {}
        """As D: (P, id, attempt) → gateway and its id of the request."""
        self.fetches: dict[int, OpenFetch] = {}
        self.promised: set[tuple[str, int, int]] = set()
        """As P: (D, id, attempt) of each `Reserved` that was read."""
        self.named: dict[tuple[int, int], Named] = {}
        """As P: (id, attempt) → pages that D may be reading."""
        self.renewed: dict[tuple[int, int], float] = {}
        """As P: when it last heard that D counts on them, by its own clock."""
        self.renewing: dict[tuple[str, float], tuple[float, list[tuple[int, int]]]] = {}
        """As P: (D, stamp) → when this `Renew` was read, and what it names."""
        self.let_go: set[tuple[int, int]] = set()
        """As P: attempts of which D has said that it reads nothing (any more)."""
        self.just_let_go: set[tuple[int, int]] = set()
        """Those of which it said so in this turn."""
        self.taken_back: list[tuple[str, int, int]] = []
        """As D: (P, id, attempt) of each `Cancel` that was read in this turn."""
        self.dead_peers: set[str] = set()
        self.given = 0
        """How often room was given away, as far as was looked at."""
        self.credited: dict[tuple[str, int], float] = {}
        """As D: (P, id) → when credit was sent, by its own clock."""
        self.withdrawn: list[tuple[str, int, int]] = []
        """As D: (P, id, attempt) of each `Cancel` that was read in this turn."""
