"""`{"type": "structural_tag", "format": …}`: what an answer must be, as a tree of formats.

The form of xgrammar and vLLM (xgrammar 0.2: docs/structural_tag).  What it means is translated in
`reading/constraints/structural.py`; an option that is not here is refused by its name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

Number = Annotated[int, Meta(ge=0, le=2_147_483_647)]
Texts = list[Annotated[str, Meta(min_length=1)]]
Style = Literal["json", "qwen_xml", "minimax_xml", "deepseek_xml", "glm_xml"]


class _Format(Struct, tag_field="type", frozen=True, forbid_unknown_fields=True):
    """One of them."""


class ConstString(_Format, tag="const_string", frozen=True):
    """Exactly this text."""

    value: str


class JsonSchema(_Format, tag="json_schema", frozen=True):
    """A value that a schema allows."""

    json_schema: bool | dict[str, Any]
    style: Style = "json"
    any_order: bool = False
    """Without effect: properties come in the schema's order, which is one of any."""
    max_whitespace_cnt: Number | None = None
    excludes: Annotated[list[str], Meta(max_length=0)] = []


class QwenXmlParameter(_Format, tag="qwen_xml_parameter", frozen=True):
    """The older name of `json_schema` with the style `qwen_xml`."""

    json_schema: bool | dict[str, Any]


class AnyText(_Format, tag="any_text", frozen=True):
    """Any text."""

    excludes: Texts = []
    max_tokens: Number | None = None
    max_chars: Number | None = None


class Grammar(_Format, tag="grammar", frozen=True):
    """What a grammar allows."""

    grammar: str


class Regex(_Format, tag="regex", frozen=True):
    """What an expression matches whole."""

    pattern: str


class Sequence(_Format, tag="sequence", frozen=True):
    """One after the other."""

    elements: list[Format]


class Or(_Format, tag="or", frozen=True):
    """One of these."""

    elements: Annotated[list[Format], Meta(min_length=1)]


class Optional(_Format, tag="optional", frozen=True):
    """Once, or not at all."""

    content: Format


class Plus(_Format, tag="plus", frozen=True):
    """Once or more."""

    content: Format


class Star(_Format, tag="star", frozen=True):
    """Any number of times."""

    content: Format


class Repeat(_Format, tag="repeat", frozen=True):
    """So many times."""

    min: Number
    max: Annotated[int, Meta(ge=-1, le=2_147_483_647)]
    """-1: any number."""
    content: Format


class Token(_Format, tag="token", frozen=True):
    """A special token."""

    token: str | int


class ExcludeToken(_Format, tag="exclude_token", frozen=True):
    """Any token but these."""

    exclude_tokens: list[str | int] = []


class AnyTokens(_Format, tag="any_tokens", frozen=True):
    """Any tokens but these."""

    exclude_tokens: list[str | int] = []
    max_tokens: Number | None = None


class Tag(Struct, frozen=True, tag_field="type", tag="tag", forbid_unknown_fields=True):
    """A frame with content."""

    begin: str | Token
    content: Format
    end: str | Annotated[list[str], Meta(min_length=1)] | Token


class TriggeredTags(_Format, tag="triggered_tags", frozen=True):
    """Free text; from a trigger on one of the tags."""

    triggers: Texts
    tags: Annotated[list[Tag], Meta(min_length=1)]
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: Texts = []


class TokenTriggeredTags(_Format, tag="token_triggered_tags", frozen=True):
    """The same with tokens as triggers."""

    trigger_tokens: list[str | int]
    tags: Annotated[list[Tag], Meta(min_length=1)]
    exclude_tokens: list[str | int] = []
    at_least_one: bool = False
    stop_after_first: bool = False


class TagsWithSeparator(_Format, tag="tags_with_separator", frozen=True):
    """Tags, and nothing but the separator between them."""

    tags: Annotated[list[Tag], Meta(min_length=1)]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


class Dispatch(_Format, tag="dispatch", frozen=True):
    """Free text; behind a pattern its format."""

    rules: Annotated[list[tuple[Annotated[str, Meta(min_length=1)], Format]], Meta(min_length=1)]
    loop: bool = True
    excludes: Texts = []


class TokenDispatch(_Format, tag="token_dispatch", frozen=True):
    """The same with tokens as patterns."""

    rules: Annotated[list[tuple[str | int, Format]], Meta(min_length=1)]
    loop: bool = True
    exclude_tokens: list[str | int] = []


Format = (
    ConstString
    | JsonSchema
    | QwenXmlParameter
    | AnyText
    | Grammar
    | Regex
    | Sequence
    | Or
    | Optional
    | Plus
    | Star
    | Repeat
    | Token
    | ExcludeToken
    | AnyTokens
    | Tag
    | TriggeredTags
    | TokenTriggeredTags
    | TagsWithSeparator
    | Dispatch
    | TokenDispatch
)


class StructuralTag(Struct, frozen=True, forbid_unknown_fields=True):
    """All of it."""

    format: Format
    type: Literal["structural_tag"] | UnsetType = UNSET
