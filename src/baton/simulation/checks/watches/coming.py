"""What is checked of pages that are fetched for one request and awaited by others.

The watch takes nothing from the books of `engine/handover/on_the_way.py`.  Of a request that D was given, and
whose pages are all final at P therefore, each full page is one of these:

| the page | is |
| --- | --- |
| holds its tokens at the leader | here |
| is written by a fetch that is under way | on its way |
| is also another arrival's, which P has not handed over, or whose last fetches are ending | awaited |

Anything else is awaited for ever.  And a request waits only while fetches of its own are under way, or some
of an arrival that has pages in common with it, or P has not handed such a one over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from baton.engine.handover.records import Arrival, Stage
from baton.protocol.codec import unpack_int32
from baton.protocol.messages.commands import Admit, CommandBatch
from baton.protocol.messages.handover import PeerMessage, Reserved
from baton.simulation.checks.books import Books, Violation
from baton.simulation.checks.looks import arrivals_of, well

if TYPE_CHECKING:
    from baton.simulation.parties.instance import EngineProcess, Instance


class ComingWatch:
    """The rule `coming`."""

    def __init__(self, books: Callable[[Instance], Books]) -> None:
        self._books = books

    def sends(self, engine: EngineProcess, to: str, message: PeerMessage) -> None:
        """D keeps room: blocks that other reservations have too are of the same tokens, salt and gateway."""
        if not isinstance(message, Reserved):
            return
        arrivals = arrivals_of(engine)._arrivals
        mine = arrivals.get((to, message.id, message.attempt))
        if mine is None:
            return
        reserved, size = engine.core.scheduler.ledger._reserved, engine.instance.config.block_size
        table = reserved[mine.key]
        for other in arrivals.values():
            if other is mine:
                continue
            shared = [i for i, (a, b) in enumerate(zip(table, reserved[other.key], strict=False)) if a == b]
            shared = [index for index in shared if index >= max(mine.num_cached, other.num_cached)]
            end = (max(shared) + 1) * size if shared else 0
            one, two = mine.request, other.request
            same = one.tokens[:end] == two.tokens[:end] and one.cache_salt == two.cache_salt
            # (A gateway that lost its connection comes back with another one, by the same name.)
            if shared and not (same and one.gateway.name == two.gateway.name):
                raise Violation(
                    "coming",
                    f"{one.name} shares pages {shared} at {engine.instance.name} with {two.name}, which is "
                    "of another salt, gateway or beginning",
                )

    def commanded(self, engine: EngineProcess, batch: CommandBatch) -> None:
        """After `HandoverWatch.commanded`: nobody runs on what is being written, no two write one block."""
        fetches = self._books(engine.instance).fetches
        if not fetches:
            return
        writers: dict[int, tuple[int, tuple[str, str, int, int]]] = {}
        for number, fetch in fetches.items():
            for block in fetch.blocks:
                before = writers.setdefault(block, (number, fetch.key))
                if before[1] != fetch.key:
                    raise Violation(
                        "coming",
                        f"fetches {before[0]} and {number} of {engine.instance.name} write block {block}, "
                        f"for {before[1]} and {fetch.key}",
                    )
        for command in batch.commands:
            if isinstance(command, Admit):
                written = [block for block in unpack_int32(command.blocks) if block in writers]
                if written:
                    raise Violation(
                        "coming",
                        f"slot {command.slot} of {engine.instance.name} runs on blocks {written}, which "
                        f"fetch {writers[written[0]][0]} writes",
                    )

    def after_turn(self, engine: EngineProcess) -> None:
        """After each turn of D."""
        if not well(engine):
            return
        arrivals: list[Arrival] = list(arrivals_of(engine)._arrivals.values())
        if len(arrivals) < 2:
            return
        reserved = engine.core.scheduler.ledger._reserved
        written = {block for fetch in self._books(engine.instance).fetches.values() for block in fetch.blocks}
        for arrival in arrivals:
            if arrival.handed and arrival.stage is Stage.FETCHING:
                others: set[int] = set()
                fetched: set[int] = set()
                for other in arrivals:
                    ends = bool(other.fetches) if other.stage is Stage.CLOSING else not other.handed
                    if other is not arrival and ends:
                        others.update(reserved[other.key])
                    if other is not arrival and other.fetches:
                        fetched.update(reserved[other.key])
                self._check(engine, arrival, written | others)
                if not arrival.fetches and not (others | fetched).intersection(reserved[arrival.key]):
                    name, where = arrival.request.name, engine.instance.name
                    raise Violation("coming", f"{name} waits at {where} for pages that are here")

    def _check(self, engine: EngineProcess, arrival: Arrival, awaited: set[int]) -> None:
        executor, size = engine.instance.ranks[0].executor, engine.instance.config.block_size
        request = arrival.request
        table = engine.core.scheduler.ledger.reserved(arrival.key)
        for index in range(arrival.num_cached, request.num_prompt // size):
            block = table[index]
            if block in awaited:
                continue
            tokens = request.tokens[index * size : (index + 1) * size].tolist()
            if executor.tokens_in(block) != tokens:
                raise Violation(
                    "coming",
                    f"{request.name} waits at {engine.instance.name} for page {index} in block {block}, "
                    "which nobody fetches",
                )
