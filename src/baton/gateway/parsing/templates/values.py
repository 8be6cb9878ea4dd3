"""What the text of a region becomes: a value by its kind, put into the shape that a transform describes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import regex

_WHOLE = re.compile(r"\{(\w+(?:\.\w+)*)\}")
_BARE_KEY = re.compile(r"(?<=[{,])(\w+):")
_HOLD, _END = "\x01", "\x02"
"""Around the number of a text that was taken out of lax JSON."""
TIMEOUT_S = 1.0
_MAX_DEPTH = 8
"""Of value parsers within value parsers."""


def value_of(text: str, kind: str, args: Mapping[str, Any]) -> Any:
    """Raises `ValueError` (and `TimeoutError`) if the text is no such value."""
    return _PARSERS[kind](text, args)


def shaped(value: Any, transform: Any, each: bool, groups: Mapping[str, str]) -> Any:
    """`groups`: what the opening marker's named groups matched.  Raises `ValueError`."""
    if transform is None:
        return value
    if not each:
        return _filled(transform, {**groups, "content": value})
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError("transform_each: a list of objects is expected")
    return [_filled(transform, {**groups, **item}) for item in value]


def check_transform(transform: Any, args: Mapping[str, Any], depth: int = 0) -> None:
    """Raises `ValueError` for a text that mixes a placeholder with others, and for unknown value parsers."""
    if isinstance(transform, dict | list):
        for one in transform.values() if isinstance(transform, dict) else transform:
            check_transform(one, {})
    elif isinstance(transform, str) and _WHOLE.search(transform) and not _WHOLE.fullmatch(transform):
        raise ValueError(f"transform: {transform!r} mixes a placeholder with text")
    if "tag_pattern" in args:
        try:
            groups = regex.compile(args["tag_pattern"]).groupindex
        except (regex.error, TypeError) as error:
            raise ValueError(f"content_args.tag_pattern: {error}") from None
        if not {"key", "value"} <= groups.keys():
            raise ValueError("content_args.tag_pattern: the groups 'key' and 'value' are expected")
    inner = args.get("value_parser")
    if inner is not None:
        if not isinstance(inner, dict) or inner.get("name", "text") not in KINDS or depth == _MAX_DEPTH:
            raise ValueError(f"content_args.value_parser: a name of {', '.join(KINDS)} is expected")
        check_transform(None, inner.get("args", {}), depth + 1)


def _filled(transform: Any, scope: Mapping[str, Any]) -> Any:
    if isinstance(transform, dict):
        return {key: _filled(one, scope) for key, one in transform.items()}
    if isinstance(transform, list):
        return [_filled(one, scope) for one in transform]
    whole = _WHOLE.fullmatch(transform) if isinstance(transform, str) else None
    if whole is None:
        return transform
    value: Any = scope
    for key in whole[1].split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise ValueError(f"transform: there is no {whole[1]!r}")
        value = value[key]
    return value


def _text(text: str, args: Mapping[str, Any]) -> str:
    return text.strip() if args.get("strip", True) else text


def _json(text: str, args: Mapping[str, Any]) -> Any:
    delimiters, taken, lax = args.get("string_delims") or [], list[str](), text
    if delimiters and (_HOLD in text or _END in text):
        raise ValueError("a text with control characters is no JSON of this kind")
    for begin, end in delimiters:

        def take(found: Any) -> str:
            taken.append(found[1])
            return f"{_HOLD}{len(taken) - 1}{_END}"

        lax = re.sub(re.escape(begin) + "(.*?)" + re.escape(end), take, lax, flags=re.DOTALL)
    if args.get("unquoted_keys"):
        lax = _BARE_KEY.sub(r'"\1":', lax)
    if taken:
        lax = re.sub(f"{_HOLD}([0-9]+){_END}", lambda found: json.dumps(taken[int(found[1])]), lax)
    try:
        return json.loads(lax)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError:
        if args.get("allow_non_json"):
            return text.strip()
        raise


def _inner(text: str, args: Mapping[str, Any]) -> Any:
    inner = args.get("value_parser")
    return text if inner is None else value_of(text, inner.get("name", "text"), inner.get("args", {}))


def _xml(text: str, args: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    pattern = regex.compile(args["tag_pattern"], regex.DOTALL)
    for match in pattern.finditer(text, timeout=TIMEOUT_S):
        key, value = match["key"], _inner(match["value"] or "", args)
        if key in found and args.get("merge_duplicates"):
            several = found[key] if isinstance(found[key], list) else [found[key]]
            found[key] = [*several, value]
        else:
            found[key] = value
    return found


def _lines(text: str, args: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for line in text.split(args.get("line_sep", "\n")):
        key, separator, value = _text(line, args).partition(args.get("kv_sep", ":"))
        if separator:
            found[_text(key, args)] = _inner(_text(value, args), args)
    return found


_PARSERS: dict[str, Callable[[str, Mapping[str, Any]], Any]] = {
    "text": _text,
    "int": lambda text, args: int(_text(text, args)),
    "float": lambda text, args: float(_text(text, args)),
    "bool": lambda text, args: _text(text, args).lower() in ("true", "1"),
    "json": _json,
    "xml-inline": _xml,
    "kv-lines": _lines,
}
KINDS = tuple(_PARSERS)
"""Names of kinds."""
