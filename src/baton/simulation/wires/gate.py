"""What a step has done so far: when its records may leave, and what of its pages can be seen.

Theory.  The simulated executor writes everything at once, at the beginning of a step that then takes a
while.  A real one writes layer after layer, and its ranks meet in collectives, so nothing that rank 0 says of
a step is true before every rank has come as far.  The gate makes up for both: rank 0's records of a step are
kept until every rank has reached the part of the step that they tell of; and while the last chunk of a
hand-over is computed, whoever reads a page from outside sees, in the layers that the step has not reached,
what was there before.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from baton.protocol.messages.reports import LayersDone, Report, StepReport
from baton.simulation.events import Events, Party
from baton.simulation.wires.rings import ReportEnd

Cells = npt.NDArray[np.uint8]
"""[layer, K/V, head, byte of the tile] of a block."""


class _Held(NamedTuple):
    step: int
    """0: waits for nothing but those before it."""
    part: float
    """Of the step."""
    record: bytes
    ring: bool


class StepGate:
    """Keeps the records of rank 0 until they are true."""

    def __init__(
        self, events: Events, leader: Party, num_ranks: int, num_layers: int, end: ReportEnd
    ) -> None:
        self._events = events
        self._leader = leader
        self._num_layers = num_layers
        self._end = end
        self._begun: list[dict[int, tuple[float, float]]] = [{} for _ in range(num_ranks)]
        """By rank: step → (when it began, seconds)."""
        self._held: deque[_Held] = deque()
        self._next_step = 1
        self._waking = 0.0

    def write(self, report: Report, record: bytes, ring: bool = True) -> bool:
        """Rank 0's loop reports something.  True: the loop need not care any more."""
        if isinstance(report, LayersDone):
            self._held.append(_Held(self._next_step, report.layers / self._num_layers, record, ring))
        elif isinstance(report, StepReport) and report.step:
            self._next_step = report.step + 1
            self._held.append(_Held(report.step, 1.0, record, ring))
        elif self._held:
            self._held.append(_Held(0, 0.0, record, ring))
        else:
            return self._end.write(record, ring)
        return True

    def ring(self) -> None:
        """Rank 0's loop wakes the engine for what it wrote without."""
        if self._held:
            self._held[-1] = self._held[-1]._replace(ring=True)
        else:
            self._end.ring()

    def begins(self, rank: int, step: int, seconds: float) -> None:
        """A rank computes a step from now on."""
        self._begun[rank][step] = (self._events.now, seconds)
        if self._held:
            self._events.after(0.0, self._leader, self.advance)

    def advance(self) -> None:
        """Lets go of what is true by now."""
        while self._held:
            step, part, record, ring = self._held[0]
            if step:
                starts = [begun.get(step) for begun in self._begun]
                at = 0.0
                for start in starts:
                    if start is None:
                        return
                    at = max(at, start[0] + part * start[1])
                if at > self._events.now:
                    if self._waking != at:
                        self._waking = at
                        self._events.at(at, self._leader, self.advance)
                    return
                if part == 1.0:
                    for begun in self._begun:
                        begun.pop(step, None)
            self._held.popleft()
            self._end.write(record, ring)


class PartialPages:
    """The blocks of one rank that a step is writing layer by layer, as they look from outside."""

    def __init__(self, events: Events, cells: npt.NDArray[np.uint8]) -> None:
        self._events = events
        self._cells = cells
        self._before: dict[int, Cells] = {}
        """Blocks of the step that is about to begin, as they were."""
        self._writing: dict[int, tuple[float, float, Cells]] = {}
        """Block → (since, seconds, what was there before)."""

    def remember(self, blocks: list[int]) -> None:
        """A step is about to write these."""
        self._before = {block: self._cells[block].copy() for block in blocks}

    def begins(self, seconds: float) -> None:
        """It takes so long."""
        now = self._events.now
        if self._writing:
            self._writing = {
                block: entry for block, entry in self._writing.items() if entry[0] + entry[1] > now
            }
        for block, before in self._before.items():
            self._writing[block] = (now, seconds, before)
        self._before = {}

    def seen(self, block: int, first_layer: int, num_layers: int) -> Cells:
        """What a reader finds now in these layers of a block."""
        layers = slice(first_layer, first_layer + num_layers)
        found: Cells = self._cells[block, layers].copy()
        entry = self._writing.get(block)
        if entry is not None:
            since, seconds, before = entry
            total = self._cells.shape[1]
            for layer in range(first_layer, first_layer + num_layers):
                if self._events.now < since + seconds * (layer + 1) / total:
                    found[layer - first_layer] = before[layer]
        return found
