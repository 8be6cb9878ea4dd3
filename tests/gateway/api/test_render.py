"""Prompts without answers, and chat templates that the server was given."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.launch.limits import OptionError
from baton.launch.planning.templates import read_template, read_template_defaults
from tests.gateway.conftest import END
from tests.gateway.harness import GatewayServer

USER = [{"role": "user", "content": "hello there"}]
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{{ mood }}"
PATH = "/v1/chat/completions/render"


@pytest.fixture(scope="module")
def given(byte_level: Path, vocab: int):
    more = {"chat_template": TEMPLATE, "template_defaults": {"mood": "glad"}}
    with GatewayServer(byte_level, eos=END, vocab=vocab, **more) as server:
        yield server


def post(server: GatewayServer, path: str, **body):
    with server.http() as http:
        answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_conversation_is_rendered_as_it_would_be_answered(server: GatewayServer):
    found = post(
        server, "/v1/chat/completions/render", messages=USER, temperature=0.5, max_tokens=7, stream=True
    )
    ids = post(server, "/tokenize", messages=USER)["tokens"]
    assert found["token_ids"] == ids
    assert post(server, "/detokenize", tokens=ids)["prompt"] == found["prompt"]
    assert (found["model"], found["stream"], found["features"]) == ("tiny", True, None)
    assert (found["sampling_params"]["temperature"], found["sampling_params"]["max_tokens"]) == (0.5, 7)
    rest = post(server, PATH, messages=USER, request_id="mine")
    assert rest["sampling_params"]["max_tokens"] == server.served.max_model_len - len(ids)
    assert rest["request_id"] == "mine"
    assert server.engine.submits == []


def test_texts_are_rendered_each(server: GatewayServer):
    texts = ["a cat", "two cats"]
    found = post(server, "/v1/completions/render", prompt=texts)
    assert [one["prompt"] for one in found] == texts
    assert [one["token_ids"] for one in found] == [
        post(server, "/tokenize", prompt=one)["tokens"] for one in texts
    ]
    assert found[0]["sampling_params"]["max_tokens"] == 16
    assert len({one["request_id"] for one in found}) == 2
    (one,) = post(server, "/v1/completions/render", prompt=[5, 6])
    assert (one["token_ids"], one["prompt"]) == ([5, 6], None)
    assert server.engine.submits == []


def test_what_could_not_be_answered_is_not_rendered(server: GatewayServer):
    with server.http() as http:
        for path, body, field in (
            (PATH, {"messages": []}, "messages"),
            (PATH, {"messages": USER, "max_tokens": 1000}, "max_tokens"),
            ("/v1/completions/render", {"prompt": [5] * 300}, "prompt"),
            ("/v1/completions/render", {"prompt": "a", "temperature": -1}, "temperature"),
        ):
            answer = http.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_the_servers_template_and_its_defaults(given: GatewayServer):
    assert post(given, PATH, messages=USER)["prompt"] == "<user>hello thereglad"
    assert post(given, PATH, messages=USER, chat_template_kwargs={"mood": "sad"})["prompt"].endswith("sad")
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert post(given, PATH, messages=parts)["prompt"] == "<user>a\nbglad"


def test_the_flags(tmp_path: Path):
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATE)
    assert read_template(str(file)) == read_template(TEMPLATE) == TEMPLATE
    assert read_template(None) is None
    assert read_template_defaults('{"enable_thinking": false}') == {"enable_thinking": False}
    assert read_template_defaults(None) == {}
    for text, says in (("absent.jinja", "No such file"), (str(tmp_path), "Is a directory")):
        with pytest.raises(OptionError, match=f"--chat-template .*{says}"):
            read_template(text)
    for text, says in (
        ("[1]", "is no JSON object"),
        ("{", "is no JSON object"),
        ('{"tools": 1}', "'tools' is set"),
    ):
        with pytest.raises(OptionError, match=says):
            read_template_defaults(text)
