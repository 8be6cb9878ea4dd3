"""Nobody who waits is left in silence: signs of life, progress, early headers, on a clock that jumps."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import anthropic
import pytest

from baton.gateway.http.alive import SignsOfLife
from baton.launch.options import HttpOptions
from baton.protocol.codec import pack_int32, pack_int64
from baton.protocol.messages.requests import Finished, Outputs
from tests.gateway.conftest import END
from tests.gateway.harness import GatewayServer
from tests.gateway.http.virtual import Answer, Gateway, run

USER = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER, "max_tokens": 4},
    "/v1/completions": {"prompt": "hello hello world", "max_tokens": 4},
    "/v1/messages": {"messages": USER, "max_tokens": 4},
    "/v1/responses": {"input": "hello", "max_output_tokens": 4},
}
PREFILL_S = 900.0
Counts = Literal["bytes", "data"]


@dataclass(frozen=True)
class Client:
    """When a client gives a request up."""

    name: str
    paths: tuple[str, ...]
    head_s: float
    """Without the head of an answer."""
    silence_s: float
    """After that, without what it counts."""
    counts: Counts
    """bytes: anything that comes; data: events that its parser yields, so no comments."""

    def gave_up(self, answer: Answer) -> float | None:
        """When it did; None: it waited for the end."""
        if answer.began is None or answer.began >= self.head_s:
            return self.head_s
        last = answer.began
        for at, data in [*answer.pieces, (answer.ended or 0.0, b"data: ")]:
            if self.counts == "data" and not any(line.startswith(b"data:") for line in data.split(b"\n")):
                continue
            if at - last >= self.silence_s:
                return last + self.silence_s
            last = at
        return None


ALL = tuple(BODIES)
CLIENTS = (
    # stream_idle_timeout_ms is 300,000 by default; its parser of events drops comments.
    Client("Codex", ("/v1/responses",), 300, 300, "data"),
    # Node's fetch: headersTimeout and bodyTimeout are 300,000 ms each, whatever the bytes are.  Claude Code,
    # Cline, opencode and Qwen Code run on it; the SDKs' own limits of 600 s are longer.
    Client("undici", ALL, 300, 300, "bytes"),
    # Cline: the response has to start within 300 s.
    Client("Cline", (CHAT,), 300, 300, "bytes"),
    # httpx as the Python SDKs set it up: 600 s for each read.
    Client("openai and anthropic for Python", ALL, 600, 600, "bytes"),
    # proxy_read_timeout between two reads.
    Client("nginx", ALL, 60, 60, "bytes"),
)


def prefilled_for(byte_level: Path, path: str, interval_s: float, **body: Any) -> tuple[Answer, SignsOfLife]:
    """A stream whose prompt takes a quarter of an hour."""

    async def ask() -> tuple[Answer, SignsOfLife]:
        signs = SignsOfLife(interval_s)
        gateway = Gateway(byte_level, signs)

        async def compute() -> None:
            await asyncio.sleep(PREFILL_S)
            gateway.tokens(70, 71, 72, 73)

        return await gateway.ask(path, BODIES[path] | {"stream": True} | body, compute), signs

    return run(ask())


@pytest.mark.parametrize("path", ALL)
def test_nobody_gives_up_a_prompt_that_takes_a_quarter_of_an_hour(byte_level: Path, path: str):
    interval = HttpOptions().sse_keep_alive_interval
    assert interval == 10
    answer, signs = prefilled_for(byte_level, path, interval)
    assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert answer.ended == pytest.approx(PREFILL_S, abs=1)
    for client in CLIENTS:
        if path in client.paths:
            assert client.gave_up(answer) is None, client.name
    gaps = [b - a for (a, _), (b, _) in zip(answer.pieces, answer.pieces[1:], strict=False)]
    assert max(gaps) <= interval + 0.01
    assert len(answer.pieces) <= PREFILL_S / interval + 5
    assert signs._timer is None, "a server without streams has no timer"


@pytest.mark.parametrize("path", ALL)
def test_without_signs_they_give_up(byte_level: Path, path: str):
    answer, signs = prefilled_for(byte_level, path, 0.0)
    assert signs.looks == 0
    clients = [client for client in CLIENTS if path in client.paths]
    assert all(client.gave_up(answer) for client in clients)


def test_comments_are_no_signs_for_codex(byte_level: Path):
    answer, _ = prefilled_for(byte_level, CHAT, 10.0)
    codex = CLIENTS[0]
    assert codex.gave_up(answer) == pytest.approx(302, abs=1)


def test_who_counts_chunks_and_asks_for_usage_gets_some_without_choices(byte_level: Path):
    """Qwen Code 0.24 gives a stream up 240 s after its last chunk (DEFAULT_STREAM_IDLE_TIMEOUT_MS), and its
    requests have `include_usage`, so it knows chunks without choices."""
    qwen = Client("Qwen Code", (CHAT,), 300, 240, "data")
    asks = {"stream_options": {"include_usage": True}}
    answer, _ = prefilled_for(byte_level, CHAT, 10.0, **asks)
    assert qwen.gave_up(answer) is None
    waiting = [event for at, event in answer.events() if at < PREFILL_S - 1]
    assert 12 <= len(waiting) <= 16
    assert all(event["choices"] == [] and event["object"] == "chat.completion.chunk" for event in waiting)
    assert qwen.gave_up(prefilled_for(byte_level, CHAT, 10.0)[0]) == pytest.approx(242, abs=1)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_nothing_with_choices_comes_before_the_first_token(byte_level: Path, path: str):
    """Load generators take it for that."""
    answer, _ = prefilled_for(byte_level, path, 10.0, return_progress=True)
    first = next(at for at, event in answer.events() if event.get("choices"))
    assert first == pytest.approx(PREFILL_S, abs=0.1)
    assert answer.began == pytest.approx(2, abs=0.1)
    if path == CHAT:
        events = [event for _, event in answer.events() if event.get("choices")]
        assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert events[1]["choices"][0]["delta"]["content"]


def test_the_kinds_of_signs(byte_level: Path):
    pings = prefilled_for(byte_level, "/v1/messages", 10.0)[0].events()
    kinds = [event["type"] for _, event in pings]
    assert kinds[0] == "message_start"
    assert kinds.count("ping") == len(kinds[: kinds.index("content_block_start")]) - 1 > 80
    events = [event for _, event in prefilled_for(byte_level, "/v1/responses", 10.0)[0].events()]
    numbers = [event["sequence_number"] for event in events]
    assert numbers == list(range(len(numbers)))
    waiting = [event for event in events if event["type"] == "response.in_progress"]
    assert len(waiting) > 80
    assert all(event["response"] == waiting[0]["response"] for event in waiting)
    assert events[-1]["type"] == "response.incomplete"


def test_later_silences_have_signs_too(byte_level: Path):
    """Between two tokens, and where the connection was quiet for longer than the interval once."""

    async def ask() -> Answer:
        gateway = Gateway(byte_level, SignsOfLife(10.0))

        async def compute() -> None:
            for _ in range(3):
                gateway.tokens(70, end=False)
                await asyncio.sleep(35)
            gateway.tokens(71)

        return await gateway.ask(CHAT, BODIES[CHAT] | {"stream": True}, compute)

    answer = run(ask())
    assert sum(data == b": keep-alive\n\n" for _, data in answer.pieces) == 9


def test_streams_that_flow_cost_nobody_a_timer(byte_level: Path):
    """A thousand tokens a second for a minute, in 50 streams: the signs' timer looks six times."""

    async def ask() -> int:
        signs = SignsOfLife(10.0)
        gateway = Gateway(byte_level, signs)
        body = BODIES[CHAT] | {"stream": True, "max_tokens": 2000}

        async def compute() -> None:
            while len(gateway.client.submits) < 50:
                await asyncio.sleep(0.001)
            numbers = [submit.id for submit in gateway.client.submits]
            for _ in range(600):
                await asyncio.sleep(0.1)
                for number in numbers:
                    gateway.say(_tokens(number, 70))
            gateway.say(Outputs(finished=[Finished(number, "length") for number in numbers]))

        others = [asyncio.create_task(gateway.ask(CHAT, body)) for _ in range(49)]
        answers = [await gateway.ask(CHAT, body, compute), *[await other for other in others]]
        assert not any(b"keep-alive" in answer.body for answer in answers)
        return signs.looks

    assert run(ask()) <= 7


def test_many_silent_streams_share_a_look(byte_level: Path):
    """Streams that fell silent at different times: ten looks an interval at most."""

    async def ask() -> int:
        signs = SignsOfLife(10.0)
        gateway = Gateway(byte_level, signs)
        asking = []
        for _ in range(50):
            asking.append(asyncio.create_task(gateway.ask(CHAT, BODIES[CHAT] | {"stream": True})))
            await asyncio.sleep(0.2)
        await asyncio.sleep(100)
        ends = [Finished(submit.id, "length") for submit in gateway.client.submits]
        gateway.say(Outputs(finished=ends))
        answers = [await one for one in asking]
        assert all(9 <= answer.body.count(b": keep-alive") <= 13 for answer in answers)
        return signs.looks

    assert run(ask()) <= 11 * 11


@pytest.mark.parametrize("path", ALL)
def test_what_is_wrong_at_once_has_its_status(byte_level: Path, path: str):
    async def ask() -> Answer:
        gateway = Gateway(byte_level, SignsOfLife(10.0))

        async def refuse() -> None:
            gateway.say(Outputs(finished=[Finished(gateway.submit.id, "rejected", "queue_full", "full")]))

        return await gateway.ask(path, BODIES[path] | {"stream": True}, refuse)

    answer = run(ask())
    assert answer.status == 429
    assert "full" in json.loads(answer.body)["error"]["message"]


@pytest.mark.parametrize("path", ALL)
def test_what_goes_wrong_later_is_an_event(byte_level: Path, path: str):
    async def ask() -> Answer:
        gateway = Gateway(byte_level, SignsOfLife(10.0))

        async def fail() -> None:
            await asyncio.sleep(30)
            gateway.say(Outputs(finished=[Finished(gateway.submit.id, "error", "internal", "it broke")]))

        return await gateway.ask(path, BODIES[path] | {"stream": True}, fail)

    answer = run(ask())
    last = answer.events()[-1][1]
    assert answer.status == 200
    error = last["response"]["error"] if path == "/v1/responses" else last["error"]
    assert error["message"] == "it broke"
    assert not any(event.get("choices") for _, event in answer.events())


# -- progress


@pytest.mark.parametrize("path", ALL)
def test_who_asks_is_told_how_far_the_prompt_is(byte_level: Path, path: str):
    """llama.cpp's field and member."""

    async def ask() -> tuple[Answer, int]:
        gateway = Gateway(byte_level, SignsOfLife(10.0))
        length = 0

        async def compute() -> None:
            nonlocal length
            submit = gateway.submit
            assert submit.progress
            length = len(submit.prompt) // 4
            await asyncio.sleep(5)
            gateway.say(Outputs(cached=[(submit.id, 1)], progress=[(submit.id, 1, 0)]))
            await asyncio.sleep(20)
            gateway.say(Outputs(progress=[(submit.id, 2, 20_000)]))
            await asyncio.sleep(1)
            gateway.say(_tokens(submit.id, 70, progress=[(submit.id, length, 21_000)]))
            gateway.tokens(71)

        body = BODIES[path] | {"stream": True, "return_progress": True}
        return await gateway.ask(path, body, compute), length

    answer, length = run(ask())
    told = [(at, event["prompt_progress"]) for at, event in answer.events() if "prompt_progress" in event]
    assert [progress for _, progress in told] == [
        {"total": length, "cache": 1, "processed": 1, "time_ms": 0},
        {"total": length, "cache": 1, "processed": 2, "time_ms": 20_000},
        {"total": length, "cache": 1, "processed": length, "time_ms": 21_000},
    ]
    assert [at for at, _ in told] == pytest.approx([5, 25, 26], abs=0.1)
    assert not any(event.get("choices") for _, event in answer.events() if "prompt_progress" in event)


def test_a_prompt_that_is_through_at_once_is_told_too(byte_level: Path):
    async def ask() -> Answer:
        gateway = Gateway(byte_level, SignsOfLife(10.0))

        async def compute() -> None:
            gateway.tokens(70, 71)

        return await gateway.ask(CHAT, BODIES[CHAT] | {"stream": True, "return_progress": True}, compute)

    events = [event for _, event in run(ask()).events()]
    progress = events[0]["prompt_progress"]
    assert progress["processed"] == progress["total"] > 1
    assert sum("prompt_progress" in event for event in events) == 1


@pytest.mark.parametrize("body", [{"stream": True}, {"return_progress": True}])
def test_nobody_else_is_told(byte_level: Path, body: dict[str, Any]):
    async def ask() -> Answer:
        gateway = Gateway(byte_level, SignsOfLife(10.0))

        async def compute() -> None:
            assert not gateway.submit.progress
            gateway.tokens(70)

        return await gateway.ask(CHAT, BODIES[CHAT] | body, compute)

    assert b"prompt_progress" not in run(ask()).body


# -- answers in one piece


def whole(byte_level: Path, path: str, seconds: float, *, early: float, error: bool = False) -> Answer:
    async def ask() -> Answer:
        gateway = Gateway(byte_level, SignsOfLife(10.0, early))

        async def compute() -> None:
            await asyncio.sleep(seconds)
            if error:
                gateway.say(Outputs(finished=[Finished(gateway.submit.id, "error", "internal", "it broke")]))
            else:
                gateway.tokens(70, 71, 72, 73)

        return await gateway.ask(path, BODIES[path], compute)

    return run(ask())


@pytest.mark.parametrize("path", ALL)
def test_an_answer_in_one_piece_begins_in_time(byte_level: Path, path: str):
    answer = whole(byte_level, path, PREFILL_S, early=20)
    assert (answer.status, answer.began) == (200, pytest.approx(20, abs=0.1))
    assert "content-length" not in answer.headers
    assert [one.name for one in CLIENTS if one.counts == "bytes" and one.gave_up(answer) is not None] == []
    said = json.loads(answer.body)
    assert "error" not in said or said["error"] is None
    late = whole(byte_level, path, PREFILL_S, early=0)
    assert (late.began, len(late.pieces)) == (pytest.approx(PREFILL_S, abs=1), 1)
    assert CLIENTS[1].gave_up(late) == 300


@pytest.mark.parametrize("path", ALL)
def test_early_headers_do_not_concern_what_is_quick(byte_level: Path, path: str):
    answer = whole(byte_level, path, 1, early=20)
    assert (answer.status, len(answer.pieces)) == (200, 1)
    assert "content-length" in answer.headers
    failed = whole(byte_level, path, 1, early=20, error=True)
    assert failed.status == 500


@pytest.mark.parametrize("path", ALL)
def test_what_goes_wrong_after_early_headers_is_in_the_body(byte_level: Path, path: str):
    answer = whole(byte_level, path, 100, early=20, error=True)
    assert answer.status == 200
    body = json.loads(answer.body)
    assert body["error"]["message"] == "it broke"
    assert body.get("type") == ("error" if path == "/v1/messages" else None)


# -- with the APIs' own clients


@pytest.fixture(scope="module")
def silent(byte_level: Path):
    """A server whose engine stops after a token until the streams had signs of life."""
    with GatewayServer(byte_level, eos=END, vocab=512, max_model_len=1024) as server:
        server.app.signs = SignsOfLife(0.02)
        server.engine.behaviour.num_cached = 0
        yield server


def hold(server: GatewayServer) -> None:
    """After the first of some tokens that are letters."""
    server.reset()
    server.engine.behaviour.answer = lambda prompt: lambda index: 70 + index if index < 6 else END
    server.engine.behaviour.hold_after = 1


def release(server: GatewayServer) -> None:
    server.engine.behaviour.hold_after = None


def test_openais_client_reads_responses_with_signs(silent: GatewayServer):
    hold(silent)
    waiting, numbers = 0, []
    with silent.openai().responses.stream(model="tiny", input="hello", max_output_tokens=20) as stream:
        for event in stream:
            numbers.append(event.sequence_number)
            waiting += event.type == "response.in_progress"
            if waiting == 5:
                release(silent)
        final = stream.get_final_response()
    assert waiting >= 5
    assert numbers == list(range(len(numbers)))
    assert final.output_text


def test_openais_client_reads_chats_with_signs(silent: GatewayServer):
    hold(silent)
    with silent.openai().chat.completions.stream(
        model="tiny", messages=USER, max_tokens=20, extra_body={"return_progress": True}
    ) as stream:
        for event in stream:
            if event.type == "content.delta":
                release(silent)
        final = stream.get_final_completion()
    assert final.choices[0].message.content


def test_anthropics_client_reads_messages_with_signs(silent: GatewayServer):
    hold(silent)
    client = anthropic.Anthropic(base_url=silent.url, api_key="none", max_retries=0)
    with client.messages.stream(model="tiny", max_tokens=20, messages=USER) as stream:
        for event in stream:
            if event.type == "text":
                release(silent)
        message = stream.get_final_message()
    assert message.content[0].text
    assert message.stop_reason == "end_turn"


def _tokens(number: int, *tokens: int, **more: Any) -> Outputs:
    return Outputs(pack_int64([number] * len(tokens)), pack_int32(tokens), **more)
