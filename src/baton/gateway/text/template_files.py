"""The chat template of a directory: which of the files that may hold one does, and which of several.

transformers has written it as a field of tokenizer_config.json (a text, or a list of named ones), as
chat_template.jinja with others in a folder beside it, and, of models that see images, as chat_template.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

_DEFAULT: Final = "default"
_WITH_TOOLS: Final = "tool_use"
"""Named as transformers does: rendered where there are tools."""
_FOLDER: Final = "additional_chat_templates"


def read_chat_template(directory: Path, field: Any) -> str | None:
    """The template as one text; None if no file has one.

    `field`: what tokenizer_config.json says.  Raises `ValueError` or `OSError` with the file's name.
    """
    named = _named(field)
    path = directory / "chat_template.jinja"
    if path.is_file():
        named[_DEFAULT] = _text(path)
    for path in sorted((directory / _FOLDER).glob("*.jinja")):
        named[path.stem] = _text(path)
    if not named:
        named = _named(_field_of(directory / "chat_template.json"))
    return one_template(named)


def one_template(named: Mapping[str, str]) -> str | None:
    """Of several by name: the default, and where there is one for tools, one that is either."""
    if _DEFAULT not in named and len(named) == 1:
        return next(iter(named.values()))
    default, with_tools = named.get(_DEFAULT), named.get(_WITH_TOOLS)
    if default is None or with_tools is None or with_tools == default:
        return default
    return f"{{% if tools %}}{_as_part(with_tools)}{{% else %}}{_as_part(default)}{{% endif %}}"


def _named(field: Any) -> dict[str, str]:
    """By name; a single one is the default."""
    if isinstance(field, str):
        return {_DEFAULT: field} if field else {}
    if isinstance(field, dict):
        pairs = list(field.items())
    elif isinstance(field, list):
        pairs = [(one.get("name"), one.get("template")) for one in field if isinstance(one, dict)]
    else:
        return {}
    return {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}


def _field_of(path: Path) -> Any:
    """`chat_template` of a JSON file; None if there is none."""
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any]).get("chat_template")
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} cannot be read: it is no text in UTF-8") from None


def _as_part(template: str) -> str:
    """Jinja drops a line's end at the end of a template, and not within one."""
    return template.removesuffix("\n")
