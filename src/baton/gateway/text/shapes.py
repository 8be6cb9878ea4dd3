"""How a chat template wants messages to look, asked by rendering short conversations.

Templates differ in what a message without text has for content, in whether they read parts of a text, in the
name of what was thought, in whether they know the role `developer`, show tools, or keep a text beside calls.
Their source tells none of it safely: the same words stand in comments, in branches for other fields, in
prompts.  So each question is put once, as a conversation with words in it that nobody else says; the shape is
taken in which most of them come out.  A shape with which the template fails is no answer, and the next one is
tried; if all fail, the first is taken, and what the template says of the messages themselves is the error.

A question is put when a conversation needs its answer, in the process that renders (`helpers/`), within the
limits of that; helpers are forked from one that knows the answers.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from baton.gateway.api.content import added, joined, parts_of

Message = dict[str, Any]
Render = Callable[[Sequence[Message], Sequence[Mapping[str, Any]] | None], str | None]
"""(messages, tools) → the text, to be continued by the model; None: the template rejects them."""

_TEXT, _MORE, _THOUGHT, _TOOL, _KEY, _VALUE = "qztext", "qzmore", "qzthought", "qztool", "qzkey", "qzvalue"
_ROLE = "qzrole"
"""Words of the conversations that are rendered as questions."""
_PRINTED = re.compile(rf"""['"](text|thinking)\\*['"]\s*:\s*\\*['"]({_TEXT}|{_THOUGHT})""")
"""A part that came out as code, and was not read."""
_USER: Message = {"role": "user", "content": "qzuser"}
_LAST: Message = {"role": "assistant", "content": "qzlast"}
_CALL = {"id": "qzcall001", "type": "function"}
_RESULT: Message = {"role": "tool", "tool_call_id": _CALL["id"], "name": _TOOL, "content": "qzresult"}
_PROPERTIES = {"qzparameter": {"type": "string", "description": "One."}}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": _TOOL,
            "description": "Does it.",
            "parameters": {"type": "object", "properties": _PROPERTIES, "required": ["qzparameter"]},
        },
    }
]
_MISSING = object()


Thinking = Literal["", "beside", "joined", "part"]


class Reads(NamedTuple):
    """What a template reads as content of a role."""

    text: bool
    parts: bool


class Kind(NamedTuple):
    """What there is in a turn of the model."""

    text: bool
    thought: bool
    calls: bool


class Turn(NamedTuple):
    """How such a turn is written."""

    empty: Any = ""
    """Content where there is no text: "", None, or `_MISSING`."""
    thinking: Thinking = ""
    """What was thought has gpt-oss's name, too; `joined`: and the text beside calls belongs to it; `part`: it
    is a part of the content, as Mistral has it."""
    apart: bool = False
    """A text before calls is a message of its own."""
    as_text: bool = False
    """Arguments are JSON as a text."""


class Shapes:
    """Asks one template."""

    def __init__(self, render: Render, arguments: Callable[[dict[str, Any]], Any]) -> None:
        """`arguments`: as calls have them that were read."""
        self._render = render
        self._arguments = arguments
        self._reads: dict[str, Reads] = {}
        self._turns: dict[Kind, Turn] = {}
        self._shows_tools: bool | None = None
        self._knows_developer: bool | None = None

    @property
    def shows_tools(self) -> bool:
        """Tools have a place in the prompt: it is another one with them."""
        if self._shows_tools is None:
            system = {"role": "system", "content": "qzsystem"}
            self._shows_tools = any(
                (text := self._render(messages, _TOOLS)) is not None and text != self._render(messages, None)
                for messages in ([_USER], [system, _USER])
            )
        return self._shows_tools

    @property
    def knows_developer(self) -> bool:
        """The role is more to it than any name."""
        if self._knows_developer is None:
            developer, other = (
                self._shown([{"role": role, "content": _TEXT}, _USER]) for role in ("developer", _ROLE)
            )
            shown = developer is not None and _TEXT in developer
            alike = other is not None and other.replace(_ROLE, "developer") == developer
            self._knows_developer = shown and not alike
        return self._knows_developer

    def reads(self, role: str) -> Reads:
        """How content of a role comes out; of one that it does not know, as a user's."""
        known = self._reads.get(role)
        if known is None:
            known = self._reads[role] = self._ask_reads(role)
        return known

    def turn(self, kind: Kind) -> Turn:
        """How a turn of the model is written in which there is this."""
        known = self._turns.get(kind)
        if known is None:
            known = self._turns[kind] = self._ask_turn(kind)
        return known

    def prepare(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        """The messages as the template wants them; new ones."""
        prepared: list[Message] = []
        for message in messages:
            role = str(message.get("role"))
            if role == "assistant":
                prepared += self._written(message)
                continue
            if role == "developer" and not self.knows_developer:
                role = "system"
            content = self.content(role, message.get("content"))
            prepared.append({**message, "role": role, "content": "" if content is None else content})
        return prepared

    def content(self, role: str, content: Any) -> Any:
        """A text, or the parts of one, as the template reads them of this role."""
        if content is None or content == "":
            return content
        reads = self.reads(role)
        if isinstance(content, list):
            return list(content) if reads.parts else joined(content)
        return [{"type": "text", "text": content}] if reads.parts and not reads.text else content

    def _written(self, message: Mapping[str, Any]) -> list[Message]:
        content, calls = message.get("content"), message.get("tool_calls")
        thought = message.get("reasoning") or message.get("reasoning_content")
        turn = self.turn(Kind(bool(content), bool(thought), bool(calls)))
        return _write(message, self.content("assistant", content), thought, calls, turn)

    def _ask_reads(self, role: str) -> Reads:
        parts = [{"type": "text", "text": _TEXT}, {"type": "text", "text": _MORE}]
        before: list[Message] = []
        if role in ("assistant", "tool"):
            before = [_USER]
        if role == "tool":
            turn = self.turn(Kind(text=False, thought=False, calls=True))
            before += _write({"role": "assistant"}, None, None, self._calls(), turn)
        after = [] if role in ("user", "tool") else [_USER]
        more = {"tool_call_id": _CALL["id"], "name": _TOOL} if role == "tool" else {}

        def asked(content: Any) -> str:
            return self._shown([*before, {"role": role, "content": content, **more}, *after]) or ""

        text, listed = asked(_TEXT), asked(parts)
        reads = Reads(_TEXT in text, _TEXT in listed and _MORE in listed and not _PRINTED.search(listed))
        if not any(reads) and role != "user":
            return self.reads("user")
        return reads

    def _ask_turn(self, kind: Kind) -> Turn:
        wanted = [
            *([_TEXT] if kind.text else ()),
            *([_THOUGHT] if kind.thought else ()),
            *([_KEY, _VALUE] if kind.calls else ()),
        ]
        message: Message = {"role": "assistant"}
        if kind.thought:
            message |= {"reasoning": _THOUGHT, "reasoning_content": _THOUGHT}
        content = self.content("assistant", _TEXT) if kind.text else None
        thought, calls = _THOUGHT if kind.thought else None, self._calls() if kind.calls else None
        best, chosen, shown = (-1, 0), next(_candidates(kind)), ""
        for turn in _candidates(kind):
            if best == (len(wanted), 0) and turn.empty is not None:
                break
            written = _write(message, content, thought, calls, turn)
            results = [_RESULT] if calls else []
            text = self._shown([_USER, *written, *(results or [_USER])])
            if text is None or (turn.thinking == "part" and _PRINTED.search(text)):
                continue
            score = sum(word in text for word in wanted), -text.count("None")
            # (The API has null where there are calls alone; "" is safer where it makes no difference.)
            tells = kind.calls and score == best and turn == chosen._replace(empty=None) and text != shown
            if score > best or tells:
                later = [_USER, *written, *results, *([_LAST] if results else ()), _USER, _LAST, _USER]
                if self._shown(later) is not None:
                    best, chosen, shown = score, turn, text
        return chosen

    def _shown(self, messages: Sequence[Message]) -> str | None:
        """Some templates cannot do without tools."""
        text = self._render(messages, None)
        return self._render(messages, _TOOLS) if text is None else text

    def _calls(self) -> list[dict[str, Any]]:
        return [{**_CALL, "function": {"name": _TOOL, "arguments": self._arguments({_KEY: _VALUE})}}]


def _candidates(kind: Kind) -> Iterator[Turn]:
    """Ways to write such a turn, those first that most templates take."""
    thinkings: list[Thinking] = [""]
    if kind.thought:
        thinkings += ["beside", "part"]
    if kind.thought and kind.text and kind.calls:
        thinkings.append("joined")
    for as_text, apart, thinking in itertools.product(
        (False, True) if kind.calls else (False,),
        (False, True) if kind.calls and kind.text else (False,),
        thinkings,
    ):
        if not (apart and thinking in ("joined", "part")):
            empty = thinking != "part" and (not kind.text or apart or thinking == "joined")
            for content in ("", None, _MISSING) if empty else ("",):
                yield Turn(content, thinking, apart, as_text)


def _write(
    message: Mapping[str, Any],
    content: Any,
    thought: str | None,
    calls: Sequence[Mapping[str, Any]] | None,
    turn: Turn,
) -> list[Message]:
    written: Message = {name: value for name, value in message.items() if name != "content"}
    if thought and turn.thinking == "part":
        content = [{"type": "thinking", "thinking": thought}, *parts_of(content)]
    elif thought and turn.thinking:
        written["thinking"] = thought
    if content and calls and turn.thinking == "joined":
        written["thinking"] = f"{thought}\n\n{joined(content)}"
        content = None
    if calls:
        written["tool_calls"] = [_as_text(call) for call in calls] if turn.as_text else list(calls)
    if content and turn.apart:
        said = {"role": written["role"], "content": content}
        return [said, *_write(written, None, thought, calls, turn)]
    if content:
        written["content"] = content
    elif turn.empty is not _MISSING:
        written["content"] = turn.empty
    return [written]


def _as_text(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": str(function["arguments"])}}


def tamer(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """The same conversation for a template that rejects it, in ways that strict ones take, the mildest first:
    neighbours of one role are one message; system messages join the user's turns, later ones, then all; calls
    and their results are texts."""
    yield _merged(messages)
    yield _merged(_folded(messages, keep=1))
    yield _merged(_folded(messages, keep=0))
    yield _merged(_spoken(messages))
    yield _merged(_folded(_spoken(messages), keep=0))


def _merged(messages: Sequence[Message]) -> list[Message]:
    merged: list[Message] = []
    for message in messages:
        if message["role"] == "assistant" and not (message.get("content") or message.get("tool_calls")):
            continue
        before = merged[-1] if merged else None
        if (
            before is not None
            and before["role"] == message["role"] != "tool"
            and not (before.get("tool_calls") or message.get("tool_calls"))
        ):
            content = added(before.get("content"), message.get("content"))
            merged[-1] = {**before, **message, "content": content}
        else:
            merged.append(message)
    return merged


def _spoken(messages: Sequence[Message]) -> list[Message]:
    """Calls as what the model says, results as what the user does."""
    spoken: list[Message] = []
    for message in messages:
        content = message.get("content")
        for call in message.get("tool_calls") or ():
            function = call["function"]
            content = added(
                content, f'{{"name": "{function["name"]}", "arguments": {function["arguments"]}}}'
            )
        role = "user" if message["role"] == "tool" else message["role"]
        kept = {name: value for name, value in message.items() if name != "tool_calls"}
        spoken.append({**kept, "role": role, "content": content})
    return spoken


def _folded(messages: Sequence[Message], keep: int) -> list[Message]:
    """`keep`: so many of the first system messages stay."""
    folded: list[Message] = []
    notes: Any = None
    for i, message in enumerate(messages):
        if message["role"] in ("system", "developer") and i >= keep:
            notes = added(notes, message.get("content"))
        elif message["role"] == "user" and notes:
            folded.append({**message, "content": added(notes, message.get("content"))})
            notes = None
        else:
            folded.append(message)
    return [*folded, {"role": "user", "content": notes}] if notes else folded
