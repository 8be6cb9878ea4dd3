"""The shapes of calls in answers (`answers.py`)."""

from __future__ import annotations

import secrets
import string
from typing import Annotated, Literal

from msgspec import Meta, Struct


class Function(Struct, forbid_unknown_fields=True):
    name: str
    arguments: str
    """A JSON object; only the beginning of one if the answer was cut off, or the model wrote no JSON."""


class ToolCall(Struct, forbid_unknown_fields=True):
    """A call has `function` or `custom`, as its type says."""

    id: str
    type: Literal["function", "custom"]
    function: Function | None = None
    custom: Custom | None = None
    """Of a tool that takes a text."""


class Custom(Struct, forbid_unknown_fields=True):
    name: str
    input: str
    """Only its beginning if the answer was cut off."""


class FunctionDelta(Struct, forbid_unknown_fields=True):
    arguments: str
    """More of them."""
    name: str | None = None


class CustomDelta(Struct, forbid_unknown_fields=True):
    input: str
    """More of it."""
    name: str | None = None


class ToolCallDelta(Struct, forbid_unknown_fields=True):
    """The first one of a call has its id, type and name.  Each has `function` or `custom`."""

    index: Annotated[int, Meta(ge=0)]
    function: FunctionDelta | None = None
    custom: CustomDelta | None = None
    id: str | None = None
    type: Literal["function", "custom"] | None = None


_LETTERS = string.ascii_letters + string.digits


def call_id(own: str | None, *, short: bool, prefix: str = "call_") -> str:
    """`own`: as the model says it.  `short`: of nine letters and digits, as some templates want them."""
    if own is not None:
        return own
    if short:
        return "".join(secrets.choice(_LETTERS) for _ in range(9))
    return f"{prefix}{secrets.token_hex(12)}"
