"""/openapi.json says what is served: schemathesis sends what it allows, and what it does not."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import GenerationMode
from schemathesis import checks as general
from schemathesis.config import GenerationConfig, ProjectConfig, ProjectsConfig, SchemathesisConfig

from baton.gateway.anthropic import answers as anthropic
from baton.gateway.api import answers, states
from baton.gateway.api.schemas import ChatRequest, CompletionRequest, decode_body
from baton.gateway.errors import BadRequest
from baton.gateway.http.openapi import ROUTES, make_document
from baton.protocol.params.sampling_params import FIELDS, InvalidParameter, SamplingParams
from tests.gateway.conftest import END
from tests.gateway.echo_engine import EchoEngine
from tests.gateway.harness import GatewayServer

CHECKS = [
    general.not_a_server_error,
    general.status_code_conformance,
    general.content_type_conformance,
    general.response_schema_conformance,
    general.unsupported_method,
]
SMALLEST_VOCABULARY = 300


@pytest.fixture(scope="module")
def server(byte_level, vocab) -> Iterator[GatewayServer]:
    tasks = frozenset({"generate", "embed", "score", "classify"})
    labels = tuple(map(str, range(8)))  # (as many as the echo gives scores)
    with GatewayServer(byte_level, eos=END, vocab=vocab, tasks=tasks, labels=labels) as server:
        yield server


def what_the_test_server_takes() -> dict[str, Any]:
    """The document, with what a model decides narrowed down, so that not nearly every request is too long."""
    document = make_document()
    schemas = document["components"]["schemas"]
    for name in (
        "ChatRequest",
        "CompletionRequest",
        "EmbeddingRequest",
        "ClassifyRequest",
        "TokenizeRequest",
        "DetokenizeRequest",
        "MessagesRequest",
        "CountTokensRequest",
    ):
        properties = schemas[name]["properties"]
        properties["model"] = {"enum": ["tiny", "alias", None]}
        for field in ("stop_token_ids", "prompt", "input", "tokens"):
            narrow(properties.get(field), "maximum", SMALLEST_VOCABULARY - 1)
        for field in ("max_tokens", "max_completion_tokens", "min_tokens"):
            narrow(properties.get(field), "maximum", 12)
        narrow(properties.get("n"), "maximum", 3)
        narrow(properties.get("logit_bias"), "propertyNames", {"pattern": "^[0-9]{1,2}$"})
        narrow(properties.get("truncate_prompt_tokens"), "minimum", 1)
        narrow(properties.get("truncate_prompt_tokens"), "maximum", 20)
        narrow(properties.get("dimensions"), "maximum", 12)
    for name in ("RerankRequest", "ScoreRequest"):
        properties = schemas[name]["properties"]
        properties["model"] = {"enum": ["tiny", "alias", None]}
        properties["truncate_prompt_tokens"] = {"enum": [None, 1, 20, -1]}
    for name in ("queries", "documents"):  # (or text_1 and text_2)
        del schemas["ScoreRequest"]["properties"][name]
    properties = schemas["ScoreRequest"]["properties"]
    properties["text_1"] = {"type": "string", "minLength": 1, "maxLength": 20}
    properties["text_2"] = {"type": "array", "items": properties["text_1"], "minItems": 1, "maxItems": 4}
    schemas["ScoreRequest"]["required"] = ["text_1", "text_2"]
    chat = schemas["ChatRequest"]["properties"]
    text = {"type": "string", "maxLength": 20}
    message = {
        "type": "object",
        "properties": {"role": {"enum": ["system", "user", "assistant"]}, "content": text},
        "required": ["role", "content"],
        "additionalProperties": False,
    }
    chat["messages"] = {"type": "array", "items": message, "minItems": 1, "maxItems": 3}
    chat["logprobs"] = {"const": True}  # (`top_logprobs` needs it)
    chat["continue_final_message"] = {"const": False}
    chat["tools"] = {"enum": [None, []]}  # (this server's template has no place for them)
    chat["tool_choice"] = {"enum": [None, "none", "auto"]}
    chat["thinking_token_budget"] = {"enum": [None, -1]}  # (nor for reasoning)
    turn = {**message, "properties": {"role": {"enum": ["user", "system"]}, "content": text}}
    asks = {**message, "properties": {"role": {"const": "user"}, "content": text}}
    for name in ("MessagesRequest", "CountTokensRequest"):
        properties = schemas[name]["properties"]
        properties["messages"] = {"type": "array", "prefixItems": [asks], "items": turn, "minItems": 1}
        properties["messages"]["maxItems"] = 3
        properties["system"], properties["tools"] = text, {"enum": [None, []]}
        properties["thinking"] = {"enum": [None, {"type": "enabled", "budget_tokens": 5}]}
        properties["tool_choice"] = {"enum": [None, {"type": "none"}]}
        for field in ("output_config", "output_format"):
            properties.pop(field, None)
    for name in ("ChatRequest", "CompletionRequest"):
        properties = schemas[name]["properties"]
        properties["stream_options"] = properties["prompt_logprobs"] = {
            "type": "null"
        }  # (each with `stream`)
        properties["max_tokens"] = {"type": "integer", "minimum": 12, "maximum": 20}
        for field in [one for one in properties if one.startswith(("guided_", "struct"))]:
            del properties[field]  # (one of them, or response_format)
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
        properties["response_format"] = {"enum": [None, {"type": "text"}, {"type": "json_object"}, schema]}
    answer = schemas["ResponsesRequest"]["properties"]
    answer["input"] = {"anyOf": [text, {"type": "array", "items": message, "minItems": 1, "maxItems": 3}]}
    answer["input"]["anyOf"][0]["minLength"] = 1
    answer["model"], answer["include"] = chat["model"], {"enum": [None, ["message.output_text.logprobs"]]}
    answer["tools"], answer["tool_choice"] = chat["tools"], chat["tool_choice"]
    answer["thinking_token_budget"] = chat["thinking_token_budget"]
    answer["text"] = {"enum": [None, {"format": {"type": "json_object"}}, {"verbosity": "low"}]}
    answer["max_output_tokens"] = {"type": "integer", "minimum": 12, "maximum": 20}
    for field in ("previous_response_id", "stream_options", "top_logprobs", "structured_outputs"):
        answer[field] = {"type": "null"}
    narrow(answer["stop_token_ids"], "maximum", SMALLEST_VOCABULARY - 1)
    narrow(answer["min_tokens"], "maximum", 12)
    narrow(answer["logit_bias"], "propertyNames", {"pattern": "^[0-9]{1,2}$"})
    del schemas["CompletionRequest"]["properties"]["best_of"]  # (must be n)
    tokenize = schemas["TokenizeRequest"]
    del tokenize["properties"]["messages"]  # (or prompt)
    tokenize["properties"]["prompt"], tokenize["required"] = text, ["prompt"]
    schemas["InstanceRequest"]["properties"] = {"label": {"enum": ["prefill", "decode", "mixed"]}}
    schemas["InstanceRequest"]["required"] = ["label"]
    for name, field in (("UpdateWeightsRequest", "path"), ("StartProfileRequest", "directory")):
        schemas[name]["properties"][field] = {"enum": ["/a", "/b/c"]}
    for path, methods in document["paths"].items():
        known = {"name": ["tiny", "alias"] if path.startswith("/v1") else ["instance-0"]}
        known["instance"] = ["instance-0"]
        for operation in methods.values():
            for parameter in operation.get("parameters", ()):
                if parameter["name"] in known:
                    parameter["schema"] = {"enum": known[parameter["name"]]}
    return document


def narrow(schema: Any, key: str, value: Any) -> None:
    """Sets a limit of all integers, or of objects, in a field's schema."""
    if isinstance(schema, list):
        for one in schema:
            narrow(one, key, value)
    elif isinstance(schema, dict):
        if schema.get("type") == ("object" if key == "propertyNames" else "integer"):
            schema[key] = value
        for part in ("anyOf", "items"):
            narrow(schema.get(part), key, value)


def load(document: dict[str, Any], mode: GenerationMode) -> schemathesis.BaseSchema:
    generation = GenerationConfig(modes=[mode], deterministic=True)
    projects = ProjectsConfig(default=ProjectConfig(generation=generation))
    config = SchemathesisConfig(seed=1, projects=projects)
    # (Not PUT: an instance that joins makes the server connect to whatever address was made up.)
    made = schemathesis.openapi.from_dict(document, config=config).exclude(method="PUT")
    return made.exclude(path="/ui/events")  # (has no end: test_ui.py)


seen: Counter[tuple[str, int]] = Counter()
"""(operation, status) → how often."""
bounded = settings(
    max_examples=15, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), database=None
)
allowed = load(what_the_test_server_takes(), GenerationMode.POSITIVE)
forbidden = load(make_document(), GenerationMode.NEGATIVE)


@allowed.parametrize()
@bounded
def test_what_is_allowed_is_answered_as_described(case: schemathesis.Case, server: GatewayServer) -> None:
    response = case.call(base_url=server.url, timeout=60)
    seen[f"{case.method} {case.path}", response.status_code] += 1
    case.validate_response(response, checks=CHECKS)


@forbidden.parametrize()
@bounded
def test_what_is_not_allowed_is_refused(case: schemathesis.Case, server: GatewayServer) -> None:
    response = case.call(base_url=server.url, timeout=60)
    case.validate_response(response, checks=[*CHECKS, general.negative_data_rejection])


def test_the_requests_were_eventful() -> None:
    """Of what is allowed, each route answered something with 200 (the server's own instance cannot leave)."""
    if not seen:
        pytest.skip("the test of what is allowed did not run")
    answered = {name for (name, status) in seen if status == 200}
    asked = {name for (name, _) in seen}
    kept = {
        "GET /v1/responses/{name}",
        "DELETE /v1/responses/{name}",
        "GET /v1/responses/{name}/input_items",
    }
    # (One that joined here may leave; nothing is kept.)
    assert asked - answered <= {"DELETE /cluster/instances/{name}"} | kept
    assert len(asked) == len(ROUTES) - 2  # (not PUT, not /ui/events: see `load`)
    for name in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/v1/messages"):
        assert seen[f"POST {name}", 200] > seen[f"POST {name}", 400], seen


def routes_of(routes: list[Any]) -> list[Any]:
    """Those of included routers, too."""
    found = []
    for route in routes:
        inner = getattr(route, "original_router", None)
        found += [route] if inner is None else routes_of(inner.routes)
    return found


def test_every_route_is_described(server: GatewayServer) -> None:
    there = {
        (method.lower(), route.path)
        for route in routes_of(server.app.routes)
        for method in route.methods
        if method != "HEAD"
    }
    assert {(route.method, route.path) for route in ROUTES} == there
    with server.http() as http:
        assert http.get("/openapi.json").json() == make_document()


def test_the_page_needs_nothing_from_elsewhere(server: GatewayServer) -> None:
    with server.http() as http:
        page = http.get("/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert 'fetch("openapi.json")' in page.text
    assert not re.findall(r"""(?:https?:)?//[a-z]|(?:src|@import|url)\s*[=(]""", page.text)


@pytest.mark.parametrize("extra", [{}, {"logprobs": True, "top_logprobs": 2}, {"return_token_ids": True}])
def test_events_have_the_shape_that_is_described(server: GatewayServer, extra: dict[str, Any]) -> None:
    """Strictly: a key too many fails, too."""
    body = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 3, "n": 2, **extra}
    with server.http() as http:
        chat = http.post(
            "/v1/chat/completions", json={**body, "messages": [{"role": "user", "content": "a"}]}
        )
        body["logprobs"] = 1 if "logprobs" in body else None
        text = http.post("/v1/completions", json={**body, "prompt": "a", "top_logprobs": None})
    for response, kind in ((chat, answers.ChatCompletionChunk), (text, answers.CompletionChunk)):
        *events, last = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert last == "[DONE]"
        chunks = [msgspec.json.decode(event, type=kind) for event in events]
        assert chunks[-1].usage.completion_tokens == 6


def test_messages_have_the_shape_that_is_described(server: GatewayServer) -> None:
    body = {"max_tokens": 3, "messages": [{"role": "user", "content": "a"}]}
    with server.http() as http:
        whole = http.post("/v1/messages", json=body)
        streamed = http.post("/v1/messages", json={**body, "stream": True})
        refused = http.post("/v1/messages", json={**body, "container": "x"})
        counted = http.post("/v1/messages/count_tokens", json={"messages": body["messages"]})
    message = msgspec.json.decode(whole.content, type=anthropic.MessageAnswer)
    assert message.usage.output_tokens == 3
    lines = [event.split("\n") for event in streamed.text.split("\n\n") if event]
    events = [msgspec.json.decode(data[6:], type=anthropic.MessageEvent) for _, data in lines]
    kinds = [type(event).__struct_config__.tag for event in events]
    assert [name.removeprefix("event: ") for name, _ in lines] == kinds
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert events[-2].usage == message.usage
    error = msgspec.json.decode(refused.content, type=anthropic.MessagesError)
    assert error.request_id == refused.headers["request-id"]
    count = msgspec.json.decode(counted.content, type=anthropic.TokensCounted)
    assert count.input_tokens == message.usage.input_tokens + message.usage.cache_read_input_tokens


def test_an_instance_that_joins_is_described(server: GatewayServer) -> None:
    engine = EchoEngine(incarnation="far.1", vocab=server.engine.vocab)
    body = {"endpoint": engine.endpoint, "incarnation": "far.1", "ttl_s": 30, "secret": engine.secret}
    with server.http() as http:
        joined = http.put("/cluster/instances/far", json=body).raise_for_status()
        assert msgspec.convert(joined.json(), states.Instance).name == "far"
        msgspec.convert(http.get("/cluster/instances").json(), states.Instances)
        http.delete("/cluster/instances/far").raise_for_status()
    engine.die()


LIMITED = sorted(
    (name, key, limit)
    for kind in ("ChatRequest", "CompletionRequest")
    for name, schema in make_document()["components"]["schemas"][kind]["properties"].items()
    if name in FIELDS and (kind, name) != ("ChatRequest", "logprobs")
    for member in schema.get("anyOf", [schema])
    for key, limit in member.items()
    if key in ("minimum", "maximum", "exclusiveMinimum")
)


@pytest.mark.parametrize(("name", "key", "limit"), sorted(set(LIMITED)))
def test_limits_are_those_of_the_python_api(name: str, key: str, limit: float) -> None:
    """The body's decoder and `SamplingParams` agree on every limit that is told."""
    step = -1 if key == "minimum" else 1
    beyond = math.nextafter(limit, step * math.inf) if isinstance(limit, float) else limit + step
    if key == "exclusiveMinimum":
        beyond = limit
    kind = CompletionRequest if name == "logprobs" else ChatRequest
    if (name, key) != ("max_tokens", "minimum"):  # (0 means: score the prompt only)
        within = 0.5 if key == "exclusiveMinimum" else limit
        SamplingParams(**{name: within, **({"max_tokens": None} if name == "min_tokens" else {})})
        with pytest.raises(InvalidParameter, match=name):
            SamplingParams(**{name: beyond})
    if (name, key) == ("seed", "maximum"):  # (beyond what msgspec can limit: the parameters do)
        return
    with pytest.raises(BadRequest, match=f"^{name}: must be (at least|at most|more than) ") as caught:
        decode_body(msgspec.json.encode({name: beyond}), kind)
    assert caught.value.param == name


def test_limits_were_found() -> None:
    assert len(set(LIMITED)) > 15
