"""`SamplingParams`: what a user asks for, in vLLM's names, validated once for HTTP and Python alike.

A `SamplingParams` cannot exist with a bad value: construction raises `InvalidParameter`, which names the
field and the fix.  What depends on the model (vocabulary, context, end-of-sequence ids) is checked when
the parameters are turned into the wire's `Sampling` and `Stopping` by `resolve`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from typing import Any

import msgspec

from baton.protocol.codec import pack_int32
from baton.protocol.params.repetition import RepetitionDetection
from baton.protocol.params.sampling import Constraint, LogitBias, Sampling, Stopping
from baton.protocol.params.structured_outputs import StructuredOutputs

MAX_CHOICES = 128
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 4096
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 16_384
MAX_ALLOWED_TOKEN_IDS = 65_536
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_LENGTH = 256
MAX_LOGPROB_TOKEN_IDS = 128
_UINT64 = (1 << 64) - 1
_INT32 = (1 << 31) - 1
LEAST_FACTOR, MOST_FACTOR = 1e-30, 1e30
"""Of what logits are multiplied or divided by, which so stay finite.  (Temperatures near to 0 count as 0.)"""


class InvalidParameter(ValueError):
    """A parameter that cannot be served.  `field` is its name, the message names it and the fix."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class RequestOutputKind(Enum):
    """What `AsyncLLM` gives while an answer comes."""

    CUMULATIVE = 0
    """All of it so far, each time."""
    DELTA = 1
    """What is new."""
    FINAL_ONLY = 2
    """Nothing before its end."""


class SamplingParams(msgspec.Struct, kw_only=True, frozen=True):
    """How to sample, when to stop and what to report.  Immutable; `replace` makes a changed copy."""

    n: int = 1
    """Sequences to generate for the prompt."""
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1 means all tokens."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    """token id → what is added to its logit, from -100 to 100."""
    stop: str | Sequence[str] | None = None
    """Strings that end the text; after construction always a tuple."""
    stop_token_ids: Sequence[int] | None = None
    """Token ids that end the text; after construction always a tuple."""
    ignore_eos: bool = False
    max_tokens: int | None = 16
    """Tokens to generate at most; None: as many as the context has room for."""
    min_tokens: int = 0
    """No stop token and no stop string counts before so many tokens."""
    seed: int | None = None
    """The same seed gives the same tokens; None: drawn at random for each request."""
    logprobs: int | None = None
    """Log-probabilities of each chosen token and of so many most likely ones; -1: of all, None: none."""
    prompt_logprobs: int | None = None
    """The same for each prompt token after the first."""
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    """Accepted for compatibility; text is decoded as the tokenizer decodes it."""
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    """False: only token ids are wanted; `text` stays empty."""
    structured_outputs: StructuredOutputs | None = None
    """What the answer must be."""
    bad_words: Sequence[str] | None = None
    """Words that do not come, as the tokenizer writes them at the beginning of a text and after a space."""
    allowed_token_ids: Sequence[int] | None = None
    """No other tokens come."""
    logprob_token_ids: Sequence[int] | None = None
    """With `logprobs`: of these tokens instead of the most likely ones, at each position."""
    repetition_detection: RepetitionDetection | None = None
    """When an answer ends because it repeats itself, with the finish reason `repetition`."""
    thinking_token_budget: int | None = None
    """Tokens of reasoning at most, of models whose format is known; None, -1: any number."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """Of `AsyncLLM` alone."""
    return_routed_experts: bool = False
    """Of a mixture of experts: which of them each token went to."""
    routed_experts_prompt_start: int = 0
    """Of the prompt's tokens, those from this position on: the others may come from the prefix cache."""

    def __post_init__(self) -> None:
        _int("n", self.n, 1, MAX_CHOICES)
        _float("temperature", self.temperature, 0.0, MOST_FACTOR)
        _float("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _int("top_k", self.top_k, -1, None)
        _float("min_p", self.min_p, 0.0, 1.0)
        _float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _float("repetition_penalty", self.repetition_penalty, LEAST_FACTOR, MOST_FACTOR)
        if self.max_tokens is not None:
            _int("max_tokens", self.max_tokens, 1, None)
        _int("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter(
                "min_tokens", f"{self.min_tokens} is more than max_tokens ({self.max_tokens}); lower it"
            )
        if self.seed is not None:
            _int("seed", self.seed, -(1 << 63), _UINT64)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _int(name, value, -1, _INT32)
        for name in (
            "ignore_eos",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "include_stop_str_in_output",
            "detokenize",
            "return_routed_experts",
        ):
            if not isinstance(getattr(self, name), bool):
                raise InvalidParameter(name, f"{getattr(self, name)!r} must be true or false")
        if self.thinking_token_budget is not None:
            _int("thinking_token_budget", self.thinking_token_budget, -1, _INT32)
        if not isinstance(self.output_kind, RequestOutputKind):
            raise InvalidParameter("output_kind", f"{self.output_kind!r} must be a RequestOutputKind")
        _int("routed_experts_prompt_start", self.routed_experts_prompt_start, 0, _INT32)
        if self.structured_outputs is not None:
            if not isinstance(self.structured_outputs, StructuredOutputs):
                raise InvalidParameter("structured_outputs", "must be StructuredOutputs")
            problem = self.structured_outputs.problem()
            if problem is not None:
                raise InvalidParameter("structured_outputs", problem)
        self._normalise()

    def _normalise(self) -> None:
        stop = _stop_strings(self.stop)
        if stop and not self.detokenize:
            raise InvalidParameter("stop", "needs text; leave detokenize on or give stop_token_ids")
        msgspec.structs.force_setattr(self, "stop", stop)
        ids = _sequence("stop_token_ids", self.stop_token_ids)
        if len(ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidParameter("stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} ids, not {len(ids)}")
        for token in ids:
            _int("stop_token_ids", token, 0, _INT32)
        msgspec.structs.force_setattr(self, "stop_token_ids", ids)
        self._check_tokens()
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise InvalidParameter("logit_bias", "must map token ids to numbers")
            msgspec.structs.force_setattr(self, "logit_bias", _logit_bias(self.logit_bias))

    def _check_tokens(self) -> None:
        """What names tokens and words."""
        for name, most in (
            ("allowed_token_ids", MAX_ALLOWED_TOKEN_IDS),
            ("logprob_token_ids", MAX_LOGPROB_TOKEN_IDS),
        ):
            given = getattr(self, name)
            if given is None:
                continue
            ids = _sequence(name, given)
            if not ids:
                raise InvalidParameter(name, "the list is empty; give at least one id, or leave it out")
            if len(ids) > most:
                raise InvalidParameter(name, f"at most {most} ids, not {len(ids)}")
            for token in ids:
                _int(name, token, 0, _INT32)
            msgspec.structs.force_setattr(self, name, tuple(dict.fromkeys(ids)))
        if self.logprob_token_ids is not None and self.logprobs is None:
            raise InvalidParameter("logprob_token_ids", "set logprobs as well")
        words = _sequence("bad_words", self.bad_words)
        if len(words) > MAX_BAD_WORDS:
            raise InvalidParameter("bad_words", f"at most {MAX_BAD_WORDS} words, not {len(words)}")
        for word in words:
            if not isinstance(word, str) or not word.strip():
                raise InvalidParameter("bad_words", f"{word!r} must be a text with more than spaces in it")
            if len(word) > MAX_BAD_WORD_LENGTH:
                raise InvalidParameter(
                    "bad_words", f"at most {MAX_BAD_WORD_LENGTH} characters each, not {len(word)}"
                )
        msgspec.structs.force_setattr(self, "bad_words", words)
        if self.repetition_detection is not None:
            if not isinstance(self.repetition_detection, RepetitionDetection):
                raise InvalidParameter("repetition_detection", "must be RepetitionDetection")
            problem = self.repetition_detection.problem()
            if problem is not None:
                raise InvalidParameter("repetition_detection", problem)

    def replace(self, **changes: Any) -> SamplingParams:
        """A validated copy with these fields changed."""
        return msgspec.structs.replace(self, **changes)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, as it is after construction."""
        return self.stop  # type: ignore[return-value]


FIELDS = frozenset(SamplingParams.__struct_fields__)


def make_params(
    defaults: Mapping[str, Any], given: Mapping[str, Any], *, max_tokens: int | None = 16
) -> SamplingParams:
    """Parameters from the model's defaults overridden by what the user gave (None: not given).

    Entries of `defaults` that are not parameters are ignored; of `given` they are an error.
    `max_tokens` is for requests where neither says any (None: what the context has room for).
    """
    values = {name: value for name, value in defaults.items() if name in FIELDS and value is not None}
    for name, value in given.items():
        if name not in FIELDS:
            raise InvalidParameter(name, "is not a sampling parameter")
        if value is not None:
            values[name] = value
    values.setdefault("max_tokens", max_tokens)
    return SamplingParams(**values)


def resolve(
    params: SamplingParams,
    *,
    seed: int,
    room: int,
    eos_token_ids: Collection[int],
    vocab_size: int,
    grammar: str = "",
    bad_words: Sequence[Sequence[int]] = (),
) -> tuple[Sampling, Stopping]:
    """The wire's form for one sequence; the others of a request differ in `seed` and `max_tokens` alone.

    `grammar`: what `structured_outputs` or whatever else binds the answer was compiled to.  Then the end
    is the grammar's: it has an end token also with `ignore_eos`, and `min_tokens` is looked at together
    with it.

    `bad_words`: those of `params` as tokens.  `seed` as `choice_seed` gives it, `room` is how many tokens
    the context holds after the prompt (>= 1), `vocab_size` 0 if unknown.  Raises `InvalidParameter` for
    token ids outside the vocabulary, and for a grammar where nothing could end an answer.
    """
    if vocab_size:
        for name, ids in (
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias),
            ("allowed_token_ids", params.allowed_token_ids),
            ("logprob_token_ids", params.logprob_token_ids),
        ):
            token = max(ids or (0,))
            if token >= vocab_size:
                raise InvalidParameter(
                    name, f"token id {token} is outside the vocabulary of {vocab_size} tokens"
                )
    stop_ids = set(params.stop_token_ids or ())
    if grammar or not params.ignore_eos:
        stop_ids.update(token for token in eos_token_ids if not vocab_size or token < vocab_size)
    if grammar and not stop_ids:
        raise InvalidParameter(
            "structured_outputs", "this model has no end token; give stop_token_ids that end an answer"
        )
    max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    sampling = Sampling(
        seed=seed & _UINT64,
        temperature=float(params.temperature),
        top_p=float(params.top_p),
        top_k=min(max(params.top_k, 0), _INT32),
        min_p=float(params.min_p),
        repetition_penalty=float(params.repetition_penalty),
        presence_penalty=float(params.presence_penalty),
        frequency_penalty=float(params.frequency_penalty),
        logit_bias=LogitBias.of(params.logit_bias) if params.logit_bias else None,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        constraint=Constraint(grammar, params.min_tokens, params.ignore_eos) if grammar else None,
        allowed=pack_int32(params.allowed_token_ids or ()),
        bad_words=tuple(map(pack_int32, bad_words)),
        logprob_ids=pack_int32(params.logprob_token_ids or ()),
        routes_from=params.routed_experts_prompt_start if params.return_routed_experts else None,
    )
    stopping = Stopping(
        max_tokens=max_tokens,
        min_tokens=0 if grammar else min(params.min_tokens, max_tokens),
        stop_token_ids=tuple(sorted(stop_ids)),
    )
    return sampling, stopping


def _int(name: str, value: object, low: int | None, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidParameter(name, f"{value!r} must be an integer")
    _check_range(name, value, low, high, open_low=False)


def _float(
    name: str, value: object, low: float | None, high: float | None, *, open_low: bool = False
) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
        raise InvalidParameter(name, f"{value!r} must be a finite number")
    _check_range(name, value, low, high, open_low=open_low)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # (an integer)
        return False


def _check_range(name: str, value: float, low: float | None, high: float | None, *, open_low: bool) -> None:
    too_low = low is not None and (value <= low if open_low else value < low)
    if not too_low and (high is None or value <= high):
        return
    lower = "" if low is None else f"more than {low}" if open_low else f"at least {low}"
    upper = "" if high is None else f"at most {high}"
    raise InvalidParameter(name, f"{value} must be {' and '.join(filter(None, (lower, upper)))}")


def _sequence(name: str, value: object) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence | set | frozenset):
        raise InvalidParameter(name, f"{value!r} must be a list")
    return tuple(value)


def _stop_strings(value: object) -> tuple[str, ...]:
    stop = (value,) if isinstance(value, str) else _sequence("stop", value)
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidParameter("stop", f"at most {MAX_STOP_STRINGS} strings, not {len(stop)}")
    for text in stop:
        if not isinstance(text, str):
            raise InvalidParameter("stop", f"{text!r} must be a string")
        if not text:
            raise InvalidParameter("stop", "an empty string would stop at once; leave it out")
        if len(text) > MAX_STOP_LENGTH:
            raise InvalidParameter("stop", f"at most {MAX_STOP_LENGTH} characters each, not {len(text)}")
    return stop


def _logit_bias(bias: Mapping[Any, Any]) -> dict[int, float]:
    """Keys may be strings, as JSON has no other."""
    if len(bias) > MAX_LOGIT_BIAS:
        raise InvalidParameter("logit_bias", f"at most {MAX_LOGIT_BIAS} tokens, not {len(bias)}")
    if set(map(type, bias.values())) <= {float} and set(map(type, bias)) == {int}:
        values = bias.values()
        finite = math.isfinite(sum(values))  # (min and max pass over nan)
        if finite and min(bias) >= 0 and max(bias) <= _INT32 and min(values) >= -100 and max(values) <= 100:
            return dict(bias)
    result: dict[int, float] = {}
    for key, value in bias.items():
        try:
            token = int(key)
        except (TypeError, ValueError):
            raise InvalidParameter("logit_bias", f"key {key!r} must be a token id") from None
        _int("logit_bias", token, 0, _INT32)
        _float("logit_bias", value, -100, 100)
        result[token] = float(value)
    return result


NO_TOKENS = SamplingParams(max_tokens=1, temperature=0.0, seed=0, detokenize=False)
"""Of a request that generates nothing (`protocol/params/pooling.py`)."""
