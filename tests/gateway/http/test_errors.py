"""Every refusal has a status, OpenAI's shape, the field and the fix; the client raises the right class."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import httpx
import openai
import pytest

from baton.gateway.access import Access
from baton.gateway.api.pooling import EmbeddingRequest
from baton.gateway.api.schemas import decode_body
from baton.gateway.errors import BadRequest
from baton.gateway.http.app import create_app
from baton.gateway.instances.client import ClusterClient
from baton.gateway.reading.pooled import inputs_of
from baton.gateway.served_model import ServedModel
from baton.protocol.messages.requests import Finished
from tests.gateway.conftest import END
from tests.gateway.harness import GatewayServer

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f"}}
CALLING = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}
TOO_LONG = "This model's maximum context length is 256 tokens. However, "
"""OpenAI's words: LiteLLM, LangChain and others look for them."""


def post(server: GatewayServer, path: str, **body) -> httpx.Response:
    base = {"messages": USER} if path == CHAT else {"prompt": "the cat"}
    with server.http() as http:
        return http.post(path, json=base | body)


def check_error(response: httpx.Response, status: int, param: str | None) -> dict:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    if error["code"] == "context_length_exceeded":
        assert error["message"].startswith(TOO_LONG)
    elif param:
        assert error["message"].startswith(param)
    return error


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", "warm"),
        ("top_p", 2),
        ("n", 0),
        ("n", 1.5),
        ("n", "1.0"),
        ("use_beam_search", 0),
        ("max_tokens", -1),
        ("max_tokens", "many"),
        ("max_tokens", 257),
        ("stop", 5),
        ("stop", ""),
        ("stop", [None]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", [10**6]),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"999999": 1}),
        ("logit_bias", {"5": 1000}),
        ("seed", "lucky"),
        ("min_tokens", 1000),
        ("prompt_logprobs", 100),
        ("return_routed_experts", True),  # (no mixture, or not switched on)
        ("routed_experts_prompt_start", -1),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("guided_json", {"not": {}}),
        ("guided_json", 0),  # (which equals False, and asks for something all the same)
        ("structural_tag", 0),
        ("guided_regex", "("),
        ("guided_choice", []),
        ("guided_grammar", 5),
        ("structured_outputs", {}),
        ("structured_outputs", {"regex": "a", "choice": ["b"]}),
        ("bad_words", ["x", " "]),
        ("bad_words", [""]),
        ("bad_words", "x"),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [1 << 20]),
        ("logprob_token_ids", [5]),
        ("repetition_detection", {"max_pattern_size": 3}),
        ("repetition_detection", {"max_pattern_size": 3, "min_pattern_size": 4, "min_count": 2}),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", 1 << 20),
        ("truncation_side", "top"),
        ("kv_transfer_params", {"a": 1}),
        ("priority", 1 << 70),
        ("request_id", "two\nlines"),
        ("cache_salt", 5),
        ("cache_salt", ""),
        ("cache_salt", "s" * 257),
        ("cache_salt", "s" * 3_000_000),
        ("logit_bias", {str(i): 1 for i in range(16_385)}),
    ],
)
def test_bad_fields_are_named(server: GatewayServer, path, field, value):
    body = {"max_tokens": 9} | {field: value}
    check_error(post(server, path, **body), 400, field)
    assert server.engine.submits == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", None),
        ("prompt", []),
        ("prompt", 5),
        ("prompt", ["a", 5]),
        ("prompt", [[5], []]),
        ("prompt", [10**6]),
        ("prompt", [-1]),
        ("prompt", [True]),
        ("prompt", [1 << 70]),
        ("prompt", [[5]] * 4097),
        ("prompt", ["a"] * 4097),
        ("prompt", [[5]] * 700_000),
        ("prompt", [[5, [6]]]),
        ("prompt", ["a", ["b"]]),
        ("logprobs", 21),
        ("best_of", 2),
        ("best_of", True),
        ("suffix", "end"),
        ("max_tokens", 0),
        ("echo", "loud"),
    ],
)
def test_bad_fields_of_completions(server: GatewayServer, field, value):
    check_error(post(server, COMPLETIONS, **{field: value}), 400, field)
    assert server.engine.submits == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", None),
        ("messages", []),
        ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
        ("messages", [{"role": 5, "content": "x"}]),
        ("messages", [{"role": "", "content": "x"}]),
        ("messages", [{"content": "x"}]),
        ("messages", [{"role": "user", "content": None}]),
        ("messages", USER * 1025),
        ("top_logprobs", 3),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tools", [{"type": "function", "function": {"parameters": {}}}]),
        ("tools", [TOOL, TOOL]),
        ("tools", [{"type": "function", "function": {"name": f"f{i}"}} for i in range(10_000)]),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("tool_choice", "any"),
        ("reasoning_effort", "hugest"),
        ("thinking_token_budget", 5),
        ("thinking_token_budget", -2),
        ("messages", [*USER, {"role": "tool", "content": "7", "tool_call_id": "1"}]),
        ("messages", [*USER, CALLING, {"role": "tool", "content": "7", "tool_call_id": "2"}]),
        ("messages", [*USER, {"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]),
        ("response_format", "json"),
        ("max_completion_tokens", 0),
        ("max_completion_tokens", 1000),
        ("chat_template", "{{ 1 }}"),
        ("documents", 3),
        ("best_of", True),
        ("best_of", 2),
    ],
)
def test_bad_fields_of_chat(server: GatewayServer, field, value):
    error = check_error(post(server, CHAT, **{field: value}), 400, field)
    assert error["type"] == "invalid_request_error"
    assert server.engine.submits == []


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
SOUND = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}


@pytest.mark.parametrize(
    ("path", "field", "value", "says"),
    [
        (COMPLETIONS, "prompt", ["a", IMAGE], "prompt[1]: 'image_url' is an image"),
        (COMPLETIONS, "prompt", IMAGE, "prompt: 'image_url' is an image"),
        (
            "/rerank",
            "documents",
            ["a", {"content": [IMAGE]}],
            "documents[1].content[0]: 'image_url' is an image",
        ),
        ("/score", "text_2", {"content": [SOUND]}, "text_2.content[0]: 'input_audio' is sound"),
    ],
)
def test_what_is_no_text_is_named(server: GatewayServer, path, field, value, says):
    error = check_error(post(server, path, **{field: value}), 400, field)
    assert says in error["message"]
    assert "this model takes only text" in error["message"]
    assert error["code"] == "unsupported_content"
    assert server.engine.submits == []


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([{"image": "https://x/y.png"}], "input[0]: 'image' is an image"),
        ([{"content": [IMAGE]}], "input[0].content[0]: 'image_url' is an image"),
        ([{"text": "a"}], "input: give a text, a list of texts"),
    ],
)
def test_what_is_no_text_has_no_vector(value, says):
    request, _ = decode_body(json.dumps({"input": value}).encode(), EmbeddingRequest)
    with pytest.raises(BadRequest) as caught:
        inputs_of(request)
    assert says in caught.value.message
    assert caught.value.param == "input"


def test_stream_and_prompt_logprobs_do_not_go_together(server: GatewayServer):
    for path in (CHAT, COMPLETIONS):
        check_error(post(server, path, stream=True, prompt_logprobs=1), 400, "prompt_logprobs")


def test_too_long_a_prompt_says_both_numbers(server: GatewayServer):
    error = check_error(post(server, COMPLETIONS, prompt=[5] * 256), 400, "prompt")
    assert "256" in error["message"]
    assert error["code"] == "context_length_exceeded"
    post(server, COMPLETIONS, prompt=[5] * 255, max_tokens=1).raise_for_status()
    error = check_error(post(server, COMPLETIONS, prompt=[5] * 250, max_tokens=7), 400, "max_tokens")
    assert all(number in error["message"] for number in ("250", "256", "7", "6"))
    error = check_error(post(server, COMPLETIONS, prompt="x" * 100_000), 400, "prompt")
    assert error["code"] == "context_length_exceeded"
    long = [{"role": "user", "content": "a b c d " * 100}]
    for messages in (long, [{"role": "user", "content": "x" * 100_000}], USER * 1025):
        error = check_error(post(server, CHAT, messages=messages), 400, "messages")
        assert error["code"] == "context_length_exceeded"
        assert "reduce the length of the messages" in error["message"]
    error = check_error(post(server, CHAT, max_completion_tokens=300), 400, "max_completion_tokens")
    assert error["code"] == "context_length_exceeded"


def test_bodies_that_are_no_request(server: GatewayServer):
    with server.http() as http:
        for body in (b"", b"{", b"[]", b'"x"', b"\xff", b"[" * 100_000, b'{"prompt": "\\ud800"}'):
            check_error(http.post(COMPLETIONS, content=body), 400, None)
        for half in (b'"\\ud800"', b'"\\udc00 x"', b'"\\ud800\\u0041"'):
            error = check_error(http.post(COMPLETIONS, content=b'{"prompt": ' + half + b"}"), 400, None)
            assert "surrogate" in error["message"]
        for number in (b"1e999", b"-1e999"):  # (no value of a field that is not supported is read on trust)
            content = b'{"prompt": "a", "n": ' + number + b', "use_beam_search": ' + number + b"}"
            assert http.post(COMPLETIONS, content=content).status_code == 400
        for size in (4 << 20, 64 << 20):
            big = b'{"prompt": "' + b"x" * size + b'"}'
            response = http.post(COMPLETIONS, content=big)
            assert response.status_code == 413
            assert "4096 KiB" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("context", "limit"), [(256, 4 << 20), (32_768, 8 << 20), (65_536, 16 << 20), (1 << 20, 16 << 20)]
)
def test_the_limit_of_a_body_follows_the_context(byte_level: Path, context, limit):
    served = ServedModel(names=("m",), tokenizer=byte_level, max_model_len=context, eos_token_ids=())
    app = create_app(served, ClusterClient())
    assert app.state.gateway.max_body_bytes == limit


def test_the_client_raises_the_right_classes(server: GatewayServer):
    client = server.openai()
    with pytest.raises(openai.BadRequestError, match="temperature") as bad:
        client.completions.create(model="tiny", prompt="x", temperature=-1)
    assert bad.value.param == "temperature"
    assert bad.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError, match="'gpt-9' is not served") as missing:
        client.chat.completions.create(model="gpt-9", messages=USER)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


def test_a_slash_at_the_end_changes_nothing(server: GatewayServer):
    with server.http() as http:
        for path in ("/health", "/ready", "/version", "/metrics", "/v1/models", "/v1/models/tiny"):
            with_slash = http.get(path + "/")
            assert with_slash.status_code == 200, path
            if path != "/metrics":
                assert with_slash.json() == http.get(path).json()
        assert http.get("/v1/models/").json()["object"] == "list"
        check_error(http.get("/v2/everything/"), 404, None)


def test_routes_that_are_not_there(server: GatewayServer):
    with server.http() as http:
        check_error(http.get("/v2/everything"), 404, None)
        response = http.get(COMPLETIONS)
        check_error(response, 405, None)
        assert response.headers["allow"] == "POST"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("code", "status", "raised"),
    [
        ("queue_full", 429, openai.RateLimitError),
        ("never_fits", 400, openai.BadRequestError),
        ("bad_request", 400, openai.BadRequestError),
        ("internal", 500, openai.InternalServerError),
        ("shutting_down", 503, openai.InternalServerError),
    ],
)
def test_refusals_of_the_engine(server: GatewayServer, code, status, raised, stream):
    """Also for a stream they decide the status."""
    reason = "error" if code == "internal" else "rejected"
    server.engine.behaviour.reject = Finished(0, reason, code, "so the engine says")
    with pytest.raises(raised, match="so the engine says") as caught:
        server.openai().completions.create(model="tiny", prompt="x", n=2, stream=stream)
    assert caught.value.status_code == status
    assert caught.value.code == code
    if status in (429, 503):
        assert int(caught.value.response.headers["retry-after"]) >= 1


def test_the_other_choices_are_cancelled(server: GatewayServer):
    """One choice of three is refused: the others must not run for nobody."""
    server.engine.behaviour.mute = True
    seen = []

    def answer(prompt):
        seen.append(prompt)
        if len(seen) == 2:
            server.engine.behaviour.reject = Finished(0, "rejected", "queue_full", "full")
        return lambda i: 5

    server.engine.behaviour.answer = answer
    with pytest.raises(openai.RateLimitError):
        server.openai().completions.create(model="tiny", prompt="x", n=3)
    server.engine.wait_for(lambda: server.engine.num_running == 0, "the cancel of the others")
    begun, cancels = [submit.id for submit in server.engine.submits], server.engine.cancels
    assert len(begun) == 3
    assert [number for number in begun if number in cancels] == begun[:2]  # (others are of tests before)


def test_unknown_fields_are_said_once(server: GatewayServer, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "baton.gateway.api.schemas"):
        for _ in range(3):
            post(server, CHAT, wibble=1, max_tokens=1).raise_for_status()
    assert [record for record in caplog.messages if "wibble" in record] == [
        "ignoring the unknown request field 'wibble' (said once)"
    ]
    with caplog.at_level(logging.WARNING, "baton.gateway.api.schemas"):
        for _ in range(3):
            options = {"include_usage": True, "include_wobble": 1, "include_obfuscation": False}
            post(server, CHAT, stream=True, stream_options=options, max_tokens=1).raise_for_status()
    assert [record for record in caplog.messages if "stream_options" in record] == [
        "ignoring the unknown request field 'stream_options.include_wobble' (said once)"
    ]


def test_an_unexpected_error_is_a_500_with_the_request(
    server: GatewayServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def broken(*_, **__):
        raise RuntimeError("a bug")

    monkeypatch.setattr(server.app.state.gateway.generator, "start", broken)
    with server.http() as http:
        response = http.post(COMPLETIONS, json={"prompt": "x"}, headers={"X-Request-Id": "r-77"})
    error = check_error(response, 500, None)
    assert "r-77" in error["message"]
    assert "a bug" not in error["message"]
    assert response.headers["x-request-id"] == "r-77"
    assert any("r-77" in message for message in caplog.messages)


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_of_the_server_is_logged_with_the_id_that_the_client_sees(
    server: GatewayServer, caplog: pytest.LogCaptureFixture, stream: bool
):
    def ask(finished: Finished, request_id: str) -> None:
        server.engine.behaviour.reject = finished
        with server.http() as http:
            body = {"prompt": "x", "stream": stream}
            http.post(COMPLETIONS, json=body, headers={"X-Request-Id": request_id})

    with caplog.at_level(logging.WARNING, "baton.gateway.http"):
        ask(Finished(0, "rejected", "bad_request", "yours"), "r-78")
        ask(Finished(0, "error", "internal", "ours"), "r-79")
    said = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [record.request_id for record in said] == ["r-79"]
    assert "r-79" in said[0].getMessage()
    assert "ours" in said[0].getMessage()


def test_request_ids(server: GatewayServer):
    with server.http() as http:
        given = http.post(COMPLETIONS, json={"prompt": "x"}, headers={"X-Request-Id": "mine"})
        assert given.headers["x-request-id"] == "mine"
        assert given.json()["id"] == "cmpl-mine"
        made = [
            http.get("/health", headers={"X-Request-Id": bad}).headers["x-request-id"]
            for bad in ("", "two words", "x" * 129)
        ]
        assert len(set(made)) == 3
        assert all(len(name) == 32 for name in made)


@pytest.fixture(scope="module")
def locked(byte_level, vocab):
    with GatewayServer(
        byte_level, eos=END, vocab=vocab, access=Access(api_keys=("secret", "other"))
    ) as server:
        yield server


def test_api_keys(locked: GatewayServer):
    for key in ("secret", "other"):
        locked.openai(api_key=key).completions.create(model="tiny", prompt="x", max_tokens=1)
    for key in ("wrong", "secre", "secret2"):
        with pytest.raises(openai.AuthenticationError) as caught:
            locked.openai(api_key=key).completions.create(model="tiny", prompt="x")
        assert caught.value.code == "invalid_api_key"
    with locked.http() as http:
        check_error(http.get("/v1/models"), 401, None)
        check_error(http.get("/v1/models", headers={"Authorization": "Basic secret"}), 401, None)
        for path in ("/health", "/ready", "/metrics", "/version"):
            assert http.get(path).status_code == 200


def test_wrong_keys_are_refused():
    with pytest.raises(ValueError, match="api_keys"):
        Access(api_keys=("",))
    with pytest.raises(ValueError, match="admin_keys"):
        Access(api_keys=("a", "b"), admin_keys=("b",))


def test_tools_beside_a_prompt_are_looked_at(server: GatewayServer):
    check_error(post(server, "/tokenize", tools=[{"type": "function"}]), 400, "tools")
