"""How the answers of one request are parsed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from baton.gateway.parsing.choice import Formats
from baton.gateway.parsing.parser import ResponseParser
from baton.gateway.parsing.tags import Types
from baton.gateway.parsing.templates.parser import TemplateParser

AnswerParser = ResponseParser | TemplateParser


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
    demanded: bool = False
    """The answer is calls alone, after its reasoning."""

    @property
    def has_reasoning(self) -> bool:
        formats = self.formats
        by_template = formats.response is not None and formats.think != ""
        return formats.thinking_in(self.thinking) is not None or formats.is_harmony or by_template

    @property
    def changes_anything(self) -> bool:
        """Texts may hold more than an answer's text."""
        calls = self.formats.calling
        drops = self.formats.response is not None or (calls is not None and bool(calls.dropped))
        return self.calling or self.has_reasoning or drops

    def parser(self) -> AnswerParser:
        """For one answer."""
        if self.formats.response is not None:
            return TemplateParser(
                self.formats.response,
                calling=self.calling,
                reasons=self.formats.think != "",
                types=self.types,
                thinking=self.thinking,
                parallel=self.parallel,
                demanded=self.demanded,
            )
        return ResponseParser(
            self.formats.thinking_in(self.thinking),
            self.formats.calling,
            calling=self.calling,
            tools=self.tools,
            types=self.types,
            thinking=self.thinking,
            parallel=self.parallel,
            demanded=self.demanded,
        )
