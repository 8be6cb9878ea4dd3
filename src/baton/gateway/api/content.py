"""What a message says: texts, what the model thought, and what this model cannot read, which is noted.

Conversations of agents hold screenshots, files and calls of tools that other servers run.  One of them in a
history must not end the conversation, so a short text stands in its place and the answer's header counts it
(`--unsupported-content note`, the default), or the request is refused (`refuse`).  The APIs' own readers
(`anthropic/conversations.py`, `responses/items.py`) leave `Unsupported` where such a part was;
`messages.read_messages` decides what becomes of it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard

import msgspec

from baton.gateway.errors import BadRequest

log = logging.getLogger(__name__)

KINDS = ("image", "audio", "video", "file", "other")
"""Of what is noted, as metrics and headers have them."""
ARGUMENTS = "arguments"
"""Noted, too: arguments of a call that are no JSON object."""
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Kinds of parts that are texts, by the field that has it: OpenAI's two APIs, as in vLLM."""
_THOUGHTS = ("thinking", "reasoning", "reasoning_text", "reasoning_content", "summary_text")
"""Kinds of parts that say what a model thought, and fields that have it."""
_OF_MODEL = (*_THOUGHTS, "redacted_thinking", "tool_use", "tool_call")
_WORDS = {"image": "image", "audio": "audio", "video": "video", "file": "file", "document": "file"}
_WHAT = {"image": "an image", "audio": "sound", "video": "a video", "file": "a file", "other": "no text"}
_MAX_DEPTH = 4
"""Of lists and objects in a part of thoughts."""
_PARTS_BYTES = 1 << 16
"""Longer values are not looked into, to say what was wrong in them."""


class Unsupported(NamedTuple):
    """A part of a message that this model cannot read."""

    name: str
    """As its API calls it, such as `input_image`."""
    error: BadRequest
    """If it is to be refused."""

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        return next((kind for word, kind in _WORDS.items() if word in self.name.lower()), "other")

    @property
    def text(self) -> str:
        """What stands in its place."""
        what = self.kind if self.kind != "other" else _clean(self.name)
        return f"[{what} left out: this model reads text]"


@dataclass
class Notes:
    """What was noted in one request: kind → how often."""

    refuses: bool = False
    """Nothing is noted, all is refused."""
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + 1

    def text_of(self, part: Unsupported) -> str:
        """Raises `BadRequest` where it is to be refused."""
        if self.refuses:
            raise part.error
        self.add(part.kind)
        return part.text


class Noted:
    """Warns of what is noted, once for each kind."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def warn(self, counts: Mapping[str, int]) -> None:
        for kind in counts:
            if kind not in self._warned:
                self._warned.add(kind)
                what = (
                    "a call's arguments in a conversation are no JSON object (an answer that was cut off?); "
                    "the model is given the nearest object, or what they say"
                    if kind == ARGUMENTS
                    else f"a conversation has parts that this model does not read ({kind}); a short text "
                    "stands in their place (--unsupported-content refuse: such requests are refused)"
                )
                log.warning("%s (said once)", what)


def _clean(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", " ", name)[:50].strip() or "part"


class Content(NamedTuple):
    """Of one message."""

    parts: str | list[dict[str, Any]] | None
    thoughts: list[str]
    calls: list[dict[str, Any]]
    """Those that were given as parts, as Anthropic's clients have them."""


def read_content(content: object, where: str, notes: Notes, *, of_tool: bool = False) -> Content:
    """`of_tool`: it is a tool's result, which may be any JSON.  Raises `BadRequest`."""
    if content is None or isinstance(content, str):
        return Content(content, [], [])
    if of_tool and not is_parts(content):
        return Content(json_of(content), [], [])
    if not isinstance(content, list):
        raise BadRequest(f"{where}: must be a text or a list of parts", param="messages")
    texts: list[dict[str, Any]] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for i, part in enumerate(content):
        place = f"{where}[{i}]"
        if isinstance(part, Unsupported):
            texts.append({"type": "text", "text": notes.text_of(part)})
        elif isinstance(part, str):
            texts.append({"type": "text", "text": part})
        elif not isinstance(part, Mapping):
            raise BadRequest(f"{place}: must be a part: {{'type': 'text', 'text': …}}", param="messages")
        elif (kind := part.get("type")) in _THOUGHTS or kind == "redacted_thinking":
            thoughts += thoughts_in(part)
        elif kind in ("tool_use", "tool_call") and isinstance(part.get("name"), str):
            calls.append(part_call(part))
        else:
            texts.append({"type": "text", "text": _text_in(part, place, notes)})
    texts = [text for text in texts if text["text"]]
    if not texts:
        return Content("" if content and not (thoughts or calls) else None, thoughts, calls)
    return Content(texts[0]["text"] if len(texts) == 1 else texts, thoughts, calls)


def _text_in(part: Mapping[str, Any], where: str, notes: Notes) -> str:
    kind = part.get("type")
    if kind is None and isinstance(part.get("text"), str):
        return str(part["text"])
    name = _TEXTS.get(str(kind))
    if name is None:
        error = not_a_text(part, f"{where}.type", "messages")
        if not isinstance(kind, str | None) or (kind is None and not _is_media(_named(part))):
            raise error  # (no part of any API)
        return notes.text_of(Unsupported(_named(part), error))
    if not isinstance(part.get(name), str):
        raise BadRequest(f"{where}.{name}: must be a text", param="messages")
    return str(part[name])


def part_call(part: Mapping[str, Any]) -> dict[str, Any]:
    """A call that was given as a part or a block."""
    arguments = next((part[name] for name in ("input", "args", "arguments") if name in part), None)
    call: dict[str, Any] = {"type": "function", "function": {"name": part["name"], "arguments": arguments}}
    return {"id": part["id"], **call} if isinstance(part.get("id"), str) else call


def thoughts_in(value: object, depth: int = 0) -> list[str]:
    """The texts in a part of what a model thought, in any of the shapes that clients give back."""
    if isinstance(value, str):
        return [value]
    if depth > _MAX_DEPTH:
        return []
    if isinstance(value, list):
        return [text for one in value for text in thoughts_in(one, depth + 1)]
    if isinstance(value, Mapping):
        names = (*_THOUGHTS, "text", "content", "summary")
        return thoughts_in(next((value[name] for name in names if value.get(name)), []), depth + 1)
    return []


def added(first: Any, second: Any) -> Any:
    """Two contents as one: texts with an empty line between them, or parts (`Unsupported` among them)."""
    if not first or not second:
        return first or second or ""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    return [*parts_of(first), *parts_of(second)]


def said_on(before: Any, more: Any) -> Any:
    """What a model says on both sides of a call, as a chat's content has it: on lines of their own."""
    if not before or not more:
        return before or more
    if isinstance(before, str) and isinstance(more, str):
        return before + ("" if before[-1].isspace() or more[0].isspace() else "\n") + more
    return [*parts_of(before), *parts_of(more)]


def parts_of(content: Any) -> list[Any]:
    """A text as its only part; parts as they are."""
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []


def joined(parts: str | list[dict[str, Any]] | None) -> str:
    """All that a message says as one text."""
    return (
        "\n".join(filter(None, (part["text"] for part in parts))) if isinstance(parts, list) else parts or ""
    )


def is_parts(content: object, also: Collection[str] = ()) -> TypeGuard[list[Any]]:
    """A list of parts of a message, one of which at least is of a kind that is known (`also`: more kinds);
    else it is a value that a tool gave: rows of a table may have a `type`, too."""
    if not isinstance(content, list):
        return False
    kinds = [_kind_of(one) for one in content]
    return None not in kinds and (
        not kinds
        or any(kind in (*_TEXTS, *_OF_MODEL, *also) or _is_media(kind) for kind in filter(None, kinds))
        or "" in kinds
    )


def _kind_of(part: object) -> str | None:
    """ "": it is a text without a type; None: it is no part."""
    if isinstance(part, Unsupported):
        return "image"
    if not isinstance(part, Mapping):
        return "" if isinstance(part, str) else None
    kind = part.get("type")
    return kind if isinstance(kind, str) else "" if isinstance(part.get("text"), str) else None


def json_of(value: object) -> str:
    """Of a tool's result."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):  # (a Python program's)
        return str(value)


def _named(part: Mapping[str, Any]) -> str:
    # (Some clients leave the type away: then the field that has the value tells it.)
    return str(part["type"]) if part.get("type") is not None else next(iter(map(str, part)), "")


def _is_media(name: str) -> bool:
    return any(word in name for word in _WORDS)


def not_a_text(part: Mapping[str, Any], where: str, param: str) -> BadRequest:
    """The error for a part that is none: what it is, and what the model takes."""
    name = _named(part)
    if part.get("type") is None and not _is_media(name):
        what = "it is missing; give {'type': 'text', 'text': …}"
        return BadRequest(f"{where}: {what}", param=param, code="unsupported_content")
    what = next((_WHAT[kind] for word, kind in _WORDS.items() if word in name), _WHAT["other"])
    return BadRequest(
        f"{where}: {name[:50]!r} is {what}, and this model takes only text; send parts of type 'text'",
        param=param,
        code="unsupported_content",
    )


def refuse_parts(data: bytes, field: str) -> None:
    """Of JSON where texts belong and something else is.  Raises `BadRequest` for images and sound in the
    shapes of several APIs: `{"type": "image_url", …}`, `{"image": …}`, `{"content": [{"type": …}]}`."""
    if len(data) <= _PARTS_BYTES:
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            _check_no_parts(msgspec.json.decode(data), field)


def _check_no_parts(value: object, field: str) -> None:
    items = value if isinstance(value, list) else [value]
    for i, item in enumerate(items):
        where = f"{field}[{i}]" if isinstance(value, list) else field
        if isinstance(item, Mapping):
            _check_no_parts(item.get("content"), f"{where}.content")
            if any(word in str(item.get("type") or list(item)) for word in _WORDS):
                raise not_a_text(item, where, re.split(r"[.\[]", field)[0])
