"""The names by which clients may call the model that is served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Alias:
    """Further names of the model: all that a pattern matches."""

    pattern: str
    """A name in which each `*` stands for any text."""
    name: str | None = None
    """What answers say; None: the name that was asked for."""

    def matches(self, asked: str) -> bool:
        """Whether that is one of them."""
        first, *others = self.pattern.split("*")
        if not others:
            return asked == first
        *middle, last = others
        # (Each part where it comes first: what clients ask for takes no longer than it is long.)
        at, end = len(first), len(asked) - len(last)
        if at > end or not asked.startswith(first) or not asked.endswith(last):
            return False
        for part in middle:
            found = asked.find(part, at, end)
            if found < 0:
                return False
            at = found + len(part)
        return True

    def __str__(self) -> str:
        return self.pattern if self.name is None else f"{self.pattern}={self.name}"


VENDORS = (Alias("claude-*"),)
"""What agents ask for that were told a server's address and nothing else (Claude Code)."""


def read_names(given: Sequence[str]) -> tuple[tuple[str, ...], tuple[Alias, ...]]:
    """What --served-model-name gives: `NAME`, `PATTERN` (with `*`), or either with `=NAME`, which answers
    then say.  Returns the names and the others.  Raises `ValueError`."""
    if not all(given):
        raise ValueError("must not be empty")
    names = tuple(dict.fromkeys(name for name in given if "*" not in name and "=" not in name))
    aliases = []
    for entry in given:
        if entry in names:
            continue
        pattern, equals, name = entry.rpartition("=") if "=" in entry else (entry, "", "")
        if not pattern or (equals and name not in names):
            listed = ", ".join(map(repr, names)) or "none"
            raise ValueError(
                f"{entry!r}: what stands before = is a name or a pattern, after it one of the names that are "
                f"given beside it ({listed})"
            )
        aliases.append(Alias(pattern, name or None))
    return names, tuple(aliases)
