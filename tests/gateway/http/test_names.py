"""The model and the routes are found under the names that people use."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from baton.gateway.http.alive import SignsOfLife
from baton.gateway.http.paths import WITHOUT_V1, own_path
from baton.gateway.http.rights import RIGHTS
from baton.gateway.names import VENDORS, Alias, read_names
from baton.launch.limits import OptionError
from baton.launch.options import EngineOptions
from tests.gateway.http.virtual import Answer, Gateway, run

USER = [{"role": "user", "content": "hello"}]


def asked(byte_level: Path, path: str, body: Any = None, *, method: str = "POST", **more: Any) -> Answer:
    headers = more.pop("headers", None)

    async def ask() -> Answer:
        gateway = Gateway(byte_level, SignsOfLife(), **more)

        async def compute() -> None:
            gateway.tokens(70, 71)

        generates = method == "POST" and "max_tokens" in (body or {})
        return await gateway.ask(path, body, compute if generates else None, method=method, headers=headers)

    return run(ask())


def test_names_patterns_and_what_answers_say():
    assert read_names(("a", "b", "a")) == (("a", "b"), ())
    names, aliases = read_names(("qwen", "claude-*", "gpt-*=qwen", "old=qwen"))
    assert names == ("qwen",)
    assert aliases == (Alias("claude-*"), Alias("gpt-*", "qwen"), Alias("old", "qwen"))
    assert [str(one) for one in aliases] == ["claude-*", "gpt-*=qwen", "old=qwen"]
    assert read_names(("claude-*",)) == ((), (Alias("claude-*"),))
    star = Alias("a*b.c*")
    assert all(map(star.matches, ("ab.c", "aXXb.cYY")))
    assert not any(map(star.matches, ("abXc", "xab.c", "ab")))
    overlapping = Alias("ab*ba")
    assert overlapping.matches("abba")
    assert not overlapping.matches("aba")
    assert Alias("*").matches("")
    assert Alias("a*a*a").matches("aaa")
    assert not Alias("a*a*a").matches("aa")
    assert Alias("**x**").matches("x\n")


def test_a_pattern_reads_a_name_once():
    """Megabytes of a name, for which a regular expression would take hours."""
    assert not Alias("a*b*b*c").matches("a" + "b" * 4_000_000)


def test_slashes_that_a_base_url_ends_with():
    assert own_path("//v1/models") == "/v1/models"
    assert own_path("//chat/completions") == "/v1/chat/completions"
    assert own_path("//proxy/v1/models", "/proxy") == "/v1/models"
    assert own_path("/proxy//models", "/proxy") == "/v1/models"
    assert own_path("/proxy/", "/proxy") == own_path("/proxy", "/proxy") == own_path("//") == "/"


@pytest.mark.parametrize("wrong", [("",), ("gpt-*=qwen",), ("a", "b=c"), ("a", "=a")])
def test_names_that_lead_nowhere_are_refused(wrong: tuple[str, ...]):
    with pytest.raises(OptionError, match=r"served.model.name"):
        EngineOptions(served_model_name=wrong)


def test_a_vendors_name_is_answered_and_said_in_the_log(byte_level: Path, caplog: pytest.LogCaptureFixture):
    """Claude Code that was told the address and nothing else."""
    body = {"model": "claude-sonnet-4-5-20250929", "messages": USER, "max_tokens": 2}

    async def ask() -> list[Answer]:
        gateway = Gateway(byte_level, SignsOfLife(), aliases=VENDORS)

        async def compute() -> None:
            gateway.tokens(70, 71)

        answers = [await gateway.ask("/v1/messages", body, compute) for _ in range(2)]
        count = {name: body[name] for name in ("model", "messages")}
        answers.append(await gateway.ask("/v1/messages/count_tokens", count))
        answers.append(await gateway.ask("/v1/models/claude-opus-4", method="GET"))
        answers.append(await gateway.ask("/v1/models", method="GET"))
        return answers

    with caplog.at_level(logging.WARNING):
        first, _, counted, card, models = run(ask())
    assert json.loads(first.body)["model"] == body["model"]
    assert json.loads(counted.body)["input_tokens"] > 0
    assert json.loads(card.body)["id"] == "claude-opus-4"
    assert [one["id"] for one in json.loads(models.body)["data"]] == ["tiny"]
    (line,) = [one.getMessage() for one in caplog.records if "--served-model-name" in one.getMessage()]
    assert "claude-sonnet-4-5-20250929" in line
    assert "tiny" in line


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_answers_say_the_name_that_the_alias_says(byte_level: Path, path: str):
    more = {"input": "hello"} if path == "/v1/responses" else {"messages": USER, "max_tokens": 2}

    async def ask() -> Answer:
        gateway = Gateway(byte_level, SignsOfLife(), aliases=(Alias("gpt-*", "tiny"),))

        async def compute() -> None:
            gateway.tokens(70, 71)

        return await gateway.ask(path, {"model": "gpt-5", **more}, compute)

    assert json.loads(run(ask()).body)["model"] == "tiny"


def test_other_names_are_refused_with_the_fix(byte_level: Path):
    body = {"model": "gpt-4o", "messages": USER, "max_tokens": 2}

    async def ask() -> Answer:
        return await Gateway(byte_level, SignsOfLife(), aliases=VENDORS).ask("/v1/chat/completions", body)

    answer = run(ask())
    error = json.loads(answer.body)["error"]
    assert (answer.status, error["code"]) == (404, "model_not_found")
    assert all(word in error["message"] for word in ("gpt-4o", "'tiny'", "'claude-*'", "--served-model-name"))


def test_paths_without_v1_are_those_of_routes_with_it():
    assert [path for path in WITHOUT_V1 if f"/v1/{path}" not in RIGHTS] == []
    assert [path for path in WITHOUT_V1 if f"/{path}" in RIGHTS] == []
    for path in RIGHTS:
        assert own_path(path) == path, "a route's own path stays"
        if path.startswith("/v1/") and any(f"{path[4:]}/".startswith(f"{one}/") for one in WITHOUT_V1):
            given = own_path(path[3:]), own_path(f"/llm{path[3:]}/", "/llm"), own_path(f"/v1{path}")
            assert set(given) == {path}
    for other in ("/modelsx", "/chat", "/messagesabc/1", "/v1", "/v1x/models"):
        assert own_path(other) == other


def test_requests_without_v1_are_answered_and_counted_as_those_with_it(byte_level: Path):
    async def ask() -> tuple[list[Answer], str]:
        gateway = Gateway(byte_level, SignsOfLife())

        async def compute() -> None:
            gateway.tokens(70, 71)

        chat = {"messages": USER, "max_tokens": 2}
        answers = [await gateway.ask(path, chat, compute) for path in ("/chat/completions", "/messages")]
        answers.append(await gateway.ask("/messages", {"messages": USER}))
        answers.append(await gateway.ask("/models/tiny", method="GET"))
        return answers, generate_latest(gateway.app.state.gateway.metrics.registry).decode()

    answers, metrics = run(ask())
    assert [answer.status for answer in answers] == [200, 200, 400, 200]
    assert json.loads(answers[2].body)["type"] == "error", "in Anthropic's shape"
    counted = [line for line in metrics.splitlines() if line.startswith("baton:http_requests")]
    assert any('"/v1/chat/completions"' in line for line in counted)
    assert not any('"/chat/completions"' in line or "unmatched" in line for line in counted)


def test_the_front_page(byte_level: Path):
    plain = asked(byte_level, "/", method="GET")
    assert plain.status == 200
    assert b"is running" in plain.body
    assert plain.headers["content-type"].startswith("text/plain")
    head = asked(byte_level, "/", method="HEAD")
    assert (head.status, head.headers["content-type"]) == (200, plain.headers["content-type"])
    page = asked(byte_level, "/", method="GET", headers={"accept": "text/html,application/xhtml+xml"})
    assert page.headers["content-type"].startswith("text/html")
    for link in ("/ui", "/docs", "/v1/models", "/health", "/ready"):
        assert f'href="{link}"'.encode() in page.body
    assert b"tiny" not in page.body, "who may not list the models learns no name"


def test_what_other_servers_have(byte_level: Path):
    for method in ("GET", "POST"):
        ping = asked(byte_level, "/ping", method=method)
        assert (ping.status, json.loads(ping.body)) == (200, {"status": "alive"})
    info = json.loads(asked(byte_level, "/tokenizer_info", method="GET").body)
    assert info["bos_token"] == "<|bos|>"
    assert "{%- for message in messages %}" in info["chat_template"]
    assert info["tokenizer_class"]


def test_the_load_counts_what_is_being_answered(byte_level: Path):
    async def ask() -> list[int]:
        gateway, loads = Gateway(byte_level, SignsOfLife()), []

        async def look() -> None:
            loads.append(json.loads((await gateway.ask("/load", method="GET")).body)["server_load"])

        async def compute() -> None:
            await asyncio.sleep(1)
            await look()
            gateway.tokens(70, 71)

        await look()
        await gateway.ask("/v1/completions", {"prompt": "hello", "max_tokens": 2}, compute)
        await look()
        return loads

    assert run(ask()) == [0, 1, 0]
