"""What an answer's deltas become: items, and the events that tell of them.  Pure.

An item is open from its first delta until something else begins.  Called for nearly every token, so what all
deltas of an item have in common is encoded once, when it opens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from baton.gateway.api.custom import InputReader
from baton.gateway.parsing.deltas import Call, Content, Delta, Reasoning
from baton.gateway.responses.items import sealed
from baton.gateway.responses.tools import Names

Status = Literal["completed", "incomplete"]
_Kind = Literal["", "message", "reasoning", "function_call", "custom_tool_call"]
_CALLS = ("function_call", "custom_tool_call")
_NO_NAMES: Names = {}

encode = msgspec.json.encode


def event(kind: str, members: bytes) -> bytes:
    """`members`: of its data, besides `type`, as JSON without braces."""
    name = kind.encode()
    return b"event: " + name + b'\ndata: {"type":"' + name + b'",' + members + b"}\n\n"


class Output:
    """The output of one answer, as it grows."""

    __slots__ = (
        "_after",
        "_before",
        "_call_id",
        "_custom",
        "_encrypted",
        "_index",
        "_input",
        "_kind",
        "_logprobs",
        "_name",
        "_names",
        "_pieces",
        "_place",
        "_tells",
        "_token",
        "items",
        "sequence",
    )

    def __init__(
        self,
        token: str,
        call_id: Callable[[str | None], str],
        *,
        tells: bool,
        encrypted: bool,
        custom: frozenset[str] = frozenset(),
        names: Names = _NO_NAMES,
    ) -> None:
        """`token`: of the answer's id, for those of items.  `call_id`: a call's, by the model's own name for
        it.  `tells`: there are events.  `encrypted`: reasoning has `encrypted_content`, too.  `custom`: tools
        that take a text, and `names`, by the model's names."""
        self._token = token
        self._call_id = call_id
        self._tells = tells
        self._encrypted = encrypted
        self._custom = custom
        self._names = names
        self._input = InputReader()
        """Of a call that has a text."""
        self.sequence = 0
        """Number of the next event."""
        self.items: list[tuple[str, bytes]] = []
        """Those that are closed, with their ids, as JSON."""
        self._kind: _Kind = ""
        """Of the open one."""
        self._index = -1
        """Of a call: its number."""
        self._name: dict[str, str] = {}
        """Of a call: what identifies it."""
        self._pieces: list[str] = []
        self._logprobs: list[bytes] = []
        self._place = b""
        """Which item events are about."""
        self._before = self._after = b""
        """What stands around the text of a delta, but for its number."""

    @property
    def open(self) -> str:
        """The kind of the open item; "": there is none."""
        return self._kind

    def number(self) -> bytes:
        """The member of an event that says its number."""
        number, self.sequence = self.sequence, self.sequence + 1
        return b'"sequence_number":%d' % number

    def add(self, delta: Delta, logprobs: Sequence[bytes] = ()) -> bytes:
        """`logprobs`: of the tokens of a text, each as JSON.  Returns events."""
        match delta:
            case Content(text):
                return self.text(text, logprobs)
            case Reasoning(text):
                opening = self._open("reasoning") if self._kind != "reasoning" else b""
                return opening + self._grow(text)
            case Call(index, name, arguments, id):
                opening = b""
                if self._kind not in _CALLS or self._index != index:
                    opening = self.close("completed")
                    self._index = index
                    opening += self._open_call(name or "", id)
                if self._kind == "custom_tool_call":
                    arguments = self._input.push(arguments)
                return opening + (self._grow(arguments) if arguments else b"")

    def _open_call(self, name: str, id: str | None) -> bytes:
        self._name = {"call_id": self._call_id(id), "name": name}
        if name in self._names:
            self._name["namespace"], self._name["name"] = self._names[name]
        if name not in self._custom:
            return self._open("function_call")
        self._input = InputReader()
        return self._open("custom_tool_call")

    def text(self, text: str, logprobs: Sequence[bytes] = ()) -> bytes:
        """More of the answer's text."""
        if self._kind == "message" and self._tells and not logprobs:
            # What happens for nearly every token.
            self._pieces.append(text)
            number, self.sequence = self.sequence, self.sequence + 1
            return self._before + encode(text) + self._after % number
        opening = self._open("message") if self._kind != "message" else b""
        if not logprobs:
            return opening + self._grow(text)
        self._pieces.append(text)
        self._logprobs += logprobs
        if not self._tells:
            return b""
        listed = b',"logprobs":[' + b",".join(logprobs) + b"],"
        return opening + self._before + encode(text) + listed + self.number() + b"}\n\n"

    def _grow(self, text: str) -> bytes:
        self._pieces.append(text)
        if not self._tells:
            return b""
        number, self.sequence = self.sequence, self.sequence + 1
        return self._before + encode(text) + self._after % number

    def _open(self, kind: _Kind) -> bytes:
        events = self.close("completed")
        self._kind = kind
        self._pieces, self._logprobs = [], []
        id = self._id()
        index = len(self.items)
        self._place = b'"item_id":"%s","output_index":%d' % (id.encode(), index)
        if not self._tells:
            return b""
        self._after = b',"sequence_number":%d}\n\n'
        name = {
            "message": b"response.output_text.delta",
            "reasoning": b"response.reasoning_text.delta",
            "custom_tool_call": b"response.custom_tool_call_input.delta",
        }.get(kind, b"response.function_call_arguments.delta")
        self._before = b"event: " + name + b'\ndata: {"type":"' + name + b'",' + self._place
        if kind not in _CALLS:
            self._before += b',"content_index":0'
        if kind == "message":
            self._after = b',"logprobs":[],"sequence_number":%d}\n\n'
        self._before += b',"delta":'
        item = self._item(id, "in_progress", empty=True)
        events += self._event("response.output_item.added", b'"output_index":%d,"item":' % index + item)
        if kind not in _CALLS:
            part = b',"content_index":0,"part":' + self._part(b'""', b"")
            events += self._event("response.content_part.added", self._place + part)
        return events

    def close(self, status: Status) -> bytes:
        """The open item, if there is one, is complete, or was cut off."""
        kind, id = self._kind, self._id()
        if not kind:
            return b""
        text = encode("".join(self._pieces))
        self._pieces = ["".join(self._pieces)]
        logprobs = b",".join(self._logprobs)
        whole = self._input.is_open is False if kind == "custom_tool_call" else True
        if kind == "function_call":
            whole = _is_object(self._pieces[0])
        if not whole:
            status = "incomplete"
        item = self._item(id, status)
        events = b""
        if self._tells:
            part = b',"content_index":0,"part":' + self._part(text, logprobs)
            if kind == "message":
                said = b',"content_index":0,"text":' + text + b',"logprobs":[' + logprobs + b"]"
                events = self._event("response.output_text.done", self._place + said)
            elif kind == "reasoning":
                said = b',"content_index":0,"text":' + text
                events = self._event("response.reasoning_text.done", self._place + said)
            elif kind == "custom_tool_call":
                events = self._event(
                    "response.custom_tool_call_input.done", self._place + b',"input":' + text
                )
            else:
                said = b',"name":' + encode(self._name["name"]) + b',"arguments":' + text
                events = self._event("response.function_call_arguments.done", self._place + said)
            if kind not in _CALLS:
                events += self._event("response.content_part.done", self._place + part)
            done = b'"output_index":%d,"item":' % len(self.items) + item
            events += self._event("response.output_item.done", done)
        self.items.append((id, item))
        self._kind = ""
        return events

    def _event(self, kind: str, members: bytes) -> bytes:
        return event(kind, members + b"," + self.number())

    def _id(self) -> str:
        prefix = {"message": "msg", "reasoning": "rs", "custom_tool_call": "ctc"}.get(self._kind, "fc")
        return f"{prefix}_{self._token}{len(self.items):02}"

    def _part(self, text: bytes, logprobs: bytes) -> bytes:
        if self._kind == "reasoning":
            return b'{"type":"reasoning_text","text":' + text + b"}"
        return b'{"type":"output_text","annotations":[],"logprobs":[' + logprobs + b'],"text":' + text + b"}"

    def _item(self, id: str, status: str, *, empty: bool = False) -> bytes:
        """The open one, as JSON."""
        text = "" if empty else "".join(self._pieces)
        head: dict[str, Any] = {"id": id, "type": self._kind, "status": status}
        if self._kind == "function_call":
            return encode({**head, **self._name, "arguments": text})
        if self._kind == "custom_tool_call":
            return encode({**head, **self._name, "input": text})
        content = b"[]" if empty else b"[" + self._part(encode(text), b",".join(self._logprobs)) + b"]"
        if self._kind == "message":
            head["role"] = "assistant"
        else:
            head["summary"] = []
            head["encrypted_content"] = sealed(text) if self._encrypted and not empty else None
        return encode(head)[:-1] + b',"content":' + content + b"}"


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(arguments), dict)
    except (msgspec.MsgspecError, RecursionError):
        return False
