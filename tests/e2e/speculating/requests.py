"""Requests of all kinds, each a function of a seed; and such that end where a known answer has a given token.

Drafts come from what stands twice in a text.  So prompts quote themselves, some answers may have a few
different tokens only, and models of random weights repeat themselves anyway: many drafts are right, and many
wrong.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from tests.e2e.test_structured_faults import random_schema

_BINDING = {"response_format", "structured_outputs", "allowed_token_ids"}
LONGEST = 100
"""Tokens of an answer, where it is no JSON."""
_WORDS = (
    "river stone lamp garden paper window green seven letter music table bread winter "
    "story yellow market cloud silver number quiet"
).split()
_STOPS = ([" the"], ["e", "zebra"], ["\n", " a "], ["river stone"], ["."])
_REGEXES = (
    r"(ABC-[0-9]{2};){2,9}",
    r"[a-c]{5,40}",
    r"((red|green), )+(blue|black)",
    r"\d{3}( \d{3}){0,9}",
)
_LARK = 'start: row+\nrow: "name=" NAME ";\\n"\nNAME: /[a-z]{1,4}/'
_SCHEMA = {
    "type": "array",
    "minItems": 2,
    "maxItems": 4,
    "items": {
        "type": "object",
        "properties": {
            "identifier": {"type": "integer", "minimum": 100, "maximum": 999},
            "is_available": {"type": "boolean"},
        },
        "required": ["identifier", "is_available"],
        "additionalProperties": False,
    },
}
_TOOL = {
    "type": "function",
    "function": {
        "name": "send_letter",
        "description": "Sends a letter.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "is_urgent": {"type": "boolean"}},
            "required": ["city", "is_urgent"],
        },
    },
}


@dataclass(frozen=True)
class Request:
    name: str
    """Replays it, with the seed."""
    path: str
    body: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.name}: POST {self.path} {json.dumps(self.body)}"


def draw(rng: random.Random, name: str, vocab: int) -> Request:
    """`vocab`: token ids from 3 on may be asked for."""
    if rng.random() < 0.06:
        texts = [_text(rng) for _ in range(rng.randint(1, 3))]
        return Request(name, "/v1/embeddings", {"input": texts, "encoding_format": "base64"})
    chat = rng.random() < 0.25
    body: dict[str, Any] = {
        "max_tokens": rng.randint(1, LONGEST),
        "return_token_ids": True,
        "ignore_eos": rng.random() < 0.6,
        "stream": rng.random() < 0.5,
        "priority": rng.choice((0, 0, 0, 1, 2)),
    }
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    body |= _drawn(rng) | _bound(rng, vocab) | _penalties(rng)
    body |= _ends(rng, body["max_tokens"])
    body |= _told(rng, chat, vocab, bool(body["stream"]))
    if rng.random() < 0.15:
        body["n"] = rng.randint(2, 3)
    if chat:
        body["messages"] = [{"role": "user", "content": _text(rng)}]
        if rng.random() < 0.3:
            body["messages"] = [{"role": "system", "content": _text(rng)[:80]}, *body["messages"]]
        body |= _of_chats(rng, body)
    elif rng.random() < 0.4:
        part = [rng.randrange(3, vocab) for _ in range(rng.randint(1, 12))]
        body["prompt"] = part * rng.randint(1, 8)
    else:
        body["prompt"] = _text(rng)
    return Request(name, "/v1/chat/completions" if chat else "/v1/completions", body)


def _of_chats(rng: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    """Thoughts, and calls of tools where nothing else binds the answer."""
    more: dict[str, Any] = {}
    if rng.random() < 0.2:
        more["chat_template_kwargs"] = {"enable_thinking": True}
        if rng.random() < 0.5:
            more["thinking_token_budget"] = rng.randint(0, 20)
    if rng.random() < 0.2 and not _BINDING & body.keys():
        more |= {"tools": [_TOOL], "tool_choice": rng.choice(("auto", "required", "required"))}
    return more


def _text(rng: random.Random) -> str:
    """Most quote themselves."""
    part = " ".join(rng.choices(_WORDS, k=rng.randint(1, 12)))
    match rng.choice(("plain", "twice", "repeat", "list", "long")):
        case "twice":
            return f"{part}. {part}. {part[: rng.randint(1, len(part))]}"
        case "repeat":
            return f"Repeat this: {part}. Again: {part}. Again:"
        case "list":
            return "".join(f"{number}. {part}\n" for number in range(1, rng.randint(3, 8)))
        case "long":
            return " ".join(rng.choices(_WORDS, k=rng.randint(60, 140)))
    return part


def _drawn(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.45:
        return {"temperature": 0.0, "seed": rng.randrange(2**31)}
    body: dict[str, Any] = {"temperature": rng.choice((0.1, 0.5, 0.8, 1.0, 1.3))}
    body["seed"] = rng.randrange(2**31)
    for field, values in (("top_p", (0.5, 0.9, 0.99)), ("top_k", (1, 2, 5, 40)), ("min_p", (0.02, 0.2))):
        if rng.random() < 0.35:
            body[field] = rng.choice(values)
    return body


def _bound(rng: random.Random, vocab: int) -> dict[str, Any]:
    """What binds the answer."""
    some = [rng.randrange(3, vocab) for _ in range(rng.randint(3, 9))]
    match rng.choice(("free", "free", "free", "few", "few", "bias", "words", "grammar", "grammar")):
        case "few":
            return {"allowed_token_ids": sorted({*some, 2})}
        case "bias":
            return {"logit_bias": {str(token): rng.choice((-100, -3, 2.5, 6, 9)) for token in some}}
        case "words":
            return {"bad_words": rng.sample(_WORDS, 2)}
        case "grammar":
            most = {"max_tokens": rng.randint(1, 120)}
            match rng.choice(("schema", "schema", "random", "regex", "regex", "choice", "lark", "object")):
                case "schema":
                    wanted = {"name": "orders", "schema": _SCHEMA}
                    return most | {"response_format": {"type": "json_schema", "json_schema": wanted}}
                case "random":
                    return most | {"structured_outputs": {"json": random_schema(rng)}}
                case "regex":
                    return most | {"structured_outputs": {"regex": rng.choice(_REGEXES)}}
                case "choice":
                    return most | {"structured_outputs": {"choice": ["red green red green", "yellow", "red"]}}
                case "lark":
                    return most | {"structured_outputs": {"grammar": _LARK}}
            return most | {"response_format": {"type": "json_object"}}
    return {}


def _penalties(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.7:
        return {}
    body: dict[str, Any] = {}
    if rng.random() < 0.6:
        body["repetition_penalty"] = rng.choice((1.05, 1.3, 0.9))
    if rng.random() < 0.6:
        body["presence_penalty"] = rng.choice((0.6, -0.5))
    if rng.random() < 0.6:
        body["frequency_penalty"] = rng.choice((0.4, -0.3))
    return body


def _ends(rng: random.Random, most: int) -> dict[str, Any]:
    body: dict[str, Any] = {}
    if rng.random() < 0.2:
        body["stop"] = rng.choice(_STOPS)
        body["include_stop_str_in_output"] = rng.random() < 0.4
    if rng.random() < 0.15:
        body["min_tokens"] = rng.randint(1, min(most, 9))
    if rng.random() < 0.08:
        body["repetition_detection"] = {"max_pattern_size": 8, "min_count": rng.randint(3, 5)}
    return body


def _told(rng: random.Random, chat: bool, vocab: int, stream: bool) -> dict[str, Any]:
    """What the answer says besides its text."""
    body: dict[str, Any] = {}
    if rng.random() < 0.35:
        few = rng.choice((0, 1, 3))
        body |= {"logprobs": True, "top_logprobs": few} if chat else {"logprobs": few}
        if rng.random() < 0.2:
            body["logprob_token_ids"] = [rng.randrange(3, vocab) for _ in range(3)]
    if rng.random() < 0.06 and not stream:
        body["prompt_logprobs"] = rng.choice((0, 2))
    if rng.random() < 0.1:
        body["skip_special_tokens"] = False
    if rng.random() < 0.05 and not chat:
        body["echo"] = True
    return body


def ending_within(rng: random.Random, request: Request, name: str, choice: dict[str, Any]) -> Request | None:
    """The same request, but ending at some place of its known answer: at a token, in the midst of a text, or
    by its length.  None: that has no token."""
    ids: list[int] = choice.get("token_ids") or []
    said: dict[str, Any] = choice.get("message") or choice.get("delta") or {}
    text: str = choice.get("text") or said.get("content") or ""
    if not ids:
        return None
    place = rng.randrange(len(ids))
    ends = ("stop", "include_stop_str_in_output", "min_tokens", "repetition_detection", "stop_token_ids")
    body = {field: value for field, value in request.body.items() if field not in ends}
    how = rng.choice(("length", "token", "token", "text", "text"))
    if how == "text" and text:
        first = rng.randrange(len(text))
        body["stop"] = [text[first : first + rng.randint(1, 7)]]
        body["include_stop_str_in_output"] = rng.random() < 0.4
    elif how == "length":
        body["max_tokens"] = place + 1
    else:
        body["stop_token_ids"] = [ids[place]]
        if rng.random() < 0.3:
            body["min_tokens"] = min(rng.randint(1, place + 1), body["max_tokens"])
    return Request(name, request.path, body)
