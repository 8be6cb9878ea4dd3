"""The ranges of numeric flags: one check, one wording."""

from __future__ import annotations

from typing import Final

MAX_SECONDS: Final = 1e9
"""Of any duration: some thirty years, for people who mean "never"."""


class OptionError(ValueError):
    """A flag that cannot be served; the message names the flag and the fix."""


def check_range(flag: str, value: float | None, least: float, most: float, unit: str = "") -> None:
    """Raises `OptionError` unless `value` is None (not given) or in [least, most].  NaN is in no range."""
    if value is not None and not least <= value <= most:
        what = f" {unit}" if unit else ""
        raise OptionError(f"{flag} {shown(value)}: give{what} from {shown(least)} to {shown(most)}")


def shown(value: float) -> str:
    if isinstance(value, int):
        text = str(value)
        return text if len(text) <= 24 else f"{text[:12]}… ({len(text)} digits)"
    return f"{value:.10g}"
