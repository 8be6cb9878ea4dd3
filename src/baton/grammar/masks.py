"""The matchers of the requests that run, on the rank that samples: which tokens may come next.

Theory.  A matcher follows the tokens that its request has generated; between them it fills the request's
row of `masks`, a bit for each token of the vocabulary, which the sampler applies.  What it knows is a
function of the grammar and these tokens, so whoever admits a request again, here or at another instance,
gets the same masks.

The last bit of what llguidance fills says that the answer may end here (`vocabulary.py`); then the
request's stop tokens may come.  No row is ever empty: a request whose matcher fails, or leaves nothing to
choose from, fails by itself (`failures`), and the rows of others do not know.

Grammars are compiled in a thread, from when their request is admitted until its prompt has been computed,
and are kept: a copy of a compiled one costs microseconds.  Masks are filled by another thread while the
model computes, if there is a core for it (`beside`), else by as many threads as compute, when that is
done.  llguidance leaves the interpreter alone meanwhile.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from baton.grammar.limits import parser_limits
from baton.protocol.sampling import Constraint, Stopping

log = logging.getLogger(__name__)

_KEPT = 64
"""Compiled grammars."""
_LONGEST_MESSAGE = 300

Int32Array = npt.NDArray[np.int32]
Bits = npt.NDArray[np.uint32]


class MatchingError(RuntimeError):
    """A matcher cannot follow its request."""


class Masks:
    """The constraints of all slots.  Driven by the thread of the steps."""

    def __init__(
        self,
        tokenizer: Callable[[], LLTokenizer],
        masks: Bits,
        masked: npt.NDArray[np.uint8],
        vocab_size: int,
        *,
        threads: int,
        beside: bool,
    ) -> None:
        """`masks` [slots, words of 32 bits] and `masked` [slots] are what the sampler looks at.
        `tokenizer` makes what matchers need (`vocabulary.matching_tokenizer`) when it is first called,
        and may raise."""
        self._masks, self._masked = masks, masked
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._beside = beside
        self._threads = threads
        self._requests: dict[int, _Request] = {}
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._compiling: ThreadPoolExecutor | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._executor: LLExecutor | None = None
        self._filling: Future[dict[int, str]] | None = None
        self._rows: list[int] = []

    @property
    def any(self) -> bool:
        """Whether any slot's request is constrained."""
        return bool(self._requests)

    def admit(
        self, slot: int, generated: Int32Array, constraint: Constraint | None, stopping: Stopping
    ) -> None:
        """A request takes the slot; `generated`: its tokens after the prompt."""
        self.release(slot)
        if constraint is None:
            return
        if self._compiling is None:
            self._compiling = ThreadPoolExecutor(1, "grammars")
        ends = [token for token in stopping.stop_token_ids if token < self._vocab_size]
        matcher = self._compiling.submit(self._matcher, constraint.grammar, generated.tolist())
        self._requests[slot] = _Request(matcher, constraint, ends, len(generated))
        self._masked[slot] = 1

    def release(self, slot: int) -> None:
        if self._requests.pop(slot, None) is not None:
            self._masked[slot] = 0

    def begin(self, slots: Int32Array) -> None:
        """These are sampled at the end of the step that begins."""
        self._rows = [slot for slot in slots.tolist() if slot in self._requests]
        if self._beside and self._rows:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, "masks")
            self._filling = self._pool.submit(self._fill, self._rows)

    def failures(self) -> dict[int, str]:
        """Waits until the masks of the slots that were given to `begin` are there: slot → why it has none."""
        if not self._rows:
            return {}
        filling, self._filling = self._filling, None
        return self._fill(self._rows) if filling is None else filling.result()

    def chosen(self, slots: Int32Array, tokens: Int32Array) -> None:
        """What was sampled for slots, of those that were given to `begin`."""
        if self._rows:
            for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
                request = self._requests.get(slot)
                if request is not None:
                    request.new.append(token)
            self._rows = []

    def close(self) -> None:
        for pool in (self._compiling, self._pool):
            if pool is not None:
                pool.shutdown(wait=False, cancel_futures=True)

    # ---- in the threads, or in place of them

    def _matcher(self, grammar: str, generated: list[int]) -> LLMatcher:
        """Raises `MatchingError`."""
        fresh = self._compiled.get(grammar)
        if fresh is None:
            fresh = LLMatcher(self._tokenizer(), grammar, log_level=0, limits=parser_limits())
            _check(fresh)
            self._compiled[grammar] = fresh
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        else:
            self._compiled.move_to_end(grammar)
        matcher = fresh.deep_copy()
        if generated:
            matcher.consume_tokens(generated)
            _check(matcher)
        return matcher

    def _fill(self, rows: list[int]) -> dict[int, str]:
        failures: dict[int, str] = {}
        ready: list[tuple[LLMatcher, int]] = []
        for slot in rows:
            try:
                ready.append((self._requests[slot].advanced(), slot))
            except Exception as error:  # (also what the vocabulary could not be made of)
                failures[slot] = _why(error)
        width = 4 * self._masks.shape[1]
        if len(ready) == 1 or self._threads == 1:
            for matcher, slot in ready:
                matcher.unsafe_compute_mask_ptr(self._masks.ctypes.data + slot * width, width)
        elif ready:
            if self._executor is None:
                self._executor = LLExecutor(self._threads)
            self._executor.unsafe_compute_mask_ptr(ready, self._masks.ctypes.data, width, len(self._masks))
        for matcher, slot in ready:
            try:
                _check(matcher)
                self._requests[slot].end(self._masks[slot], self._vocab_size)
            except MatchingError as error:
                failures[slot] = _why(error)
        return failures


class _Request:
    """One request's matcher and what ends it."""

    __slots__ = ("_constraint", "_count", "_ends", "_future", "_matcher", "new")

    def __init__(
        self, matcher: Future[LLMatcher], constraint: Constraint, ends: list[int], generated: int
    ) -> None:
        self._future = matcher
        self._matcher: LLMatcher | None = None
        self._constraint = constraint
        self._ends = ends
        self._count = generated
        self.new: list[int] = []
        """Sampled, and not given to the matcher yet."""

    def advanced(self) -> LLMatcher:
        """The matcher, with all tokens.  Raises what compiling did, and `MatchingError`."""
        if self._matcher is None:
            self._matcher = self._future.result()
        if self.new:
            self._matcher.consume_tokens(self.new)
            self._count += len(self.new)
            self.new = []
            _check(self._matcher)
        return self._matcher

    def end(self, row: Bits, vocab_size: int) -> None:
        """Lets the answer end, or not: changes its mask.  Raises `MatchingError` if nothing may follow."""
        word, bit = vocab_size >> 5, np.uint32(1 << (vocab_size & 31))
        accepts = bool(row[word] & bit)
        row[word] &= ~bit
        row[word + 1 :] = 0
        stays = self._constraint.goes_on or self._count < self._constraint.min_tokens
        if stays:
            kept = row.copy()
            for token in self._ends:
                kept[token >> 5] &= ~np.uint32(1 << (token & 31))
            if kept.any():
                row[:] = kept
                return
        if accepts:
            for token in self._ends:
                row[token >> 5] |= np.uint32(1 << (token & 31))
        if not (accepts and self._ends) and not row.any():
            raise MatchingError("no token of the vocabulary may follow")


def _check(matcher: LLMatcher) -> None:
    """Raises `MatchingError`."""
    if matcher.is_error():
        raise MatchingError(" ".join(matcher.get_error().split("<state>")[0].split()))


def _why(error: Exception) -> str:
    return f"structured_outputs: the grammar cannot be followed any more: {error}"[:_LONGEST_MESSAGE]
