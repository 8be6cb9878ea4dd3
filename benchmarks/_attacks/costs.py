"""Requests that are small to send and large to serve, and bodies that take long to read."""

from __future__ import annotations

import http.client
import json
import threading
import time
from typing import Any

from _attacks import Attack

_ANSWER_S = 60.0
_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def post(host: str, port: int, path: str, body: bytes) -> int:
    """The status; 0 without an answer."""
    connection = http.client.HTTPConnection(host, port, timeout=_ANSWER_S)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def _repeat(path: str, body: Any, *, clients: int = 1, pause_s: float = 0.0) -> Attack:
    """Sends the same request, `clients` at a time."""

    def attack(host: str, port: int, seconds: float) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        end = time.monotonic() + seconds

        def one() -> None:
            while time.monotonic() < end:
                post(host, port, path, data)
                time.sleep(pause_s)

        threads = [threading.Thread(target=one, daemon=True) for _ in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()) + 1.0)

    return attack


def _stop_strings(count: int, length: int) -> list[str]:
    return ["a" * (length - 2) + f"{number:02d}" for number in range(count)]


def _chat(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1, **more}


def _filled(opening: bytes, piece: bytes, closing: bytes, size: int) -> bytes:
    count = max(1, (size - len(opening) - len(closing)) // (len(piece) + 1))
    return opening + b",".join([piece] * count) + closing


_BODY = (4 << 20) - 4096
"""Bytes: just below what a server of a small context reads."""
_BIAS = {str(token): 1 for token in range(500)}

ATTACKS: dict[str, Attack] = {
    "stop strings x 8 sequences": _repeat(
        _COMPLETIONS, {"prompt": "a", "n": 8, "max_tokens": 1, "stop": _stop_strings(64, 4096)}
    ),
    "stop strings x 4,096 sequences": _repeat(
        _COMPLETIONS, {"prompt": ["a"] * 32, "n": 128, "max_tokens": 1, "stop": _stop_strings(64, 60)}
    ),
    "bias x 4,096 sequences": _repeat(
        _COMPLETIONS, {"prompt": ["a"] * 32, "n": 128, "max_tokens": 1, "logit_bias": _BIAS}
    ),
    "long prompts x 128 sequences": _repeat(
        _COMPLETIONS, {"prompt": [[17] * 500] * 32, "n": 128, "max_tokens": 1}
    ),
    "short prompts x 128 sequences": _repeat(
        _COMPLETIONS, {"prompt": [[17] * 20] * 32, "n": 128, "max_tokens": 1}
    ),
    "log-probabilities of 16 sequences": _repeat(
        _COMPLETIONS, {"prompt": "Once", "n": 16, "max_tokens": 480, "ignore_eos": True, "logprobs": 5}
    ),
    "log-probabilities of 16 prompts": _repeat(
        _COMPLETIONS, {"prompt": [[17] * 500] * 16, "max_tokens": 1, "echo": True, "logprobs": 5}
    ),
    "4,000 texts": _repeat(_COMPLETIONS, {"prompt": ["a b c " * 50] * 4000, "max_tokens": 1}),
    "chat body of small messages": _repeat(_CHAT, _filled(b'{"messages": [', b"{}", b"]}", _BODY)),
    "chat body of one text": _repeat(
        _CHAT, b'{"messages": [{"role": "user", "content": "' + b"a b" * (_BODY // 3) + b'"}]}'
    ),
    "body of token ids": _repeat(_COMPLETIONS, _filled(b'{"prompt": [', b"17", b"]}", _BODY)),
    "body of lists of token ids": _repeat(_COMPLETIONS, _filled(b'{"prompt": [', b"[17,18]", b"]}", _BODY)),
    "body of texts": _repeat(_COMPLETIONS, _filled(b'{"prompt": [', b'"a b c d"', b"]}", _BODY)),
    "tokens to text": _repeat("/detokenize", _filled(b'{"tokens": [', b"17", b"]}", _BODY)),
    "long texts to tokens": _repeat("/tokenize", {"prompt": "a b c " * 20_000}),
    "unstreamed answers": _repeat(
        _COMPLETIONS,
        {"prompt": "Once", "max_tokens": 480, "ignore_eos": True, "temperature": 0},
        clients=16,
    ),
    "template: loops": _repeat(_CHAT, _chat(chat_template_kwargs={"loops": 3000})),
    "template: a long result": _repeat(_CHAT, _chat(chat_template_kwargs={"size": 400_000_000})),
}

_DROPPED, _HELPER = "control: 4 MiB bodies, dropped", "control: a busy process of a helper's priority"

CONTROLS = {
    # What these ask for is accepted and computed.
    "long prompts x 128 sequences": "control: 128 x 500 tokens",
    "short prompts x 128 sequences": "control: 128 x 20 tokens",
    "4,000 texts": "control: 128 x one text",
    "log-probabilities of 16 prompts": "control: 16 x log-probabilities of a prompt",
    "log-probabilities of 16 sequences": "control: 16 x log-probabilities",
    "unstreamed answers": "control: 16 x streams",
    # These are bytes that somebody has to receive and to read ...
    "chat body of small messages": _DROPPED,
    "chat body of one text": _DROPPED,
    "body of token ids": _DROPPED,
    "body of lists of token ids": _DROPPED,
    "body of texts": _DROPPED,
    "tokens to text": _DROPPED,
    # ... and these are work for a helper.
    "stop strings x 8 sequences": _HELPER,
    "stop strings x 4,096 sequences": _HELPER,
    "long texts to tokens": _HELPER,
    "template: loops": _HELPER,
    "template: a long result": _HELPER,
}
