"""How the answers of one request are parsed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from baton.gateway.parsing.calls import Types
from baton.gateway.parsing.choice import Formats
from baton.gateway.parsing.parser import ResponseParser


@dataclass(frozen=True, kw_only=True)
class Parsing:
    """The formats, and what of the request matters to them."""

    formats: Formats
    thinking: bool = False
    """Answers begin inside of reasoning."""
    calling: bool = False
    """Calls are wanted."""
    tools: Collection[str] = ()
    types: Types = field(default_factory=dict)
    parallel: bool = True

    @property
    def has_reasoning(self) -> bool:
        return self.formats.thinking_in(self.thinking) is not None or self.formats.is_harmony

    @property
    def changes_anything(self) -> bool:
        """Texts may hold more than an answer's text."""
        calls = self.formats.calling
        return self.calling or self.has_reasoning or (calls is not None and bool(calls.dropped))

    def parser(self) -> ResponseParser:
        """For one answer."""
        return ResponseParser(
            self.formats.thinking_in(self.thinking),
            self.formats.calling,
            calling=self.calling,
            tools=self.tools,
            types=self.types,
            thinking=self.thinking,
            parallel=self.parallel,
        )
