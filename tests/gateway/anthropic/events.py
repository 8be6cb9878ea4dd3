"""What a client makes of the events of a message."""

from __future__ import annotations

import json
from typing import Any


def events_of(text: str) -> list[dict[str, Any]]:
    """Of a stream; the name of each is its data's type."""
    found = []
    for event in text.split("\n\n"):
        if event:
            name, data = event.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    return found


def put_together(events: list[dict[str, Any]], *, complete: bool = True) -> dict[str, Any]:
    """The message that they are; they come in the order that the API promises."""
    message: dict[str, Any] = {}
    parts: list[str] = []
    opened = False
    for event in events:
        match event["type"]:
            case "message_start":
                assert not message
                message = event["message"]
                assert (message["content"], message["stop_reason"]) == ([], None)
            case "content_block_start":
                assert (opened, event["index"]) == (False, len(message["content"]))
                message["content"].append(dict(event["content_block"]))
                opened, parts = True, []
            case "content_block_delta":
                block, delta = message["content"][-1], event["delta"]
                assert (opened, event["index"]) == (True, len(message["content"]) - 1)
                match delta["type"], block["type"]:
                    case "text_delta", "text":
                        parts.append(delta["text"])
                        block["text"] += delta["text"]
                    case "thinking_delta", "thinking":
                        assert not block["signature"]
                        parts.append(delta["thinking"])
                        block["thinking"] += delta["thinking"]
                    case "signature_delta", "thinking":
                        block["signature"] = delta["signature"]
                        parts.append(delta["signature"])
                    case "input_json_delta", "tool_use":
                        parts.append(delta["partial_json"])
                        block["input"] = "".join(parts)
                    case kinds:
                        raise AssertionError(kinds)
                assert parts[-1], "a delta brings something"
            case "content_block_stop":
                assert (opened, event["index"]) == (True, len(message["content"]) - 1)
                opened = False
            case "message_delta":
                assert not opened
                message |= event["delta"]
                message["usage"] = event["usage"]
            case "message_stop":
                assert event is events[-1]
            case "ping":
                pass
            case other:
                raise AssertionError(other)
    assert events[-1]["type"] == "message_stop" or not complete
    return message


def settled(message: dict[str, Any]) -> dict[str, Any]:
    """Without what is another one each time; arguments that were cut off as their beginning."""
    blocks = []
    for block in message["content"]:
        block = {key: value for key, value in block.items() if key != "id"}
        if isinstance(block.get("input"), str):
            try:
                block["input"] = json.loads(block["input"])
            except ValueError:
                block["input"] = "cut off"
        blocks.append(block)
    return {**message, "id": "", "content": blocks}


def same(streamed: dict[str, Any], whole: dict[str, Any]) -> bool:
    """Both settled; a call whose arguments were cut off is not in the whole message."""
    blocks = [one for one in streamed["content"] if one.get("input") != "cut off"]
    return {**streamed, "content": blocks} == whole
