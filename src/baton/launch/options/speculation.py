"""Flags of speculation: whether, and how, tokens are drafted for steps that confirm several at once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from baton.launch.limits import OptionError
from baton.launch.options.flag import Options, flag

METHODS = ("auto", "ngram")
_NUMBERS = ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
"""As vLLM calls them."""
_MOST = 64
_GIVE = f"give a JSON object of method ({' or '.join(METHODS)}), {', '.join(_NUMBERS)}"


def read_speculation(text: str) -> dict[str, Any]:
    """`--speculative-config` as fields of `protocol.config.Speculation`.  Raises `ValueError` with what to
    give."""
    try:
        given = json.loads(text)
    except ValueError:
        raise ValueError(f"is not JSON; {_GIVE}") from None
    if not isinstance(given, dict):
        raise ValueError(_GIVE)
    method = given.pop("method", None)
    if method not in METHODS:
        raise ValueError(f"method {method!r} is not among what there is; {_GIVE}")
    for name, number in given.items():
        if name not in _NUMBERS:
            raise ValueError(f"{name!r} is not among what there is; {_GIVE}")
        if type(number) is not int or not 1 <= number <= _MOST:
            raise ValueError(f"{name} {number!r}: give a number of tokens from 1 to {_MOST}")
    least, most = given.get("prompt_lookup_min"), given.get("prompt_lookup_max")
    if least is not None and most is not None and least > most:
        raise ValueError(f"prompt_lookup_min {least} is above prompt_lookup_max {most}; give at most that")
    if least is None and most is not None:  # as vLLM: one of them stands for both
        given["prompt_lookup_min"] = most
    elif most is None and least is not None:
        given["prompt_lookup_max"] = least
    return {"method": method, **given}


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions(Options):
    title: ClassVar[str] = "Speculation"

    speculation: Literal["off", "auto", "ngram"] = flag(
        "off",
        "Draft tokens, so that a step can confirm several of them; the answers stay the same. ngram: what "
        "followed the last tokens where they stood before in the request; auto: the same, as many as pay by "
        "what steps cost and how often drafts were right.",
    )
    speculative_config: str | None = flag(
        None,
        'The same as vLLM spells it, a JSON object: {"method": "ngram", "num_speculative_tokens": 5, '
        '"prompt_lookup_max": 4}.',
        metavar="JSON",
        unset="by --speculation",
        check=lambda text: text is None or read_speculation(text),
    )

    def check(self) -> None:
        if self.speculative_config is not None and self.speculation != "off":
            raise OptionError(
                f"--speculation {self.speculation}: --speculative-config says it already; leave one away"
            )

    @property
    def wanted(self) -> dict[str, Any] | None:
        """Fields of `protocol.config.Speculation`; None: no drafts."""
        if self.speculative_config is not None:
            return read_speculation(self.speculative_config)
        return None if self.speculation == "off" else {"method": self.speculation}
