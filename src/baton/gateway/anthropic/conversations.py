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


@dataclass
class _Turn:
    role: str
    texts: list[str] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)

    def add_note(self, text: str, *, first: bool = False) -> None:
        """A system message's text, in a user's turn.  It makes no turn of the user's after results of tools:
        templates forget what was thought before one."""
        if self.results and not self.texts:
            self.results[-1]["content"] = _joined([self.results[-1]["content"], text])
        else:
            self.texts.insert(0 if first else len(self.texts), text)

    def messages(self) -> list[dict[str, Any]]:
        text = _joined(self.texts)
        if self.role == "user":
            own = [{"role": "user", "content": text}] if self.texts or not self.results else []
            return [*self.results, *own]
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if self.thoughts:
            thoughts = "\n".join(self.thoughts)
            message |= {"reasoning_content": thoughts, "reasoning": thoughts}
            if not text:
                message["thinking"] = thoughts  # (Harmony's template takes it, or the text)
        if self.calls:
            message["tool_calls"] = self.calls
        return [message]


def system_of(system: str | Sequence[Any] | None) -> str:
    """The system prompt.  Raises `BadRequest`."""
    return "" if system is None else _texts(system, "system")


def conversation_of(system: str | Sequence[Any] | None, given: Sequence[Mapping[str, Any]]) -> Conversation:
    """Raises `BadRequest` with the place of what is wrong."""
    turns: list[_Turn] = []
    called: dict[str, str] = {}  # id of a call → name of its tool
    head, notes = [system_of(system)], list[str]()
    for i, message in enumerate(given):
        where = f"messages[{i}]"
        role, content = message.get("role"), message.get("content")
        if role not in _ROLES:
            raise _wrong(f"{where}.role", f"{str(role)[:50]!r} must be 'user' or 'assistant'")
        if role == "system":
            text = _texts(content, f"{where}.content")
            if not turns:
                head.append(text)
            elif turns[-1].role == "user":
                turns[-1].add_note(text)
            else:
                notes.append(text)
            continue
        if notes and role == "assistant":
            turns.append(_Turn("user", notes))
            notes = []
        if not turns or turns[-1].role != role:
            turns.append(_Turn(role))
        _read_blocks(turns[-1], _blocks(content, f"{where}.content"), f"{where}.content", called)
        if notes:
            turns[-1].add_note(_joined(notes), first=True)
            notes = []
    if notes:
        turns.append(_Turn("user", notes))
    if not turns:
        raise _wrong("messages", "give at least one message of role user")
    prefilled = _is_prefilled(turns)
    text = _joined(head)
    messages = [{"role": "system", "content": text}] if text else []
    for turn in turns:
        messages += turn.messages()
    return Conversation(messages, prefilled, bool(turns[-1].results))


def _is_prefilled(turns: list[_Turn]) -> bool:
    """Whether the answer goes on with the last turn; takes an empty one away."""
    last = turns[-1]
    if last.role == "user":
        return False
    if last.calls:
        raise _wrong("messages", "the last one calls a tool; send its tool_result in a user message after it")
    if _joined(last.texts):
        return True
    if last.thoughts or len(turns) == 1:
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


def _texts(content: object, where: str) -> str:
    """Of what can be nothing but text."""
    texts = [
        _text(_block(block, f"{where}[{i}]"), f"{where}[{i}]", only="text")
        for i, block in enumerate(_blocks(content, where))
    ]
    if texts:
        texts[0] = _ATTRIBUTION.sub("", texts[0], count=1) if _ATTRIBUTION.match(texts[0]) else texts[0]
    return _joined(texts, "\n")


def _block(block: object, where: str) -> Mapping[str, Any]:
    if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
        raise _wrong(where, "must be a block: {'type': 'text', 'text': …}")
    return block


def _text(block: Mapping[str, Any], where: str, *, only: str) -> str:
    if block["type"] != "text":
        raise _refused(block["type"], where, only)
    return _string(block, "text", where)


def _read_blocks(turn: _Turn, blocks: Sequence[object], where: str, called: dict[str, str]) -> None:
    texts: list[str] = []
    for i, given in enumerate(blocks):
        place = f"{where}[{i}]"
        block = _block(given, place)
        kind = block["type"]
        if _WHERE.get(kind, turn.role) != turn.role:
            raise _wrong(place, f"a block of type {kind} belongs to a message of role {_WHERE[kind]}")
        match kind:
            case "tool_use":
                turn.calls.append(_call(block, place))
                called[block["id"]] = block["name"]
            case "tool_result":
                turn.results.append(_result(block, place, called))
            case "thinking":
                turn.thoughts.append(_string(block, "thinking", place) or thoughts_in(block.get("signature")))
            case "redacted_thinking":
                pass  # (nobody here can read it)
            case _:
                texts.append(_text(block, place, only=_KNOWN))
    if texts:
        turn.texts.append(_joined(texts, "\n"))


def _call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, Mapping):
        raise _wrong(f"{where}.input", "must be an object")
    function = {"name": _string(block, "name", where), "arguments": arguments}
    return {"id": _string(block, "id", where), "type": "function", "function": function}


def _result(block: Mapping[str, Any], where: str, called: Mapping[str, str]) -> dict[str, Any]:
    id = _string(block, "tool_use_id", where)
    if id not in called:
        raise _wrong(
            f"{where}.tool_use_id", f"no tool_use before it has the id {id[:100]!r}; give that of its call"
        )
    content = block.get("content")
    text = "" if content is None else _texts(content, f"{where}.content")
    if block.get("is_error") is True and not text.lstrip("<").lower().startswith(("error", "tool_use_error")):
        # (Templates have no word for it.)
        text = f"Error: {text}" if text else "Error"
    return {"role": "tool", "tool_call_id": id, "name": called[id], "content": text}


def _string(block: Mapping[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise _wrong(f"{where}.{name}", "must be a text")
    return value


def _joined(texts: Sequence[str], by: str = "\n\n") -> str:
    return by.join(filter(None, texts))


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
