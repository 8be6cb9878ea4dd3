"""The flags about chat templates: a file, or the template itself, and defaults of its switches."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from baton.gateway.api.messages import MAX_TEMPLATE, RESERVED_VARIABLES
from baton.launch.limits import OptionError
from baton.launch.options.flag import JsonObject

_MARKS: Final = ("{{", "{%")


def read_template(given: str | None) -> str | None:
    """Raises `OptionError`.  (Whether it compiles is seen when the server starts: Jinja takes a while.)"""
    if given is None:
        return None
    if any(mark in given for mark in _MARKS):
        return given
    try:
        path = Path(given).expanduser()
        if path.stat().st_size > 4 * MAX_TEMPLATE:
            raise OptionError(f"--chat-template {given}: has more than {MAX_TEMPLATE} characters")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise OptionError(
            f"--chat-template {given[:200]}: {error.strerror}; give a file, or a template with {{{{ or {{%"
        ) from None
    except UnicodeDecodeError:
        raise OptionError(f"--chat-template {given}: is no text in UTF-8") from None


def read_template_defaults(given: str | JsonObject | None) -> dict[str, Any]:
    """Raises `OptionError`."""
    if given is None:
        return {}
    try:
        found = msgspec.json.decode(str(given), type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise OptionError(f"--default-chat-template-kwargs: is no JSON object: {error}") from None
    for name in found:
        if name in RESERVED_VARIABLES:
            raise OptionError(f"--default-chat-template-kwargs: {name!r} is set by the server; leave it out")
    return found
