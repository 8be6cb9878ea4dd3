"""Drafts of a second, smaller model with the same vocabulary.

Theory. After a step the draft model computes what it has not seen of the rows' texts, mostly their newest
tokens, and so the likeliest next token of each; then that token, and so the one after it; all rows together.

*Greedily, whatever the request's temperature.* A draft is right if it is the token that the request's seed
draws at that position from the serving model's probabilities p. A draft that does not look at the draw is
right with the chance p(draft), which is largest for the likeliest token. To draw the draft too, with the same
random number, could be right more often, but not in the order of the vocabulary, which Baton samples in:
where the two models differ at one token, the places of all tokens behind it are shifted, and the same number
falls on another token. And it would need the request's penalties, filters and grammar a second time.

*Catching up.* The draft model lacks the KV of a prompt, of blocks that came from elsewhere, and of steps in
which nothing was drafted. A row that lacks more than a run of tokens is behind: what it lacks is computed in
pieces, after steps, and it has no drafts until it has all. Others wait for a piece, so it has as many tokens
as take a quarter of a step, by what steps and pieces took; a piece for which nobody else waits, as many as
take four. No row has drafts before its second token: so a first token waits only for what other rows draft
in that step, and an instance that hands its requests over after it never runs the draft model.

*How many* says `how_many.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from baton.drafting.base import Int32Array
from baton.drafting.cost import StepCost
from baton.drafting.models.draft_kv import DraftKv
from baton.drafting.models.draft_text import DraftText
from baton.drafting.models.how_many import HowMany
from baton.protocol.params.sampling import Sampling, Stopping

_SHARE, _SHARE_ALONE = 0.25, 4.0
"""Of a step: what a piece of catching up may take, with other rows in the step and without."""
_LEAST_PIECE, _MOST_PIECE = 16, 2048
"""Tokens."""
_FIRST_PIECE = 64
"""Before anything was measured."""
_KEEP = 0.9
"""What a measured time still counts after the next one."""
_MOST_KEPT = 32
"""Steps whose tokens are looked at together, while nothing is drafted."""


class DraftModel(Protocol):
    """Computes tokens of some rows and writes their KV, as a step does."""

    @property
    def max_len(self) -> int:
        """Its context."""

    def compute(
        self, tokens: Int32Array, starts: Int32Array, counts: Int32Array, tables: Int32Array, wanted: bool
    ) -> Int32Array:
        """[R] the likeliest token after each row; if not `wanted`, nothing.  Rows of one token come first."""


class ModelDrafter:
    """A `base.Drafter`."""

    def __init__(
        self,
        model: DraftModel,
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
        self._judged = self._how_many.judged
        self._clock = clock
        self._texts: dict[int, DraftText] = {}
        self._decodes: npt.NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        """Slots that have been in a step with one token, or with drafts."""
        self._kept: list[tuple[Int32Array, Int32Array, Int32Array]] = []
        """Slots, runs and tokens of steps that the texts lack."""
        self._step_s = 0.0
        self._token_s = 0.0
        """What a step takes, and a token of a piece; 0: not known."""

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
        self._flush()
        self._kv.admit(slot)
        self._texts[slot] = DraftText(slot, tokens, num_prompt, stopping, self._kv, salt)
        self._judged.admit(slot)
        self._decodes[slot] = False

    def release(self, slot: int) -> None:
        self._flush()
        self._texts.pop(slot, None)

    def see(self, slots: Int32Array, ends: Int32Array, tables: Int32Array, first_prompt: int) -> None:
        self._kv.see(slots, ends, tables)
        self._decodes[slots[:first_prompt]] = True

    def after(self, slots: Int32Array, runs: Int32Array, tokens: Int32Array) -> None:
        self._how_many.waited()
        self._kept.append((slots, runs, tokens))
        if len(self._kept) >= _MOST_KEPT:
            self._flush()

    def took(self, tokens: int, seconds: float) -> None:
        self._step_s = _mixed(self._step_s, seconds)
        self._how_many.took(tokens, seconds)

    # ---- drafts

    def propose(self, slots: Int32Array) -> dict[int, Int32Array]:
        chosen = slots[self._decodes[slots]]
        if not len(chosen):
            return {}
        most = self._how_many.number(chosen, len(slots))
        if not most:
            return self._try(chosen, len(slots))
        self._how_many.drafted()
        self._flush()
        texts = [text for text in map(self._texts.__getitem__, chosen.tolist()) if self._may(text)]
        return self._draft(self._caught_up(texts, len(slots)), most)

    def _may(self, text: DraftText) -> bool:
        return text.left > 1 and not text.over and text.length <= self._model.max_len

    def _try(self, slots: Int32Array, rows: int) -> dict[int, Int32Array]:
        """One draft of the row that lacks least, if there is time for it."""
        if not self._how_many.time_to_try(rows):
            return {}
        self._flush()
        texts = [text for text in map(self._texts.__getitem__, slots.tolist()) if self._may(text)]
        if not texts:
            return {}
        text = min(texts, key=lambda text: text.missing)
        text.adopt()
        if not self._how_many.may_try(rows, text.missing * self._token_s):
            return {}
        return self._draft(self._caught_up([text], rows), 1)

    def _caught_up(self, texts: Sequence[DraftText], rows: int) -> list[DraftText]:
        """Those that lack no more than a run, after a piece of what others lack."""
        behind = [text for text in texts if text.missing > self._most + 1]
        if not behind:
            return list(texts)
        for text in behind:
            text.adopt()
        behind = [text for text in behind if text.missing > self._most + 1]
        if behind:
            self._catch_up(sorted(behind, key=lambda text: text.missing), rows)
        return [text for text in texts if text.missing <= self._most + 1]

    def _catch_up(self, texts: Sequence[DraftText], rows: int) -> None:
        room = _FIRST_PIECE
        if self._token_s and self._step_s:
            share = _SHARE_ALONE if rows == len(texts) == 1 else _SHARE
            room = int(share * self._step_s / self._token_s)
            room = min(max(room, _LEAST_PIECE), _MOST_PIECE)
        rows_of: list[tuple[DraftText, int, int]] = []
        for text in texts:
            count = min(text.missing - 1, room)
            if not count:
                break
            rows_of.append((text, text.computed, text.computed + count))
            room -= count
        began = self._clock()
        self._compute(rows_of, wanted=False)
        taken, tokens = self._clock() - began, sum(stop - start for _, start, stop in rows_of)
        self._token_s = _mixed(self._token_s, taken / tokens)
        for text, _, stop in rows_of:
            text.wrote(stop)

    def _draft(self, texts: list[DraftText], most: int) -> dict[int, Int32Array]:
        self._kv.take_back()
        numbers = [(text, self._fitting(text, most)) for text in texts]
        numbers = sorted((one for one in numbers if one[1]), key=lambda one: one[0].missing)
        if not numbers:
            return {}
        texts, wanted = [text for text, _ in numbers], [number for _, number in numbers]
        began = self._clock()
        found = self._compute(
            [(text, text.computed, text.length) for text in texts],
            wanted=True,
            ahead=[number - 1 for number in wanted],
        )
        now = self._clock()
        self._how_many.own_took(sum(text.missing for text in texts), now - began)
        drafts: list[list[int]] = [[token] for token in found.tolist()]
        lengths: Int32Array = np.array([text.length for text in texts], np.int32)
        slots: Int32Array = np.array([text.slot for text in texts], np.int32)
        for text in texts:
            text.wrote(text.length)
        going = np.arange(len(texts))
        for place in range(1, most):
            kept = [
                row
                for row in going.tolist()
                if place < wanted[row] and drafts[row][-1] not in texts[row].stops
            ]
            if not kept:
                break
            going = np.array(kept)
            began = now
            found = self._model.compute(
                np.array([drafts[row][-1] for row in kept], np.int32),
                lengths[going] + np.int32(place - 1),
                np.ones(len(kept), np.int32),
                self._tables(slots[going], int(lengths[going].max()) + place),
                True,
            )
            now = self._clock()
            self._how_many.own_took(len(kept), now - began)
            for row, token in zip(kept, found.tolist(), strict=True):
                drafts[row].append(token)
        for text, guess in zip(texts, drafts, strict=True):
            text.drafts = guess
            self._judged.note(text.slot, guess)
        return {text.slot: np.array(guess, np.int32) for text, guess in zip(texts, drafts, strict=True)}

    def _fitting(self, text: DraftText, most: int) -> int:
        """Drafts of a row: they end with the request, the draft model's context, and its blocks."""
        number = min(most, text.left - 1, self._model.max_len - text.length + 1)
        return self._kv.lend(text.slot, text.length + number - 1) - text.length + 1

    def _compute(
        self,
        rows: Sequence[tuple[DraftText, int, int]],
        *,
        wanted: bool,
        ahead: Sequence[int] | None = None,
    ) -> Int32Array:
        """Of each of these texts the tokens from a place to another.  `ahead`: of each row how many positions
        behind them are written next."""
        behind = ahead or [0] * len(rows)
        for (text, _, stop), more in zip(rows, behind, strict=True):
            text.write(stop + more)
        order = sorted(range(len(rows)), key=lambda row: rows[row][2] - rows[row][1] > 1)
        assert not wanted or order == list(range(len(rows)))
        chosen = [rows[row] for row in order]
        return self._model.compute(
            np.concatenate([text.between(start, stop) for text, start, stop in chosen]),
            np.array([start for _, start, _ in chosen], np.int32),
            np.array([stop - start for _, start, stop in chosen], np.int32),
            self._tables(np.array([text.slot for text, _, _ in chosen]), max(stop for *_, stop in chosen)),
            wanted,
        )

    def _tables(self, slots: npt.NDArray[np.integer], stop: int) -> Int32Array:
        """Of these slots, for positions below `stop`."""
        found: Int32Array = self._kv.tables[slots, : (stop - 1) // self._kv.block_size + 1]
        return found

    # ---- texts

    def _flush(self) -> None:
        """The texts get the tokens of all steps."""
        if not self._kept:
            return
        slots, runs, tokens = (np.concatenate(parts) for parts in zip(*self._kept, strict=True))
        self._kept.clear()
        of_token = np.repeat(slots, runs)
        order = np.argsort(of_token, kind="stable")
        of_token, tokens = of_token[order], tokens[order]
        begins = np.flatnonzero(np.diff(of_token, prepend=-1))
        ends = np.append(begins[1:], len(of_token))
        for slot, begin, end in zip(of_token[begins].tolist(), begins.tolist(), ends.tolist(), strict=True):
            text, came = self._texts[slot], tokens[begin:end]
            if text.drafts:
                self._judged.judge(slot, came.tolist())
            text.append(came)


def _mixed(before: float, seconds: float) -> float:
    return seconds if before == 0 else _KEEP * before + (1 - _KEEP) * seconds
