"""Keyword arguments of a Python program become `ServeOptions`, or an error that names the argument."""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from typing import Any

import msgspec

from baton.launch.limits import OptionError
from baton.launch.options import Plan, ServeOptions, make_plan, parse_cost

_FLAG = re.compile(r"(?<![\w-])--([a-z]+(?:-[a-z]+)*)")

_LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


def plan_of_arguments(given: Mapping[str, Any]) -> Plan:
    """`make_plan` for the fields of `ServeOptions`, by name.

    A text is enough where a list of names (`served_model_name`) or a cost (`simulated_cost`) is meant.
    Raises `OptionError` and whatever else `make_plan` raises.
    """
    types = typing.get_type_hints(ServeOptions)
    for name in given:
        if name not in types:
            raise OptionError(f"{name}: no such argument; LLM takes {', '.join(sorted(types))}")
    try:
        values = {name: _read(name, value, types[name]) for name, value in given.items()}
        return make_plan(ServeOptions(**values))
    except OptionError as error:
        raise OptionError(_FLAG.sub(lambda flag: flag[1].replace("-", "_"), str(error))) from None


def _read(name: str, value: object, kind: Any) -> Any:
    if name == "served_model_name":
        value = () if value is None else (value,) if isinstance(value, str) else value
    elif name == "simulated_cost" and isinstance(value, str):
        return parse_cost(value)
    if name == "log_level" and isinstance(value, str) and value not in _LOG_LEVELS:
        raise OptionError(f"log_level: {value!r} must be one of {', '.join(_LOG_LEVELS)}")
    if name in ("model", "tokenizer", "record") and hasattr(value, "__fspath__"):
        value = str(value)
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, TypeError):
        raise OptionError(f"{name}: {value!r} must be {_in_words(kind)}") from None


def _in_words(kind: Any) -> str:
    """`int | None` → 'int or None'; a Literal → its values."""
    if kind is type(None):
        return "None"
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(map(repr, typing.get_args(kind)))
    if typing.get_origin(kind) is tuple:
        return f"{_in_words(typing.get_args(kind)[0])} or a list of such"
    if isinstance(kind, type):
        return kind.__name__
    return " or ".join(map(_in_words, typing.get_args(kind)))
