"""Which prompts the next step computes, and how many tokens of them, beside the rows that decode.

Theory. A step runs the model over rows that decode (one token each) and over pieces of prompts. As long as
it takes, the reader of a stream waits for the next token, and all other prompts wait; but each step also
has a fixed cost, so many small steps are slower in all than few large ones. This policy weighs the two by
the costs that the engine has measured (`Pace`). It is pure: all ranks call it with the same arguments and
choose the same. All rows that decode are in every step, because a row costs there what it costs alone, or
less; so two questions are left.

*Whose prompt?*  The smallest first of:

1. priority; that of a request which waits for this prompt's blocks, if that one is more urgent;
2. whether the request has tokens already, and only its KV is computed again;
3. whether others have passed it for too long: since it came, more tokens of later prompts were computed than
   half of its own tokens and its computed ones together;
4. how many of its tokens are left, as the shortest prompt has its first token soonest.

Without 3 a long prompt would wait as long as short ones come; with it, of two tokens one is its own. A step
takes whole prompts as far as it can, rather than pieces of several.

*How many tokens?*

* A client reads a stream of a row that decodes: as many as fit in the time to its next token. That is
  `itl_target_s`; without it, the longest of 8 times the shortest step, 3 times this step without prompts,
  and 10 ms.
* Nobody reads a stream, but somebody waits for the first token of a prompt: so many that the step's fixed
  cost is 3 % of theirs (0.5 % if it is the only prompt), and at least as many as fit in 6 times the
  shortest step.
* All clients want whole answers only: as many as fit in `max_num_batched_tokens`.

A prompt that needs a little more than that is not cut (unless there is an `itl_target_s`); one that is cut
has equal pieces. With a `ttft_target_s`, a prompt that would miss it is cut less, if it meets it then. How
long the prompt has waited is what it waited in the engine (`Admit.waited`), and from then on the time that
the steps since should have taken: nobody reads a clock here, as the clocks of two ranks differ.

A token's result does not depend on all this: each piece is computed at its positions in the prompt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from baton.protocol.config import InstanceConfig
from baton.protocol.messages.commands import Pace, Reprioritize
from baton.protocol.params.sampling import LISTED_LOGPROBS

LOGPROBS_A_STEP = 1 << 17
"""Of prompts' tokens, where many of each are wanted: a vocabulary's."""
BESIDE_STREAMS = 8.0
"""Times the shortest step: a step with prompts beside streams."""
BESIDE_ROWS = 3.0
"""Times the step without prompts, at least: prompts get two thirds of the time, also beside many streams."""
UNNOTICED_S = 0.01
"""Seconds: no reader of a stream notices a shorter wait.  Without it a model with steps of 1 ms would cut
prompts for nothing."""
ALONE = 6.0
"""Times the shortest step, at least, where nobody reads a stream."""
LOSS = 0.03
"""Of the speed of prompts, where others wait for the end of the step."""
LOSS_ALONE = 0.005
SLACK = 1.25
"""A prompt is not cut for less than this times what a step should take, beside streams."""
SLACK_ALONE = 1.5
LEAST = 16
"""Tokens: smaller pieces are not worth their step."""
UNKNOWN_BESIDE, UNKNOWN_ALONE = 128, 512
"""Tokens, before anything was measured."""


@dataclass(slots=True)
class Prompt:
    """What is to be computed of the tokens of a slot."""

    slot: int
    start: int
    """Tokens that are computed."""
    left: int
    """Tokens that are not, at least 1."""
    priority: int
    resumed: bool
    """It had tokens before."""
    patient: bool
    """Nobody waits for its first token as such."""
    waited: float
    """Seconds since it came, when it was admitted."""
    number: int = 0
    """Counts admissions."""
    size: int = 0
    """`left` at the beginning."""
    passed: int = 0
    """Tokens that were computed since of prompts that were admitted later."""
    age: float = 0.0
    """Seconds that the steps since should have taken."""

    @property
    def rank(self) -> tuple[int, bool, bool, int, int]:
        """Smaller is computed first."""
        overdue = self.passed > self.size // 2 + (self.size - self.left)
        in_order = overdue or self.resumed
        return self.priority, not self.resumed, not overdue, 0 if in_order else self.left, self.number


class Composition:
    """Chooses pieces.  Targets in seconds; None: none is given."""

    def __init__(self, itl_target_s: float | None = None, ttft_target_s: float | None = None) -> None:
        self.pace: Pace | None = None
        self._itl_target = itl_target_s
        self._ttft_target = ttft_target_s
        self._admissions = 0
        self.prompts: dict[int, Prompt] = {}
        """By slot, in order of admission."""

    def admit(self, prompt: Prompt) -> None:
        self._admissions += 1
        prompt.number, prompt.size = self._admissions, prompt.left
        self.prompts[prompt.slot] = prompt

    def reprioritize(self, command: Reprioritize) -> None:
        """Harmless for a prompt that is computed."""
        prompt = self.prompts.get(command.slot)
        if prompt is not None:
            prompt.priority, prompt.patient = command.priority, command.patient

    def leave(self, slot: int) -> None:
        """Its prompt is computed, or its epoch over."""
        self.prompts.pop(slot, None)

    def back(self, prompt: Prompt) -> None:
        """It has left too early."""
        self.prompts[prompt.slot] = prompt
        self.prompts = dict(sorted(self.prompts.items(), key=lambda item: item[1].number))

    def again(self, slot: int) -> None:
        """The last token that was computed is to be computed again.  Harmless for a slot that decodes."""
        prompt = self.prompts.get(slot)
        if prompt is not None:
            prompt.start -= 1
            prompt.left += 1

    def computed(self, pieces: list[tuple[int, int]], rows: int, context: int) -> None:
        """A step was run with these (slot, tokens); to be called before those that are through `leave`."""
        counts = dict(pieces)
        later = 0
        tokens = sum(counts.values())
        start = min((self.prompts[slot].start for slot in counts), default=0)
        seconds = 0.0 if self.pace is None else self.pace.with_prompts(tokens, start, rows, context)
        for prompt in reversed(self.prompts.values()):
            count = counts.get(prompt.slot, 0)
            prompt.passed += later
            prompt.age += seconds
            prompt.start += count
            prompt.left -= count
            later += count

    def choose(self, rows: int, context: int, streaming: bool, room: int) -> list[tuple[int, int]]:
        """(slot, tokens) for a step in which so many rows decode, and read so many tokens together.

        `streaming`: a client waits for the tokens of one of them.  `room`: the most tokens, at least 1.
        There must be a prompt.
        """
        queue = sorted(self.prompts.values(), key=lambda prompt: prompt.rank)
        tokens, slack = self._tokens(queue, rows, context, streaming)
        return _fill(queue, min(tokens, room), min(int(tokens * slack), room))

    def _tokens(self, queue: list[Prompt], rows: int, context: int, streaming: bool) -> tuple[int, float]:
        """How many tokens, and how many times that a prompt may have that is not cut."""
        first, pace = queue[0], self.pace
        if not streaming:
            if all(prompt.patient for prompt in queue):
                return 1 << 30, 1.0
            if pace is None:
                return UNKNOWN_ALONE, SLACK_ALONE
            loss = LOSS if len(queue) > 1 else LOSS_ALONE
            each = max(pace.token + pace.pair * first.start, 1e-12)
            cheap = math.ceil(min(pace.base / (loss * each), 1 << 30))
            least = _fitting(pace, first.start, ALONE * pace.shortest)
            return max(cheap, least, LEAST), SLACK_ALONE
        if pace is None:
            return UNKNOWN_BESIDE, SLACK
        target, slack = self._itl_target, 1.0
        if target is None:
            alone = pace.decoding(rows, context)
            target, slack = max(BESIDE_STREAMS * pace.shortest, BESIDE_ROWS * alone, UNNOTICED_S), SLACK
        beside = pace.with_prompts(0, 0, rows, context)
        tokens = max(_fitting(pace, first.start, target - beside), LEAST)
        if self._ttft_target is not None:
            hurried = self._hurried(first, beside, self._ttft_target)
            if hurried > tokens:
                return hurried, 1.0
        return tokens, slack

    def _hurried(self, first: Prompt, beside: float, target: float) -> int:
        """Tokens a step with which the first token of this prompt is there in time; 0 if it cannot be."""
        pace = self.pace
        assert pace is not None
        work = pace.with_prompts(first.left, first.start, 0, 0) - pace.base
        spare = target - first.waited - first.age - work
        steps = int(spare / beside) if beside > 0.0 else first.left
        return math.ceil(first.left / steps) if steps >= 1 else 0


def composition_of(config: InstanceConfig) -> Composition | None:
    """None: each step takes what fits."""
    return Composition(config.itl_target_s, config.ttft_target_s) if config.auto_step_tokens else None


def _fitting(pace: Pace, start: int, seconds: float) -> int:
    """Tokens of a prompt from `start` on that take so many seconds."""
    each = max(pace.token + pace.pair * start, 1e-12)
    guess = min(max(seconds, 0.0) / each, 1 << 30)
    return int(min(max(seconds, 0.0) / (each + pace.pair * guess / 2), 1 << 30))


def _fill(queue: list[Prompt], tokens: int, most: int) -> list[tuple[int, int]]:
    """Pieces of these prompts, in their order; the first one whole if it has at most `most`."""
    pieces: list[tuple[int, int]] = []
    space = tokens
    for prompt in queue:
        if not pieces and prompt.left > tokens:
            count = prompt.left if prompt.left <= most else _equal(prompt.left, tokens)
            pieces.append((prompt.slot, count))
            return pieces
        count = min(prompt.left, space)
        if count < min(prompt.left, LEAST) and pieces:
            break
        pieces.append((prompt.slot, count))
        space -= count
        if space == 0:
            break
    return pieces


def _equal(left: int, most: int) -> int:
    """The size of pieces of at most `most` tokens, as few and as equal as can be."""
    return math.ceil(left / math.ceil(left / most))


def affordable(pieces: list[tuple[int, int]], scored: Mapping[int, int]) -> list[tuple[int, int]]:
    """Of prompts of whose tokens many log-probabilities are wanted, few tokens a step: to rank a whole
    vocabulary takes milliseconds for each of them, and all rows wait for that.

    `pieces`: (slot, tokens).  `scored`: slot → how many log-probabilities of each token."""
    kept, left = [], LOGPROBS_A_STEP
    for slot, count in pieces:
        each = scored.get(slot, 0)
        if each > LISTED_LOGPROBS:
            count = min(count, max(left // each, int(left == LOGPROBS_A_STEP)))
            left -= count * each
        if count:
            kept.append((slot, count))
    return kept
