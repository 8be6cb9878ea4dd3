"""Anthropic's messages as a chat's.

A message there is a list of blocks, and results of tools are the user's.  Here each result is a message of
its own, as chat templates want it.  Messages of one role that follow each other are one turn.

A system message between others joins the user's turn beside it: before the first message it would change the
beginning of the prompt with every turn, and nothing cached would fit any more; and many templates know system
messages nowhere else.  It is never put between a call and its results.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from baton.gateway.anthropic.signatures import thoughts_in
from baton.gateway.api.content import Unsupported, added, is_parts, joined, json_of, said_on
from baton.gateway.errors import BadRequest

_ATTRIBUTION = re.compile(r"x-anthropic-billing-header:[^\n]*\n*")
"""What Claude Code writes before its system prompt: another one with each request, so no prefix would ever
fit.  The model has no use for it."""
_ROLES = ("user", "assistant", "system")
_WHERE = {"tool_result": "user", "tool_use": "assistant", "thinking": "assistant"}
"""Kinds of blocks that one role alone has."""
_KNOWN = "text, tool_use, tool_result and thinking"


class Conversation(NamedTuple):
    messages: list[dict[str, Any]]
    prefilled: bool
    """The answer goes on with the last message."""
    after_tools: bool
    """The last turn brings results of tools."""


Text = str | list[Any]
"""A message's content: a text, or parts of one, `Unsupported` among them."""


@dataclass
class _Turn:
    role: str
    text: Text = ""
    speaks: bool = False
    """The turn has a text, if only an empty one."""
    results: list[dict[str, Any]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)

    def add(self, text: Text, *, first: bool = False) -> None:
        self.speaks = True
        self.text = added(text, self.text) if first else added(self.text, text)

    def add_note(self, text: Text, *, first: bool = False) -> None:
        """A system message's text, in a user's turn.  It makes no turn of the user's after results of tools:
        templates forget what was thought before one."""
        if self.results and not self.speaks:
            self.results[-1]["content"] = added(self.results[-1]["content"], text)
        else:
            self.add(text, first=first)

    def messages(self) -> list[dict[str, Any]]:
        if self.role == "user":
            own = [{"role": "user", "content": self.text}] if self.speaks or not self.results else []
            return [*self.results, *own]
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.thoughts:
            message["reasoning"] = "\n".join(self.thoughts)
        if self.calls:
            message["tool_calls"] = self.calls
        return [message]


def conversation_of(system: str | Sequence[Any] | None, given: Sequence[Mapping[str, Any]]) -> Conversation:
    """Raises `BadRequest` with the place of what is wrong."""
    turns: list[_Turn] = []
    called: dict[str, str] = {}  # id of a call → name of its tool
    head: Text = "" if system is None else _texts(system, "system")
    notes: Text = ""
    for i, message in enumerate(given):
        where = f"messages[{i}]"
        role, content = message.get("role"), message.get("content")
        if role not in _ROLES:
            raise _wrong(f"{where}.role", f"{str(role)[:50]!r} must be 'user' or 'assistant'")
        if role == "system":
            text = _texts(content, f"{where}.content")
            if not turns:
                head = added(head, text)
            elif turns[-1].role == "user":
                turns[-1].add_note(text)
            else:
                notes = added(notes, text)
            continue
        if notes and role == "assistant":
            turns.append(_Turn("user", notes, speaks=True))
            notes = ""
        if not turns or turns[-1].role != role:
            turns.append(_Turn(role))
        _read_blocks(turns[-1], _blocks(content, f"{where}.content"), f"{where}.content", called)
        if notes:
            turns[-1].add_note(notes, first=True)
            notes = ""
    if notes:
        turns.append(_Turn("user", notes, speaks=True))
    if not turns:
        raise _wrong("messages", "give at least one message of role user")
    prefilled = _is_prefilled(turns)
    messages = [{"role": "system", "content": head}] if head else []
    for turn in turns:
        messages += turn.messages()
    return Conversation(messages, prefilled, bool(turns[-1].results))


def _is_prefilled(turns: list[_Turn]) -> bool:
    """Whether the answer goes on with the last turn; takes one away that says nothing (an answer that was cut
    off while the model thought is asked for again)."""
    last = turns[-1]
    if last.role == "user" or last.calls:
        return False
    if last.text:
        return True
    if len(turns) == 1:
        raise _wrong(
            "messages", "the last one has no text to continue; end with a user message, or with text"
        )
    turns.pop()
    return False


def _blocks(content: object, where: str) -> Sequence[object]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, Sequence):
        raise _wrong(where, "must be a text or a list of blocks")
    return content


def _texts(content: object, where: str) -> Text:
    """Of what can be nothing but text."""
    parts = [
        _text(_block(block, f"{where}[{i}]"), f"{where}[{i}]", only="text")
        for i, block in enumerate(_blocks(content, where))
    ]
    if parts and isinstance(parts[0], str) and (line := _ATTRIBUTION.match(parts[0])):
        parts[0] = parts[0][line.end() :]
    return _content(parts)


def _content(parts: Sequence[str | Unsupported]) -> Text:
    """A single text is that, not a part."""
    some: list[Any] = [
        {"type": "text", "text": part} if isinstance(part, str) else part for part in parts if part
    ]
    return some[0]["text"] if len(some) == 1 and isinstance(some[0], dict) else some or ""


def _block(block: object, where: str) -> Mapping[str, Any]:
    if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
        raise _wrong(where, "must be a block: {'type': 'text', 'text': …}")
    return block


def _text(block: Mapping[str, Any], where: str, *, only: str) -> str | Unsupported:
    match block:
        case {"type": "text"}:
            return _string(block, "text", where)
        case {"type": "document", "source": {"type": "text", "data": str(text)}}:
            return text
        case {"type": "document", "source": {"type": "content", "content": content}} | {
            "type": "search_result",
            "content": content,
        }:
            inner = [part for part in _blocks(content, where) if isinstance(part, Mapping)]
            if all(part.get("type") == "text" for part in inner):
                return joined([{"text": _string(part, "text", where)} for part in inner])
    return Unsupported(block["type"], _refused(block["type"], where, only))


def _read_blocks(turn: _Turn, blocks: Sequence[object], where: str, called: dict[str, str]) -> None:
    said: Text = ""
    texts: list[str | Unsupported] = []
    speaks = False
    for i, given in enumerate(blocks):
        place = f"{where}[{i}]"
        block = _block(given, place)
        kind = block["type"]
        if _WHERE.get(kind, turn.role) != turn.role:
            raise _wrong(place, f"a block of type {kind} belongs to a message of role {_WHERE[kind]}")
        if kind in ("tool_use", "thinking", "redacted_thinking"):
            said, texts = said_on(said, _content(texts)), []
        match kind:
            case "tool_use":
                turn.calls.append(_call(block, place))
                called[block["id"]] = block["name"]
            case "tool_result":
                turn.results.append(_result(block, place, called))
            case "thinking":
                thought = block.get("thinking") and _string(block, "thinking", place)
                thought = thought or thoughts_in(block.get("signature"))
                turn.thoughts += [thought] if thought else []
            case "redacted_thinking":
                pass  # (nobody here can read it)
            case _:
                texts.append(_text(block, place, only=_KNOWN))
                speaks = True
    if speaks:
        turn.add(said_on(said, _content(texts)))


def _call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    if "input" not in block:
        raise _wrong(f"{where}.input", "must be an object")
    function = {"name": _string(block, "name", where), "arguments": block["input"]}
    return {"id": _string(block, "id", where), "type": "function", "function": function}


def _result(block: Mapping[str, Any], where: str, called: Mapping[str, str]) -> dict[str, Any]:
    id = _string(block, "tool_use_id", where)
    if id not in called:
        raise _wrong(
            f"{where}.tool_use_id", f"no tool_use before it has the id {id[:100]!r}; give that of its call"
        )
    text = _output(block.get("content"), f"{where}.content")
    if block.get("is_error") is True:
        text = _failed(text)
    return {"role": "tool", "tool_call_id": id, "name": called[id], "content": text}


def _output(content: object, where: str) -> Text:
    """Reads what a tool gave: a text, blocks, or any JSON."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not is_parts(content, also=("search_result",)):
        return json_of(content)
    blocks = [
        {**one, "type": one.get("type", "text")}
        if isinstance(one, Mapping)
        else {"type": "text", "text": one}
        for one in content
    ]
    return _texts(blocks, where)


def _failed(text: Text) -> Text:
    """Says in words that a tool failed: templates have none for it."""
    first = text if isinstance(text, str) else text[0]["text"] if isinstance(text[0], dict) else ""
    if first.lstrip("<").lower().startswith(("error", "tool_use_error")):
        return text
    said = f"Error: {first}" if first else "Error"
    if isinstance(text, str):
        return said
    return [{"type": "text", "text": said}, *text[1 if first else 0 :]]


def _string(block: Mapping[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise _wrong(f"{where}.{name}", "must be a text")
    return value


_WHAT = {
    "image": "an image",
    "document": "a document",
    "audio": "sound",
    "video": "a video",
    "search_result": "a search result",
    "container_upload": "a file",
}


def _refused(kind: str, where: str, only: str) -> BadRequest:
    """A block that is not for this model: what it is, and what it takes."""
    what = _WHAT.get(kind, "not known here")
    if kind.startswith(("server_tool_", "mcp_")) or kind.endswith("_tool_result"):
        what = "of a tool that Anthropic's servers run"
    return BadRequest(
        f"{where}.type: {kind[:50]!r} is {what}, and this model takes only {only}; leave the block out",
        param="messages" if where.startswith("messages") else "system",
        code="unsupported_content",
    )


def _wrong(where: str, what: str) -> BadRequest:
    return BadRequest(f"{where}: {what}", param=re.split(r"[.\[]", where)[0])
