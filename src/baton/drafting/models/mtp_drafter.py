"""Drafts of a layer of the model itself that guesses the token after the next one (`model/decoder/mtp.py`).

Theory. The layer computes position p of a text from the model's hidden state there and the token at p + 1. So
it can compute what the model has just computed, and nothing else: after a step, of each row the positions
whose next token is known by then. Of a row that sampled these are all up to its newest token, and what
follows them is the first draft. Each further one comes of the layer's own state and the draft before it; what
it writes for that is overwritten when the model has computed these positions.

*What was not seen.* The layer has no hidden states of a prefix that the model did not compute here: of blocks
that came from another instance, or were there before drafting began. Where it has computed the same tokens in
these blocks for an earlier request of the same salt, they are used (`draft_kv.py`; only the last position of
such a block may be of another next token). Else the layer sees a text that begins at the next block's
edge (`DraftText.base`), where it has all that follows: a row has no drafts up to there, and worse ones at
first. Keys are rotated by positions from that edge on, which is the same to each other.

*When.* With a fixed number of drafts, after each step. Where their number follows what they cost
(`how_many.py`) and there are to be none, hidden states wait until there are some more, as the layer's
weights then are read once for all of them.

A request that ends with its first token, as on an instance that hands it over, is not looked at.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from baton.drafting.base import Int32Array
from baton.drafting.cost import StepCost
from baton.drafting.models.draft_kv import DraftKv
from baton.drafting.models.draft_text import DraftText
from baton.drafting.models.how_many import HowMany
from baton.protocol.params.sampling import Sampling, Stopping

_MOST_WAITING = 64
"""Tokens whose hidden states wait."""

States = Any
"""[n, hidden] hidden states, which are cut and chosen from by rows."""


class MtpModel(Protocol):
    """Computes positions of some rows and writes their KV."""

    @property
    def max_len(self) -> int:
        """Its context."""

    def keep(self, states: States) -> States:
        """The same, in memory that stays when the model computes its next step."""

    def compute(
        self,
        tokens: Int32Array,
        states: Sequence[States],
        starts: Int32Array,
        counts: Int32Array,
        tables: Int32Array,
        wanted: npt.NDArray[np.int64],
    ) -> tuple[Int32Array, States]:
        """Of the positions from `starts` on the tokens after them, and the hidden states, all rows together.
        Rows of one position come first.  → of those rows `wanted` [n] the likeliest token behind it, and
        the layer's states."""


class _Text(DraftText):
    """And the hidden states behind what is computed."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.states: list[States] = []
        self.waiting = 0
        """Positions in `states`."""
        self.kept = 0
        """Of `states`, how many are in memory that stays."""

    @property
    def reached(self) -> int:
        """Positions that are computed, or wait."""
        return self.computed + self.waiting

    def begin_at(self, base: int) -> None:
        """As if there was nothing before."""
        self.base = self.computed = base
        self.clear()

    def add(self, states: States) -> None:
        self.states.append(states)
        self.waiting += len(states)

    def clear(self) -> None:
        self.states, self.waiting, self.kept = [], 0, 0


class MtpDrafter:
    """A `base.Drafter`, which `read` tells of each step as well, and `done` of its end."""

    def __init__(
        self,
        model: MtpModel,
        kv: DraftKv,
        *,
        num_slots: int,
        most: int,
        cost: StepCost | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`cost` None: each row has `most` drafts."""
        self._model = model
        self._kv = kv
        self._most = most
        self._how_many = HowMany(num_slots, most, cost)
        self._clock = clock
        self._texts: dict[int, _Text] = {}
        self._rows: list[tuple[int, int, int, int]] = []
        """Of the step: slot, first position, query tokens, place of the first one."""
        self._states: States = None
        """Of all query tokens of the step, until they are taken."""

    # ---- what the executor tells

    def admit(
        self,
        slot: int,
        tokens: Int32Array,
        num_prompt: int,
        sampling: Sampling,
        stopping: Stopping,
        salt: bytes = b"",
    ) -> None:
        self._kv.admit(slot)
        self._how_many.judged.admit(slot)
        text = _Text(slot, tokens, num_prompt, stopping, self._kv, salt)
        if text.left > 1:
            self._texts[slot] = text

    def release(self, slot: int) -> None:
        text = self._texts.pop(slot, None)
        if text is None or not text.waiting or text.base:
            return
        size = self._kv.block_size
        if text.reached // size > text.computed // size:  # a block that others may find
            self._compute([text], np.empty(0, np.int64))

    def read(
        self, slots: Int32Array, starts: Int32Array, counts: Int32Array, tables: Int32Array, states: States
    ) -> None:
        """A step was computed, and is about to be sampled: as in `StepBatch`, and the hidden states of all
        its query tokens, which are valid until `done`."""
        self._kv.see(slots, starts + counts, tables)
        firsts = np.cumsum(counts, dtype=np.int64) - counts
        rows = zip(slots.tolist(), starts.tolist(), counts.tolist(), firsts.tolist(), strict=True)
        self._rows = [row for row in rows if row[0] in self._texts]
        self._states = states

    def see(self, slots: Int32Array, ends: Int32Array, tables: Int32Array, first_prompt: int) -> None:
        """(`read` has seen them.)"""

    def after(self, slots: Int32Array, runs: Int32Array, tokens: Int32Array) -> None:
        self._how_many.waited()
        first = 0
        for slot, run in zip(slots.tolist(), runs.tolist(), strict=True):
            text = self._texts.get(slot)
            if text is not None:
                came = tokens[first : first + run]
                self._how_many.judged.judge(slot, came.tolist())
                text.append(came)
            first += run

    def took(self, tokens: int, seconds: float) -> None:
        self._how_many.took(tokens, seconds)

    def done(self) -> None:
        """The step is over."""
        self._take()
        waiting = [text for text in self._texts.values() if text.waiting]
        if sum(text.waiting for text in waiting) >= _MOST_WAITING:
            self._compute(waiting, np.empty(0, np.int64))
            return
        for text in waiting:
            for place in range(text.kept, len(text.states)):
                text.states[place] = self._model.keep(text.states[place])
            text.kept = len(text.states)

    def weights_changed(self) -> None:
        """The layer has others.  No slot is taken."""
        self._kv.forget()

    # ---- drafts

    def propose(self, slots: Int32Array) -> dict[int, Int32Array]:
        self._take()
        texts = [text for text in map(self._texts.get, slots.tolist()) if text is not None]
        texts = [text for text in texts if self._may(text)]
        if not texts:
            return {}
        most = self._how_many.number(np.array([text.slot for text in texts], np.int32), len(slots))
        if most:
            self._how_many.drafted()
            return self._draft(texts, most)
        if not self._how_many.time_to_try(len(slots)):
            return {}
        text = min(texts, key=lambda text: text.waiting)
        return self._draft([text], 1) if self._how_many.may_try(len(slots), 0.0) else {}

    def _may(self, text: _Text) -> bool:
        if text.left <= 1 or text.over or text.length > self._model.max_len:
            return False
        return text.waiting > 0 and text.reached == text.length - 1

    def _take(self) -> None:
        """Each text gets the states of its positions whose next token is known."""
        size = self._kv.block_size
        for slot, start, count, first in self._rows:
            text = self._texts.get(slot)
            if text is None:
                continue
            stop = min(start + count, text.length - 1)
            if text.reached < start and not text.waiting and not text.base:
                text.adopt()
            if text.reached < start:
                text.begin_at(-(-start // size) * size)
            begin = max(start, text.reached)
            if begin < stop:
                text.add(self._states[first + begin - start : first + stop - start])
        self._rows, self._states = [], None

    def _draft(self, texts: list[_Text], most: int) -> dict[int, Int32Array]:
        self._kv.take_back()
        wanted = {text.slot: self._fitting(text, most) for text in texts}
        order = self._in_order([text for text in self._texts.values() if text.waiting])
        rows = np.array([row for row, text in enumerate(order) if text.slot in wanted], np.int64)
        texts = [order[row] for row in rows.tolist()]
        began = self._clock()
        small = all(text.waiting <= self._most + 1 for text in order)
        tokens = sum(text.waiting for text in order)
        found, states = self._compute(order, rows, {slot: number - 1 for slot, number in wanted.items()})
        now = self._clock()
        if small:
            self._how_many.own_took(tokens, now - began)
        drafts: list[list[int]] = [[token] for token in found.tolist()]
        going = list(range(len(texts)))
        for place in range(1, most):
            kept = [
                at
                for at, row in enumerate(going)
                if place < wanted[texts[row].slot] and drafts[row][-1] not in texts[row].stops
            ]
            if not kept:
                break
            going, states = [going[at] for at in kept], states[kept]
            chosen = [texts[row] for row in going]
            began = now
            found, states = self._model.compute(
                np.array([drafts[row][-1] for row in going], np.int32),
                [states],
                np.array([text.length - 2 + place - text.base for text in chosen], np.int32),
                np.ones(len(going), np.int32),
                self._tables(chosen, [text.length - 1 + place for text in chosen]),
                np.arange(len(going)),
            )
            now = self._clock()
            self._how_many.own_took(len(going), now - began)
            for row, token in zip(going, found.tolist(), strict=True):
                drafts[row].append(token)
        for text, guess in zip(texts, drafts, strict=True):
            self._how_many.judged.note(text.slot, guess)
        return {text.slot: np.array(guess, np.int32) for text, guess in zip(texts, drafts, strict=True)}

    def _fitting(self, text: _Text, most: int) -> int:
        """Drafts of a row: they end with the request, the context, and its blocks."""
        number = min(most, text.left - 1, self._model.max_len - text.length + 1)
        return self._kv.lend(text.slot, text.length - 2 + number) - text.length + 2

    @staticmethod
    def _in_order(texts: list[_Text]) -> list[_Text]:
        return sorted(texts, key=lambda text: text.waiting > 1)

    def _compute(
        self, texts: list[_Text], wanted: npt.NDArray[np.int64], ahead: dict[int, int] | None = None
    ) -> tuple[Int32Array, States]:
        """All that waits of these texts.  `ahead`: of slots, how many positions behind are written next."""
        texts = self._in_order(texts)
        for text in texts:
            text.write(text.reached + (ahead or {}).get(text.slot, 0))
        found = self._model.compute(
            np.concatenate([text.between(text.computed + 1, text.reached + 1) for text in texts]),
            [states for text in texts for states in text.states],
            np.array([text.computed - text.base for text in texts], np.int32),
            np.array([text.waiting for text in texts], np.int32),
            self._tables(texts, [text.reached for text in texts]),
            wanted,
        )
        for text in texts:
            stop = text.reached
            text.clear()
            text.wrote(stop)
        return found

    def _tables(self, texts: list[_Text], stops: list[int]) -> Int32Array:
        """For positions of these texts below `stops`."""
        size = self._kv.block_size
        ends = [(stop - 1) // size + 1 for stop in stops]
        begins = [text.base // size for text in texts]
        width = max(end - begin for begin, end in zip(begins, ends, strict=True))
        found: Int32Array = np.zeros((len(texts), width), np.int32)
        for row, (text, begin, end) in enumerate(zip(texts, begins, ends, strict=True)):
            found[row, : end - begin] = self._kv.tables[text.slot, begin:end]
        return found
