"""Images, sound and files in conversations: a note in their place, counted and told, or a refusal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.gateway.text.tokenizer import Tokenizer
from tests.gateway.api.test_chat import prompt_of
from tests.gateway.conftest import END
from tests.gateway.harness import GatewayServer

NOTE = "[image left out: this model reads text]"
DATA = "data:image/png;base64,AAAA"
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
IMAGES = {
    CHAT: {"type": "image_url", "image_url": {"url": DATA}},
    MESSAGES: {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}},
    RESPONSES: {"type": "input_image", "image_url": DATA},
}


def body_of(path: str, *parts: Any) -> dict[str, Any]:
    message = {"role": "user", "content": list(parts)}
    body = {"input": [message]} if path == RESPONSES else {"messages": [message]}
    return {**body, "model": "tiny", **({"max_tokens": 4} if path != RESPONSES else {"max_output_tokens": 4})}


@pytest.fixture(scope="module")
def strict(byte_level: Path, vocab: int) -> Iterator[GatewayServer]:
    with GatewayServer(byte_level, eos=END, vocab=vocab, unsupported_content="refuse") as server:
        yield server


@pytest.mark.parametrize("path", IMAGES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_note_stands_in_an_images_place(
    server: GatewayServer, tokenizer: Tokenizer, path: str, stream: bool
) -> None:
    """Also where it is all that the user says."""
    with server.http() as http:
        answer = http.post(path, json={**body_of(path, IMAGES[path], IMAGES[path]), "stream": stream})
        assert (answer.status_code, answer.headers["x-unsupported-content"]) == (200, "image=2")
        assert f"user\n{NOTE}\n{NOTE}<|end|>" in prompt_of(server, tokenizer)
        text = {"type": "input_text" if path == RESPONSES else "text", "text": "hello"}
        assert "x-unsupported-content" not in http.post(path, json=body_of(path, text)).headers


def test_kinds_are_counted(server: GatewayServer) -> None:
    def counted() -> dict[str, float]:
        with server.http() as http:
            lines = http.get("/metrics").text.splitlines()
        mark = 'kind="'
        return {
            line.split(mark)[1].split('"')[0]: float(line.split()[-1])
            for line in lines
            if line.startswith("baton:unsupported_content_total")
        }

    before = counted()
    parts = [
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "file", "file": {"file_id": "x"}},
        {"type": "video_url", "video_url": {"url": "x"}},
        {"image_url": "x"},
        {"type": "hologram"},
        {"text": "no type"},
    ]
    with server.http() as http:
        answer = http.post(CHAT, json=body_of(CHAT, *parts))
    assert answer.headers["x-unsupported-content"] == "audio=1, file=1, video=1, image=1, other=1"
    assert {kind: counted()[kind] - count for kind, count in before.items()} == {
        **dict.fromkeys(("audio", "file", "video", "image", "other"), 1),
        "arguments": 0,
    }


@pytest.mark.parametrize(
    ("path", "part", "says"),
    [
        (CHAT, IMAGES[CHAT], "messages[0].content[1].type: 'image_url' is an image"),
        (CHAT, {"image_url": "x"}, "messages[0].content[1].type: 'image_url' is an image"),
        (CHAT, {"type": "input_audio"}, "messages[0].content[1].type: 'input_audio' is sound"),
        (CHAT, {"type": "file"}, "messages[0].content[1].type: 'file' is a file"),
        (CHAT, {"type": "hologram"}, "messages[0].content[1].type: 'hologram' is no text"),
        (MESSAGES, IMAGES[MESSAGES], "messages[0].content[1].type: 'image' is an image"),
        (MESSAGES, {"type": "document"}, "messages[0].content[1].type: 'document' is a document"),
        (RESPONSES, IMAGES[RESPONSES], "input[0].content[1].type: 'input_image' is an image"),
        (RESPONSES, {"type": "input_file"}, "input[0].content[1].type: 'input_file' is a file"),
    ],
)
def test_a_server_that_refuses_says_where(
    strict: GatewayServer, path: str, part: dict[str, Any], says: str
) -> None:
    text = {"type": "input_text" if path == RESPONSES else "text", "text": "hello"}
    with strict.http() as http:
        answer = http.post(path, json=body_of(path, text, part))
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]
    assert "this model takes only text" in answer.json()["error"]["message"]
    assert strict.engine.submits == []


@pytest.mark.parametrize("kind", ["hologram_call", "hologram_call_output", "mcp_hologram"])
def test_items_of_other_servers(
    server: GatewayServer, strict: GatewayServer, tokenizer: Tokenizer, kind: str
) -> None:
    items = [{"role": "user", "content": "hi"}, {"type": kind, "id": "x"}, {"role": "user", "content": "hi"}]
    body = {"model": "tiny", "input": items, "max_output_tokens": 4}
    with server.http() as http:
        answer = http.post(RESPONSES, json=body)
    assert (answer.status_code, answer.headers["x-unsupported-content"]) == (200, "other=1")
    assert f"\n[{kind} left out: this model reads text]<|end|>" in prompt_of(server, tokenizer)
    with strict.http() as http:
        answer = http.post(RESPONSES, json=body)
    assert answer.status_code == 400
    assert f"input[1].type: '{kind}' is not supported" in answer.json()["error"]["message"]
