"""Flags of speculation: whether, and how, tokens are drafted for steps that confirm several at once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from baton.launch.limits import OptionError, shown
from baton.launch.options.flag import JsonObject, Options, flag

METHODS = ("auto", "ngram", "suffix")
_MODEL_METHODS = ("draft_model", "draft")
"""As vLLM calls it, and in short."""
_MTP_METHODS = ("mtp", "ernie_mtp")
"""Likewise, and as older versions of it do."""
_MOST = 64
_MOST_BY_COST = 7
"""Drafts of a model, where their number is chosen: a CPU computes eight tokens in little more than the time
of one."""
EXAMPLE = '{"method": "draft_model", "model": "DIRECTORY"}'


class _Number(NamedTuple):
    """What `--speculative-config` takes beside the method."""

    least: float
    most: float
    what: str
    methods: tuple[str, ...] = METHODS
    kind: type = int


_NUMBERS = {
    "num_speculative_tokens": _Number(1, _MOST, "a number of tokens"),
    "prompt_lookup_min": _Number(1, _MOST, "a number of tokens", ("auto", "ngram")),
    "prompt_lookup_max": _Number(1, _MOST, "a number of tokens", ("auto", "ngram")),
    "suffix_decoding_max_tree_depth": _Number(2, _MOST, "a number of tokens", ("auto", "suffix")),
    "suffix_decoding_max_cached_requests": _Number(0, 10**6, "a number of answers", ("auto", "suffix")),
    "suffix_decoding_max_cached_bytes": _Number(1 << 20, 1 << 36, "a number of bytes", ("auto", "suffix")),
    "suffix_decoding_max_spec_factor": _Number(0, 1000, "a number", ("suffix",), float),
    "suffix_decoding_min_token_prob": _Number(0, 1, "a number", ("suffix",), float),
}
"""As vLLM calls them; `suffix_decoding_max_cached_bytes` is Baton's."""
_GIVE = (
    f"give a JSON object of method ({', '.join(METHODS)}, draft_model or mtp), {', '.join(_NUMBERS)}, model"
)


def read_speculation(text: str) -> dict[str, Any]:
    """`--speculative-config` as fields of `protocol.config.Speculation`.  Raises `ValueError` with what to
    give."""
    try:
        given = json.loads(text)
    except ValueError:
        raise ValueError(f"is not JSON; {_GIVE}") from None
    if not isinstance(given, dict):
        raise ValueError(_GIVE)
    method = given.pop("method", "draft_model" if "model" in given else None)
    if method in _MODEL_METHODS:
        return _read_draft_model(given)
    if method in _MTP_METHODS:
        return _read_mtp(given, method)
    if method not in METHODS:
        raise ValueError(f"method {method!r} is not among what there is; {_GIVE}")
    if "model" in given:
        raise ValueError(f"model: method {method!r} has none; give method draft_model, or leave model away")
    for name, number in given.items():
        wanted = _NUMBERS.get(name)
        if wanted is None:
            raise ValueError(f"{name!r} is not among what there is; {_GIVE}")
        if method not in wanted.methods:
            raise ValueError(
                f"{name} is of method {' or '.join(wanted.methods)}, not of {method}; leave it away"
            )
        if type(number) not in (int, wanted.kind) or not wanted.least <= number <= wanted.most:
            bounds = f"from {shown(wanted.least)} to {shown(wanted.most)}"
            raise ValueError(f"{name} {number!r}: give {wanted.what} {bounds}")
    least, most = given.get("prompt_lookup_min"), given.get("prompt_lookup_max")
    if least is not None and most is not None and least > most:
        raise ValueError(f"prompt_lookup_min {least} is above prompt_lookup_max {most}; give at most that")
    if least is None and most is not None:  # as vLLM: one of them stands for both
        given["prompt_lookup_min"] = most
    elif most is None and least is not None:
        given["prompt_lookup_max"] = least
    return {"method": method, **given}


def _read_draft_model(given: dict[str, Any]) -> dict[str, Any]:
    model = given.pop("model", None)
    if not isinstance(model, str) or not model:
        raise ValueError(f"model: method draft_model needs a directory or a name on the hub: {EXAMPLE}")
    size = given.pop("draft_tensor_parallel_size", 1)
    if size != 1:
        raise ValueError(
            f"draft_tensor_parallel_size {size!r}: the draft model is whole on rank 0; leave it away"
        )
    return {"method": "draft", "model": model, **_read_number(given, "draft_model")}


def _read_mtp(given: dict[str, Any], method: str) -> dict[str, Any]:
    if "model" in given:
        raise ValueError(f"model: method {method} drafts with a layer of the model itself; leave model away")
    return {"method": "mtp", **_read_number(given, method)}


def _read_number(given: dict[str, Any], method: str) -> dict[str, Any]:
    """Of drafts, where nothing else is left to say."""
    number = given.pop("num_speculative_tokens", None)
    if given:
        raise ValueError(f"{next(iter(given))!r} is not of method {method}; leave it away")
    if number is not None and (type(number) is not int or not 1 <= number <= _MOST):
        raise ValueError(f"num_speculative_tokens {number!r}: give a number of tokens from 1 to {_MOST}")
    return {"num_speculative_tokens": number or _MOST_BY_COST, "by_cost": number is None}


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions(Options):
    title: ClassVar[str] = "Speculation"

    speculation: Literal["off", "auto", "ngram", "suffix", "draft", "mtp"] | None = flag(
        None,
        "Draft tokens, so that a step can confirm several of them; the answers stay the same. ngram: what "
        "followed the last tokens where they stood before in the request; suffix: the same, and where they "
        "stood in what earlier requests of the same cache salt were answered; auto: as ngram, as many as pay "
        "by what steps cost and how often drafts were right; draft: with a smaller model, which "
        "--speculative-config names; mtp: with the model's own layer for that, if it has one.",
        unset="auto",
    )
    speculative_config: str | JsonObject | None = flag(
        None,
        'The same as vLLM spells it, a JSON object: {"method": "suffix", "num_speculative_tokens": 5, '
        '"suffix_decoding_max_tree_depth": 24}, or of a draft model {"method": "draft_model", "model": '
        '"DIRECTORY"} or the model\'s own layer {"method": "mtp"}, which draft as many tokens as pay unless '
        "num_speculative_tokens says how many.",
        metavar="JSON",
        unset="by --speculation",
        check=lambda text: text is None or read_speculation(text),
    )

    def check(self) -> None:
        if self.speculation == "draft" and self.speculative_config is None:
            raise OptionError(
                f"--speculation draft: which model? Give --speculative-config '{EXAMPLE}' in its place"
            )
        if self.speculative_config is not None and self.speculation is not None:
            raise OptionError(
                f"--speculation {self.speculation}: --speculative-config says it already; leave one away"
            )

    @property
    def wanted(self) -> dict[str, Any] | None:
        """Fields of `protocol.config.Speculation`; None: no drafts."""
        if self.speculative_config is not None:
            return read_speculation(str(self.speculative_config))
        if self.speculation == "mtp":
            return _read_mtp({}, "mtp")
        return None if self.speculation == "off" else {"method": self.speculation or "auto"}
