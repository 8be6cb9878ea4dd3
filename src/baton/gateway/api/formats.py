"""`response_format`: OpenAI's field for what an answer must be."""

from __future__ import annotations

import msgspec

from baton.gateway.api import fields as f


class JsonSchemaFormat(msgspec.Struct):
    """The schema of a `response_format`."""

    name: str | None = None
    schema: f.Anything | None = None
    description: str | None = None
    strict: bool | None = None
    """Without effect: what a schema says is always kept, and what cannot be kept is refused."""


class ResponseFormat(msgspec.Struct):
    """OpenAI's name for what an answer must be."""

    type: str | None = None
    """`text`, `json_object`, `json_schema` or `structural_tag`."""
    json_schema: JsonSchemaFormat | None = None
    schema: f.Anything | None = None
    """Of `json_object`: what the object must be besides (llama.cpp's)."""
    structures: list[f.Anything] | None = None
    triggers: list[str] | None = None
    format: f.Anything | None = None
