"""Streams that nobody waits for: listeners, writes that wait, clients that do not read."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from baton.gateway.errors import RequestCancelled
from baton.gateway.generation.sequence import Update
from baton.gateway.http import streaming
from baton.gateway.http.alive import SILENT
from baton.gateway.http.stepping import begin
from baton.gateway.instances.inbox import Inbox, Turn
from baton.protocol.params.sampling import TokenLogprobs
from tests.gateway.harness import GatewayServer


async def test_what_does_not_wait_is_over_at_once():
    done = []

    async def work():
        done.append(1)

    assert begin(work()) is None
    assert done == [1]


async def test_what_waits_goes_on_in_a_task():
    gate, other, seen = asyncio.Event(), asyncio.Event(), []

    async def work():
        await gate.wait()
        seen.append("gate")
        await other.wait()
        seen.append("other")

    begun = begin(work())
    assert begun is not None
    rest = asyncio.ensure_future(_await(begun))
    await asyncio.sleep(0)
    gate.set()
    await asyncio.sleep(0.01)
    assert seen == ["gate"]
    other.set()
    await rest
    assert seen == ["gate", "other"]


async def test_errors_and_cancellation_reach_what_was_begun():
    def fail():
        raise ValueError("no")

    async def fails(before: asyncio.Event):
        await before.wait()
        fail()

    gate = asyncio.Event()
    begun = begin(fails(gate))
    gate.set()
    with pytest.raises(ValueError, match="no"):
        await begun

    ended = []

    async def waits():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(1)

    task = asyncio.ensure_future(_await(begin(waits())))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [1]
    with pytest.raises(ValueError, match="no"):
        begin(fails(gate))


async def _await(begun):
    await begun


async def test_all_listeners_are_called_in_one_turn():
    turn, called = Turn(), []
    inboxes = [Inbox(turn) for _ in range(3)]
    for number, inbox in enumerate(inboxes):
        inbox.listen(lambda number=number: called.append(number))
    for inbox in inboxes:
        inbox.wake()
        inbox.wake()
    assert called == []
    await asyncio.sleep(0)
    assert called == [0, 1, 2], "each once, however often it was woken"
    inboxes[1].listen(None)
    for inbox in inboxes:
        inbox.wake()
    await asyncio.sleep(0)
    assert called == [0, 1, 2, 0, 2]


async def test_a_listener_that_fails_costs_the_others_nothing(caplog):
    turn, called = Turn(), []

    def fail():
        raise ValueError("a defect")

    first, second = Inbox(turn), Inbox(turn)
    first.listen(fail)
    second.listen(lambda: called.append(1))
    first.wake()
    second.wake()
    await asyncio.sleep(0)
    assert called == [1]
    assert "a defect" in caplog.text


async def test_who_begins_to_listen_late_misses_nothing():
    called = []
    inbox = Inbox()
    inbox.close()
    inbox.listen(lambda: called.append(1))
    await asyncio.sleep(0)
    assert called == [1]
    with pytest.raises(RequestCancelled):
        inbox.take()


# -- a connection that takes no more


class Connection:
    """Calls the application as a server would.  While `full`, `send` waits."""

    def __init__(self, server: GatewayServer, body: dict[str, object]) -> None:
        self._server = server
        self._request = json.dumps(body).encode()
        self.sent: list[bytes] = []
        self.room = asyncio.Event()
        self.gone = asyncio.Event()
        self.error: Exception | None = None

    async def run(self) -> None:
        headers = [(b"content-type", b"application/json")]
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "root_path": "",
            "headers": headers,
            "http_version": "1.1",
            "scheme": "http",
            "server": None,
            "client": None,
        }
        await self._server.app(scope, self._receive, self._send)

    async def _receive(self):
        if self._request:
            body, self._request = self._request, b""
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message):
        await self.room.wait()
        if self.error is not None:
            raise self.error
        if message["type"] == "http.response.body":
            self.sent.append(message["body"])

    def text(self) -> str:
        lines = [line for line in b"".join(self.sent).decode().split("\n\n") if line]
        assert lines[-1] == "data: [DONE]"
        return "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1])


BODY = {"prompt": [50, 60, 70], "max_tokens": 200, "stream": True}


def whole(server: GatewayServer) -> str:
    with server.http() as http:
        return http.post("/v1/completions", json=BODY | {"stream": False}).json()["choices"][0]["text"]


def test_what_a_full_connection_does_not_take_comes_together(server: GatewayServer):
    server.engine.behaviour.step_s = 0.001
    connection = Connection(server, BODY)

    async def scenario():
        connection.room.set()
        task = asyncio.create_task(connection.run())
        while len(connection.sent) < 3:
            await asyncio.sleep(0.001)
        connection.room.clear()
        await asyncio.to_thread(server.engine.wait_for, lambda: not server.engine.num_running, "the end")
        await asyncio.sleep(0.05)
        before = len(connection.sent)
        connection.room.set()
        await task
        return before, len(connection.sent)

    before, after = server.call(scenario())
    assert after - before <= 2, "the write that waited, and everything else"
    assert connection.text() == whole(server)


def test_who_leaves_while_his_connection_is_full_is_forgotten(server: GatewayServer):
    server.engine.behaviour.hold_after = 20
    connection = Connection(server, BODY)

    async def scenario():
        connection.room.set()
        task = asyncio.create_task(connection.run())
        while not connection.sent:
            await asyncio.sleep(0.001)
        connection.room.clear()
        await asyncio.to_thread(server.engine.wait_held, 1)
        connection.gone.set()
        await asyncio.to_thread(server.engine.wait_for, lambda: not server.engine.num_running, "the cancel")
        connection.room.set()  # (a server lets writes through once its client is gone)
        await task

    server.call(scenario())
    assert server.client.in_flight == 0


def test_a_write_that_fails_ends_its_request_alone(server: GatewayServer):
    server.engine.behaviour.hold_after = 20
    connection = Connection(server, BODY)

    async def scenario():
        connection.room.set()
        task = asyncio.create_task(connection.run())
        while not connection.sent:
            await asyncio.sleep(0.001)
        connection.error = OSError("broken")
        with pytest.raises(OSError, match="broken"):
            await task

    server.call(scenario())
    server.engine.wait_for(lambda: not server.engine.num_running, "the cancel")
    assert server.client.in_flight == 0


def test_a_client_that_does_not_read_holds_little_and_delays_nobody(server: GatewayServer):
    """The gateway stops turning tokens into events, and submits no more sequences of the request, once the
    connection's buffers are full."""
    server.engine.behaviour.tokens_per_message = 10
    prompts = [[50 + i % 100, 60] for i in range(300)]
    body = json.dumps(
        {"prompt": prompts, "max_tokens": 250, "stream": True, "logprobs": 20, "return_token_ids": True}
    ).encode()
    before = _generated(server)
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        generated = _settled(server) - before
        assert 0 < generated < len(prompts) * 250 / 2
        other = server.openai().completions.create(model="tiny", prompt="x", max_tokens=20)
        assert other.usage.completion_tokens == 20
        assert _settled(server) - before == generated + 20, "the other one ran while that one was held"
    server.engine.wait_for(lambda: server.client.in_flight == 0, "the cancel of all")


def _settled(server: GatewayServer) -> float:
    """Generated tokens that the gateway has taken in, once that does not change any more though the engine
    has sent all that it was asked for."""
    last, same = -1.0, 0
    while same < 10:
        server.call(asyncio.sleep(0.05))  # (the gateway's own time: it may be slower than ours)
        value = _generated(server)
        same = same + 1 if value == last and not server.engine.num_running else 0
        last = value
    return last


def _generated(server: GatewayServer) -> float:
    with server.http() as http:
        lines = http.get("/metrics").text.splitlines()
    return float(next(x for x in lines if x.startswith("baton:generation_tokens_total")).split()[-1])


class _Written:
    """A generation, its inbox, a renderer and a connection in one; counts the work for an update."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *turns: list[Update]) -> None:
        self.flows = True
        self.inbox = self
        self.turns, self.sent, self.weighed = list(turns), [], 0
        weigh = streaming._are_much

        def counted(updates: list[Update]) -> bool:
            self.weighed += 1
            return weigh(updates)

        monkeypatch.setattr(streaming, "_are_much", counted)

    def take(self) -> list[Update]:
        return self.turns.pop(0)

    def listen(self, listener: object) -> None:
        pass

    def chunk(self, update: Update) -> bytes:
        return update.text.encode()

    async def send(self, message: dict[str, object]) -> None:
        self.sent.append(message["body"])


async def test_an_update_of_text_is_written_and_not_weighed(monkeypatch):
    found = TokenLogprobs(1, -0.5, 1)
    text = [Update(0, letter, [1], [], None, None) for letter in "abc"]
    much = Update(0, "d", [1] * 2000, [found] * 2000, None, None)
    written = _Written(monkeypatch, text[:1], text[1:2], [], text, [much])
    flow = streaming.Stream(written, written, written.send, SILENT)
    for _ in range(2):
        flow.on_news()
    assert (written.sent, written.weighed) == ([b"a", b"b"], 0)
    flow.on_news()
    flow.on_news()
    assert (written.sent, written.weighed) == ([b"a", b"b", b"abc"], 2)
    flow.on_news()
    assert await flow.ended == [much]
