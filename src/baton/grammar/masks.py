"""The matchers of the requests that run, on the rank that samples: which tokens may come next.

Theory.  A matcher follows the tokens that its request has generated; between them it fills the request's
row of `masks`, a bit for each token of the vocabulary, which the sampler applies.  What it knows is a
function of the grammar and these tokens, so whoever admits a request again, here or at another instance,
gets the same masks.

The last bit of what llguidance fills says that the answer may end here (`vocabulary.py`); then the
request's stop tokens may come.  No row is ever empty: a request whose matcher fails, or leaves nothing to
choose from, fails by itself (`ready`, `chosen`), and the rows of others do not know.

Grammars are compiled from when their request is admitted until its prompt has been computed (`compiled.py`).
No step waits for one: a request whose matcher is not there when its token is due is late, and its row is
computed again in the next step.  Only where nobody else gets a token does a step wait, a moment at a time.

Masks are filled by another thread while the model computes, if there is a core for it (`beside`), else by as
many threads as compute, when that is done.  llguidance leaves the interpreter alone meanwhile.  Those behind
the drafts of a step are filled with them (`ahead.py`), or, if the sampler cannot sample all of a row's
positions together, each when the token before it is known.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from baton.grammar.ahead import Ahead
from baton.grammar.compiled import Grammars, MatchingError, Promise, check_matcher
from baton.grammar.filling import Asked, Bits, Filling, allows
from baton.grammar.limits import counted_by
from baton.grammar.spelling import Spelling
from baton.protocol.params.sampling import ASKS_FOR_GRAMMAR, UNFOLLOWABLE, Constraint, Stopping

_PATIENCE_S = 0.01
"""So long a step waits for a matcher where nobody else gets a token of it."""
_GIVE_UP_S = 60.0
"""A request whose matcher is not there by then, after it was admitted, fails."""
_SPECIAL = b"\xff"
"""Before the number of a special token, where llguidance gives a text."""
_LONGEST_MESSAGE = 300
_NO_ROOM = "strings of too many characters are counted for other requests; try again, or lower maxLength"
_NOTHING = "no token of the vocabulary may follow"

_MOST_CHARACTERS = 400_000
"""Of strings that all requests together may count: about 2 GB, if their answers go so far."""
_FEW_CHARACTERS = 4_000
"""Of one request, which nobody has to wait for."""
_TOKEN = 8
"""Characters, at most, of most tokens."""

Int32Array = npt.NDArray[np.int32]


class Ready(NamedTuple):
    """Which of the slots of a step have no mask.  All others have one."""

    failed: dict[int, str]
    """Slot → why it will never have one."""
    late: list[int]
    """Their matchers are still being made."""


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`masks` [slots, words of 32 bits] and `masked` [slots] are what the sampler looks at.
        `tokenizer` makes what matchers need (`vocabulary.matching_tokenizer`) when it is first called,
        and may raise.  `clock` shows seconds."""
        self._masks, self._masked = masks, masked
        self._vocab_size = vocab_size
        self._grammars = Grammars(tokenizer, lexers=threads)
        self._tokenizer = tokenizer
        self._spelling: Spelling | None = None
        """From when a text was first forced."""
        self._beside = beside
        self._row_filling = Filling(vocab_size, threads)
        self._ahead = Ahead(masks.shape[1], self._row_filling)
        self._looks_ahead = False
        """Whether masks behind drafts are filled, in this step."""
        self._clock = clock
        self._requests: dict[int, _Request] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._filling: Future[dict[int, str]] | None = None
        self._rows: list[int] = []
        self._alone = False
        """Whether these are all that get a token in this step."""
        self._without: set[int] = set()
        """Of these: failed or late."""

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
        ends = tuple(token for token in stopping.stop_token_ids if token < self._vocab_size)
        tokens: list[int] = generated.tolist()
        characters = min(counted_by(constraint.grammar), _TOKEN * stopping.max_tokens)
        if self._has_room(constraint.grammar, characters):
            matcher = self._grammars.matcher(constraint.grammar, list(tokens))
        else:
            matcher = Promise()
            matcher.set_exception(MatchingError(_NO_ROOM))
            characters = 0
        self._requests[slot] = _Request(matcher, constraint, ends, tokens, self._clock())
        self._requests[slot].characters = characters
        self._masked[slot] = 1

    def _has_room(self, grammar: str, characters: int) -> bool:
        """Whether one more may count so many, beside those that do."""
        if characters <= _FEW_CHARACTERS:
            return True
        counted = {grammar: characters}
        for request in self._requests.values():
            name = request.constraint.grammar
            counted[name] = max(counted.get(name, 0), request.characters)
        return sum(counted.values()) <= _MOST_CHARACTERS

    def release(self, slot: int) -> None:
        request = self._requests.pop(slot, None)
        if request is not None:
            self._masked[slot] = 0
            self._grammars.release(request.constraint.grammar, request.future)

    def begin(self, slots: Int32Array, drafts: list[list[int]] | None = None) -> bool:
        """These are sampled at the end of the step that begins.  With `drafts`, of each of them, all of
        their positions are, if it can be done: else returns False, and only the first ones are."""
        self._rows = [slot for slot in slots.tolist() if slot in self._requests]
        self._alone = len(self._rows) == len(slots)
        self._looks_ahead = drafts is not None and not any(self._requests[slot].alone for slot in self._rows)
        if drafts is not None and self._looks_ahead:
            self._ahead.begin(slots.tolist(), drafts)
        if self._beside and self._rows:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, "masks")
            self._filling = self._pool.submit(self._fill, self._rows)
        return self._looks_ahead

    def ready(self) -> Ready:
        """Waits until the masks of the slots that were given to `begin` are filled, of those that have a
        matcher by now."""
        if not self._rows:
            return Ready({}, [])
        filling, self._filling = self._filling, None
        failed = {} if filling is None else filling.result()
        self._renew(self._rows)
        left = self._rows if filling is None else self._unfilled(self._rows, failed)
        if left:
            if self._alone and len(left) == len(self._rows):
                promises = [self._requests[slot].future for slot in left]
                if not any(promise.done() for promise in promises):
                    wait(promises, _PATIENCE_S, FIRST_COMPLETED)
            failed |= self._fill(left)
            self._renew(left)
        late = self._unfilled(left, failed)
        now = self._clock()
        for slot in [slot for slot in late if now - self._requests[slot].since > _GIVE_UP_S]:
            failed[slot] = f"{ASKS_FOR_GRAMMAR}: the grammar was not compiled within {_GIVE_UP_S:g} s"
            late.remove(slot)
        self._without = {*failed, *late}
        return Ready(failed, late)

    def chosen(self, slots: Int32Array, tokens: Int32Array) -> dict[int, str]:
        """What was sampled for slots, of those that were given to `begin`.  Returns those for which no token
        could be chosen, and why: what was sampled is not in their mask."""
        failed: dict[int, str] = {}
        if self._rows:
            for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
                request = self._requests.get(slot)
                if request is None or slot in self._without:
                    continue
                if allows(self._masks, slot, token):
                    request.new = token
                else:
                    failed[slot] = _why(_NOTHING)
            self._rows = []
        return failed

    @property
    def ahead(self) -> Bits:
        """[places, words] the masks of all positions of a step whose `begin` said so; after `ready`."""
        return self._ahead.masks

    def filled_ahead(self, slot: int) -> int | None:
        """Of such a step: how many of the slot's positions have a mask; None: it has no grammar."""
        return self._ahead.filled.get(slot, 0) if slot in self._requests else None

    def chosen_ahead(self, slot: int, run: list[int]) -> tuple[int, str]:
        """`chosen`, of such a step: what was sampled for one slot, which is not late and has not failed.
        Returns how many of these tokens are in their masks, and why the next one could not be chosen."""
        request = self._requests[slot]
        first = self._ahead.first(slot)
        for number, token in enumerate(run):
            if not allows(self._ahead.masks, first + number, token):
                return number, _why(_NOTHING)
            self._read_new(request)
            request.new = token
        return len(run), ""

    def forced(self, slots: Iterable[int]) -> dict[int, list[int]]:
        """What must follow of these slots' answers, where only one text may: slot → tokens that probably
        spell it. To be asked between `chosen` and the next `begin`; slots without such a text are left
        out."""
        found: dict[int, list[int]] = {}
        for slot in slots:
            request = self._requests.get(slot)
            if request is None or request.matcher is None:
                continue
            if request.lost or request.new in request.ends:
                continue
            self._read_new(request)
            if request.matcher.is_error():
                continue  # (`ready` deals with it)
            # A matcher that was asked for a forced text stands behind it from then on, and where a special
            # token is in it, no token spells that: the mask is empty. So a copy is asked.
            asked = request.matcher.deep_copy() if request.has_special else request.matcher
            text: bytes = asked.compute_ff_bytes().partition(_SPECIAL)[0]
            if text:
                if self._spelling is None:
                    self._spelling = Spelling(self._tokenizer())
                if not request.forced:
                    request.forced = text
                if tokens := self._spelling.spell(text):
                    found[slot] = tokens
        return found

    def close(self) -> None:
        self._grammars.close()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _unfilled(self, rows: Iterable[int], failed: dict[int, str]) -> list[int]:
        return [slot for slot in rows if self._requests[slot].matcher is None and slot not in failed]

    def _renew(self, rows: Iterable[int]) -> None:
        """Matchers of their own for those whose lexers failed: what others have asked of it is not theirs."""
        for request in map(self._requests.__getitem__, rows):
            if request.lost:
                request.lost, request.alone, request.since = False, True, self._clock()
                tokens = list(request.tokens)
                request.future = self._grammars.matcher(request.constraint.grammar, tokens, alone=True)

    # ---- in the threads, or in place of them

    def _fill(self, rows: list[int]) -> dict[int, str]:
        """The masks of those whose matchers are there.  Returns who failed."""
        failed: dict[int, str] = {}
        found: list[Asked] = []
        for slot in rows:
            request = self._requests[slot]
            if request.matcher is None:
                if request.lost or not request.future.done():
                    continue
                try:
                    request.matcher = request.future.result()
                except MatchingError as error:
                    failed[slot] = _why(error)
                    continue
                except Exception as error:  # (what the vocabulary could not be made of)
                    failed[slot] = f"{ASKS_FOR_GRAMMAR}: {error}"[:_LONGEST_MESSAGE]
                    continue
            self._read_new(request)  # (microseconds; threads would take longer to begin)
            found.append(request.asked(request.matcher, slot))
        filled = self._kept(found, failed)
        self._row_filling.compute(self._masks, filled)
        filled = self._kept(filled, failed)
        self._row_filling.set_ends(self._masks, filled)
        if self._looks_ahead:
            for slot in [asked.row for asked in filled if self._requests[asked.row].alone]:
                self._ahead.stop(slot)  # (it was lost in this step)
            self._ahead.fill(self._masks, filled, self._asked)
        return failed

    def _asked(self, slot: int, matcher: LLMatcher, place: int, more: int) -> Asked:
        return self._requests[slot].asked(matcher, place, more)

    def _read_new(self, request: _Request) -> None:
        """The request's matcher, which is there, reads the token that it has not read."""
        if request.new is None:
            return
        assert request.matcher is not None
        request.matcher.consume_token(request.new)
        request.tokens.append(request.new)
        if request.forced:
            self._follow(request, request.new)
        request.new = None

    def _follow(self, request: _Request, token: int) -> None:
        """Of tokens that spell a forced text: when they have, it is known how it is spelt."""
        assert self._spelling is not None
        spelt = self._spelling.bytes_of(token)
        begins = request.forced[request.spelt :].startswith(spelt)
        if begins:
            request.spelling.append(token)
            request.spelt += len(spelt)
        if not begins or request.spelt == len(request.forced):
            self._spelling.learn(request.forced, request.spelling)
            request.forced, request.spelling, request.spelt = b"", [], 0

    def _kept(self, rows: list[Asked], failed: dict[int, str]) -> list[Asked]:
        """Those whose matchers go on; the others are noted."""
        kept = []
        for asked in rows:
            slot = asked.row
            if not asked.matcher.is_error():
                kept.append(asked)
            elif not (request := self._requests[slot]).alone:
                request.lost, request.matcher = True, None
            else:
                try:
                    check_matcher(asked.matcher)
                except MatchingError as error:
                    failed[slot] = _why(error)
        return kept


class _Request:
    """One request's matcher and what ends it."""

    __slots__ = (
        "alone",
        "characters",
        "constraint",
        "ends",
        "forced",
        "future",
        "has_special",
        "lost",
        "matcher",
        "new",
        "since",
        "spelling",
        "spelt",
        "tokens",
    )

    def __init__(
        self,
        matcher: Promise,
        constraint: Constraint,
        ends: tuple[int, ...],
        generated: list[int],
        since: float,
    ) -> None:
        self.future = matcher
        self.matcher: LLMatcher | None = None
        """From when it was first needed and there."""
        self.constraint = constraint
        self.characters = 0
        """Of strings, that its answer may count."""
        self.has_special = "<[" in constraint.grammar
        """Special tokens stand in the grammar, perhaps."""
        self.ends = ends
        self.tokens = generated
        """Those that the matcher has read."""
        self.new: int | None = None
        """Sampled, and not given to the matcher yet."""
        self.since = since
        self.lost = False
        """The matcher failed, and is to be made again ..."""
        self.alone = False
        """... which was done: its lexer is its own."""
        self.forced = b""
        """A text that was forced, of which ..."""
        self.spelling: list[int] = []
        self.spelt = 0
        """... these tokens have spelt so many bytes."""

    def asked(self, matcher: LLMatcher, row: int, more: int = 0) -> Asked:
        """A row for this matcher, which has read so many tokens more than the request's own."""
        stays = self.constraint.goes_on or len(self.tokens) + more < self.constraint.min_tokens
        return Asked(matcher, row, self.future.lexer, self.ends, stays)


def _why(problem: Exception | str) -> str:
    return f"{UNFOLLOWABLE}{problem}"[:_LONGEST_MESSAGE]
