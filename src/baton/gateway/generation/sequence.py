"""One sequence of a request: turns what the engine sends into text, counts and an end.  No I/O.

A sequence ends at a stop token or at `max_tokens` in the worker, or here when a stop string is complete.
The text of a stop token is left out (unless `include_stop_str_in_output`), its id is counted and reported.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import lru_cache

from baton.gateway.cluster.request import Chunk, EngineRequest
from baton.gateway.generation.failure import END_REASONS, EndReason, failure_of
from baton.gateway.parsing.deltas import Delta, Parsed
from baton.gateway.parsing.plan import AnswerParser, Parsing
from baton.gateway.text.detokenizer import Detokenizer, StopStrings, StopTables
from baton.gateway.text.tokenizer import Tokenizer
from baton.protocol.messages.requests import Finished
from baton.protocol.params.sampling import ASKS_FOR_GRAMMAR, TokenLogprobs
from baton.protocol.params.sampling_params import SamplingParams
from baton.protocol.routes import Routes


@dataclass(slots=True)
class Update:
    """What is new of one sequence."""

    index: int
    """Number of the sequence in its `Generation`."""
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    """Aligned with `token_ids`, or empty where none were asked for."""
    finish_reason: EndReason | None
    stop_reason: int | str | None
    """The stop string, or the id of a stop token that the user named; None for the end-of-text tokens."""
    deltas: list[Delta] | None = None
    """The same text taken apart, if that is wanted."""
    marks: list[int] | None = None
    """Of each token, with log-probabilities: how many deltas had come after it; -1: it ends a marker."""
    called: bool = False
    """With the end: there are complete calls in it."""


@dataclass(slots=True)
class Completion:
    """One sequence, complete."""

    index: int
    pieces: list[str] = field(default_factory=list)
    """Of the text, as they came."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: EndReason | None = None
    stop_reason: int | str | None = None
    parsed: Parsed | None = None
    """The text taken apart, if that is wanted."""
    called: bool = False

    @property
    def text(self) -> str:
        """The pieces, joined when they are asked for: adding each to a string would copy it each time."""
        if len(self.pieces) > 1:
            self.pieces[:] = ["".join(self.pieces)]
        return self.pieces[0] if self.pieces else ""


class Shared:
    """What the sequences of one request have in common: made once, however many they are."""

    __slots__ = (
        "drop_output",
        "eos",
        "grammar_field",
        "params",
        "parsing",
        "shown",
        "stop_ids",
        "stops",
        "tokenizer",
    )

    def __init__(
        self,
        params: SamplingParams,
        stop_token_ids: Collection[int],
        tokenizer: Tokenizer,
        eos_token_ids: Collection[int],
        *,
        drop_output: bool = False,
        parsing: Parsing | None = None,
        grammar_field: str = "",
    ) -> None:
        self.grammar_field = grammar_field or ASKS_FOR_GRAMMAR
        self.parsing = parsing
        self.shown = frozenset[int]() if parsing is None else tokenizer.special_of(parsing.formats.markers)
        self.params = params
        self.stop_ids = _ids(tuple(stop_token_ids))
        self.tokenizer = tokenizer
        self.eos = _ids(tuple(eos_token_ids))
        self.drop_output = drop_output
        self.stops = StopTables(params.stop_strings) if params.stop_strings else None


class Sequence:
    """One sequence: turns the engine's chunks into updates.  It weighs little until it is `submitted`."""

    __slots__ = (
        "_detokenizer",
        "_drop_output",
        "_eos",
        "_held_thoughts",
        "_last_token",
        "_params",
        "_parser",
        "_repeating",
        "_shared",
        "_stop_ids",
        "_stops",
        "finish_reason",
        "first_tokens_at",
        "index",
        "last_tokens_at",
        "num_cached",
        "num_generated",
        "num_reasoning",
        "pooled",
        "prompt",
        "prompt_logprobs",
        "queued_s",
        "request",
        "routes",
        "settled",
    )

    def __init__(
        self,
        index: int,
        prompt: Seq[int],
        shared: Shared,
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        """One for each prompt token, the first None; empty unless asked for.  Complete with the first
        update."""
        self.num_generated = 0
        self.num_reasoning = 0
        """Of the generated tokens, those inside of reasoning."""
        self._held_thoughts = 0
        """Tokens of which it is not known whether they belong to it, or to the marker that ends it."""
        self.pooled = b""
        """Packed float32: the end of one that wants this of its prompt, and no tokens."""
        self.routes: list[Routes] = []
        """With the end: the experts that its tokens went to, of positions in a row, if that is wanted."""
        self.num_cached: int | None = None
        """Prompt tokens from the prefix cache; None until the end."""
        self.queued_s: float | None = None
        self.finish_reason: EndReason | None = None
        self.first_tokens_at = self.last_tokens_at = 0.0
        """When tokens came first and last (`time.monotonic()`); 0 before that."""
        self.request: EngineRequest | None = None
        """None until it is submitted, and once it is settled."""
        self.settled = False
        """It is over, and nothing is asked of it any more but what came of it."""
        self._shared = shared
        self._params = shared.params
        self._eos = shared.eos
        self._stop_ids = shared.stop_ids
        self._drop_output = shared.drop_output
        self._last_token = -1
        self._detokenizer: Detokenizer | None = None
        self._stops: StopStrings | None = None
        self._parser: AnswerParser | None = None
        self._repeating: list[int] = []
        """The last tokens, where an end by repetition is wanted."""

    @property
    def has_reasoning(self) -> bool:
        parsing = self._shared.parsing
        return parsing is not None and parsing.has_reasoning

    @property
    def routes_start(self) -> int | None:
        """The first position of the prompt whose experts are wanted; None: of none."""
        params = self._params
        return params.routed_experts_prompt_start if params.return_routed_experts else None

    def submitted(self, request: EngineRequest) -> None:
        """It is about to run, as this request."""
        self.request = request
        request.consumer = self
        params, stops = self._params, self._shared.stops
        if params.detokenize:
            self._detokenizer = self._shared.tokenizer.detokenizer(
                self.prompt,
                skip_special_tokens=params.skip_special_tokens,
                shown=self._shared.shown,
            )
        if self._shared.parsing is not None:
            self._parser = self._shared.parsing.parser()
        if stops is not None:
            self._stops = StopStrings(stops, include=params.include_stop_str_in_output)

    def settle(self) -> None:
        """Lets go what it needed to run: a request may have thousands of sequences that are over."""
        self.settled = True
        self.request = self._detokenizer = self._stops = self._parser = None

    def advance(self, chunk: Chunk) -> Update:
        """Raises `ApiError` if the sequence failed."""
        if chunk.error is not None:
            raise chunk.error
        if chunk.finished is not None:
            error = failure_of(chunk.finished, self._params, self._shared.grammar_field)
            if error is not None:
                raise error
            assert self.request is not None  # (something came for it)
            self.request.num_cached = chunk.finished.num_cached
            self.queued_s, self.pooled = chunk.finished.queued_s, chunk.finished.pooled
        self._take_prompt_logprobs(chunk)
        update = self._update(chunk.tokens)
        if chunk.logprobs:
            update.logprobs = chunk.logprobs[: len(update.token_ids)]
        if update.finish_reason is None and chunk.finished is not None:
            self._end(chunk.finished, update)
        return self._given(update)

    def take(self, tokens: list[int]) -> Update:
        """`advance` for tokens and nothing else: what happens nearly always."""
        update = self._update(tokens)
        if update.finish_reason is None and not self._drop_output:
            return update
        return self._given(update)

    def abort(self) -> Update:
        """It ends before it was submitted."""
        self.finish_reason = "abort"
        return Update(self.index, "", [], [], "abort", None)

    def _update(self, tokens: list[int]) -> Update:
        """What tokens bring, and the end if they complete a stop string."""
        deltas: list[Delta] | None = None
        marks: list[int] | None = None
        repeats = False
        if self._params.repetition_detection is not None:
            tokens, repeats = self._until_repeated(tokens)
        if self._parser is None:
            text, taken, stop = self._take_tokens(tokens)
        else:
            deltas, marks = [], [] if self._params.logprobs is not None else None
            text, taken, stop = self._parse_tokens(tokens, self._parser, deltas, marks)
        if taken < len(tokens):
            tokens = tokens[:taken]
        self.num_generated += taken
        if taken:
            self._last_token = tokens[-1]
        update = Update(self.index, text, tokens, [], None if stop is None else "stop", stop, deltas, marks)
        if stop is None and repeats:
            self._flush(update)
            update.finish_reason, update.stop_reason = "repetition", "repetition_detected"
        return update

    def _until_repeated(self, tokens: list[int]) -> tuple[list[int], bool]:
        """(as far as it does not repeat itself, whether it does).  What ends there anyway does not."""
        detection, seen = self._params.repetition_detection, self._repeating
        assert detection is not None
        for number, token in enumerate(tokens, 1):
            seen.append(token)
            count = self.num_generated + number
            if token in self._stop_ids or count == self._params.max_tokens or count < self._params.min_tokens:
                continue
            if detection.found(seen):
                return tokens[:number], True
        del seen[: -detection.reach]
        return tokens, False

    def _given(self, update: Update) -> Update:
        """Notes the end; without output where none is wanted."""
        self.finish_reason = update.finish_reason
        if self.finish_reason is not None and self.request is not None:
            self.num_cached = min(self.request.num_cached, len(self.prompt))
            self.routes = self.request.routes or []
        if self._parser is not None and update.finish_reason is not None:
            update.deltas = (update.deltas or []) + self._parser.finish(whole=update.finish_reason == "stop")
            self.num_reasoning += self._held_thoughts
            self._held_thoughts = 0
            update.called = self._parser.num_complete > 0
        if self._drop_output:
            self.num_generated = 0
            update.text, update.token_ids, update.logprobs, update.stop_reason = "", [], [], None
            update.deltas, update.called = None if update.deltas is None else [], False
            if self.finish_reason == "stop":
                update.finish_reason = self.finish_reason = "length"
        return update

    def _take_tokens(self, tokens: list[int]) -> tuple[str, int, str | None]:
        """(text, how many tokens belong to the sequence, the stop string that ended it)."""
        detokenizer = self._detokenizer
        if detokenizer is None or not tokens:
            return "", len(tokens), None
        visible = tokens
        if tokens[-1] in self._stop_ids and not self._params.include_stop_str_in_output:
            visible = tokens[:-1]
        if self._stops is None:
            return detokenizer.push(visible), len(tokens), None
        pieces: list[str] = []
        for number, token in enumerate(visible, 1):
            piece = detokenizer.push((token,))
            if self.num_generated + number <= self._params.min_tokens:
                pieces.append(self._stops.skip(piece))
                continue
            given, stop = self._stops.push(piece)
            pieces.append(given)
            if stop is not None:
                return "".join(pieces), number, stop
        return "".join(pieces), len(tokens), None

    def _parse_tokens(
        self, tokens: list[int], parser: AnswerParser, deltas: list[Delta], marks: list[int] | None
    ) -> tuple[str, int, str | None]:
        """`_take_tokens`, one token at a time: so what they count for does not depend on how they come."""
        pieces: list[str] = []
        first = self.num_generated
        for number, token in enumerate(tokens):
            was_thinking = parser.thinking
            self.num_generated = first + number
            text, _, stop = self._take_tokens([token])
            pieces.append(text)
            new = parser.push(text)
            deltas += new
            if marks is not None:
                silent = not new and not parser.holds and not text.isspace() and text != ""
                marks.append(-1 if silent else len(deltas))
            self._held_thoughts = self._held_thoughts + 1 if was_thinking and parser.thinking else 0
            if not parser.holds:
                self.num_reasoning += self._held_thoughts
                self._held_thoughts = 0
            if stop is not None:
                tokens = tokens[: number + 1]
                break
        else:
            stop = None
        self.num_generated = first
        return "".join(pieces), len(tokens), stop

    def _end(self, finished: Finished, update: Update) -> None:
        """The engine says that it is over: gives the reason, and what was held back."""
        update.finish_reason = END_REASONS[finished.reason]
        if finished.reason == "stop" and (self._params.ignore_eos or self._last_token not in self._eos):
            update.stop_reason = self._last_token
        self._flush(update)

    def _flush(self, update: Update) -> None:
        """Gives what was held back."""
        if self._detokenizer is not None:
            held = self._detokenizer.finish()
            if self._stops is not None:
                given, stop = self._stops.push(held)
                held = given + self._stops.finish()
                if stop is not None:
                    update.finish_reason, update.stop_reason = "stop", stop
            update.text += held
            if self._parser is not None:
                update.deltas = (update.deltas or []) + self._parser.push(held)

    def _take_prompt_logprobs(self, chunk: Chunk) -> None:
        for run in chunk.prompt_logprobs:
            if not self.prompt_logprobs:
                self.prompt_logprobs = [None] * len(self.prompt)
            self.prompt_logprobs[run.first : run.first + len(run.positions)] = run.positions


@lru_cache(maxsize=256)
def _ids(tokens: tuple[int, ...]) -> frozenset[int]:
    """One set for all sequences with the same ids: what many streams look at stays in the cache."""
    return frozenset(tokens)
