"""Clients that ask for too much, too slowly, or not at all; and the end of a server."""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.gateway.access import Access
from baton.gateway.errors import BadRequest
from baton.launch.http import http_server
from baton.launch.http.listening import listen
from baton.launch.limits import OptionError
from baton.launch.options import HttpOptions
from tests.launch.http_site import DEADLINE_S, Site, completion, read_all, read_answer, status

GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
QUICK = HttpOptions(timeout_head=0.3, timeout_body=0.3, timeout_write=0.3, timeout_keep_alive=0.3)


@pytest.fixture(scope="module")
def site(byte_level: Path) -> Iterator[Site]:
    with Site(byte_level) as site:
        yield site


@pytest.fixture(scope="module")
def quick(byte_level: Path) -> Iterator[Site]:
    """Where every time is short: what it ends here is what waits for nothing else."""
    with Site(byte_level, limits=QUICK) as site:
        yield site


def error(answer: bytes) -> str:
    body = json.loads(answer.partition(b"\r\n\r\n")[2])
    return str(body["error"]["message"])


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (b"".join(b"x-%d: y\r\n" % n for n in range(98)), 200),
        (b"".join(b"x-%d: y\r\n" % n for n in range(100)), 431),
        (b"x: " + b"y" * 65_000 + b"\r\n", 200),
        (b"x: " + b"y" * 66_000 + b"\r\n", 431),
        (b"".join(b"x-%d: " % n + b"y" * 1000 + b"\r\n" for n in range(70)), 431),
    ],
)
def test_heads_are_bounded(site: Site, head: bytes, expected: int):
    answer = site.ask(
        GET + b"connection: close\r\n" + head + b"\r\n" if expected == 200 else GET + head + b"\r\n"
    )
    assert status(answer) == expected
    if expected == 431:
        assert "64 KiB and 100 headers" in error(answer)


@pytest.mark.parametrize("start", [GET + b"x: ", b"GET /", GET + b"x"])
def test_an_endless_head_is_not_kept(site: Site, start: bytes):
    """The answer comes as soon as it is too long, and what follows is thrown away, not parsed."""
    before = site.metric("http_connections_limited_total", limit="too_large")
    with site.connect(start) as connection:
        sent = 0
        with contextlib.suppress(OSError):
            while sent < 64 << 20:
                sent += connection.send(b"y" * 65536)
        assert sent < 16 << 20, "the server reads no more"
        with contextlib.suppress(OSError):
            assert status(connection.recv(16)) == 431
    assert site.metric("http_connections_limited_total", limit="too_large") == before + 1


def test_endless_small_headers(site: Site):
    with site.connect(GET) as connection:
        with contextlib.suppress(OSError):
            for n in range(300_000):
                connection.sendall(b"x-%d: y\r\n" % n)
        with contextlib.suppress(OSError):
            assert status(connection.recv(16)) == 431
    assert site.health() == 200


def test_trailers_are_part_of_the_head(site: Site):
    head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    chunk = b'd\r\n{"prompt":"a"\r\n'
    for trailer in (b"x: " + b"y" * (2 << 20), b"".join(b"x-%d: y\r\n" % n for n in range(200))):
        with site.connect(
            head + b"transfer-encoding: chunked\r\n\r\n" + chunk + b"0\r\n" + trailer
        ) as connection:
            assert status(read_all(connection)) == 431


def test_what_is_no_http(site: Site, caplog: pytest.LogCaptureFixture):
    for data in (b"\x16\x03\x01 hello\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET /\xff HTTP/1.1\r\n\r\n"):
        answer = site.ask(data)
        assert status(answer) == 400
        assert error(answer)
    assert not caplog.records, "no line in the log for whatever is sent"


def test_a_head_has_seconds(quick: Site):
    assert quick.ask(b"") == b"", "who says nothing hears nothing"
    answer = quick.ask(GET + b"x: y\r\n")
    assert (status(answer), error(answer)) == (408, "the head of the request did not arrive in time")


def test_a_body_has_seconds_without_progress(quick: Site):
    answer = quick.ask(completion(b"x" * 10_000)[:-5000])
    assert status(answer) == 408
    assert "body" in error(answer)
    assert quick.metric("http_connections_limited_total", limit="body_timeout") >= 1
    assert quick.complete().startswith(b"HTTP/1.1 200")


def test_a_connection_is_kept_for_seconds(quick: Site):
    assert status(quick.ask(GET + b"\r\n")) == 200, "and closed then"


def test_a_client_that_does_not_read_is_cut(quick: Site):
    quick.engine.behaviour.tokens_per_message = 10
    fields = {"prompt": [[50, 60]] * 200, "max_tokens": 250, "stream": True, "logprobs": 20}
    body = json.dumps(fields).encode()
    before = len(quick.engine.cancels)
    with quick.connect(completion(body), receive_buffer=4096) as connection:
        quick.until(lambda: quick.metric("http_connections_limited_total", limit="reader_timeout") >= 1)
        assert connection.recv(10)
    assert len(quick.engine.cancels) >= before
    quick.until(lambda: quick.client.in_flight == 0)


def test_an_early_answer_is_read(byte_level: Path):
    """Who uploads without a key hears so at once, also if the rest of the body follows."""
    with Site(byte_level, access=Access(("key",))) as site:
        with site.connect(completion(b"x" * 100_000)[:1000]) as connection:
            assert status(read_answer(connection)) == 401
            connection.sendall(completion(b"x" * 100_000)[1000:])
            connection.sendall(GET + b"\r\n")
            assert status(read_answer(connection)) == 200, "and the connection goes on"
        with site.connect(completion(b"x" * 100_000)[:1000]) as connection:
            assert status(read_answer(connection)) == 401
            assert connection.recv(1) == b"", "it does not wait for the rest for ever"


def test_compressed_bodies_are_refused_by_name(site: Site):
    body = gzip.compress(b'{"prompt": "a"}')
    answer = site.ask(completion(body, close=True, extra=b"content-encoding: gzip\r\n"))
    assert status(answer) == 415
    assert "Content-Encoding: 'gzip'" in error(answer)


def test_http_1_0(site: Site):
    for stream in (b"true", b"false"):
        body = b'{"prompt": [5, 6], "max_tokens": 3, "stream": ' + stream + b"}"
        answer = site.ask(completion(body, version=b"1.0"))
        head, _, rest = answer.partition(b"\r\n\r\n")
        assert b"chunked" not in head
        assert b"connection: close" in head
        if stream == b"true":
            assert rest.startswith(b"data: ")
            assert rest.endswith(b"data: [DONE]\n\n")
        else:
            assert json.loads(rest)["usage"]["completion_tokens"] == 3
    assert site.ask(b"HEAD /health HTTP/1.0\r\n\r\n").endswith(b"\r\n\r\n")


def test_an_offer_to_upgrade_is_not_taken(site: Site):
    """As Java's client makes it to whom it does not know."""
    extra = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AA\r\n"
    answer = site.ask(completion(b'{"prompt": [5, 6], "max_tokens": 3}', extra=extra))
    assert status(answer) == 200
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 3


def test_pipelined_requests(site: Site):
    one = completion(b'{"prompt": [5, 6], "max_tokens": 3}')
    answer = site.ask(one + one + completion(b'{"prompt": [5, 6], "max_tokens": 3}', close=True))
    assert answer.count(b"HTTP/1.1 200 OK") == 3


def test_half_open_connections_lock_nobody_out(byte_level: Path):
    with Site(byte_level, limits=HttpOptions(limit_concurrency=40)) as site:
        kinds = (b"", b"GET /", GET, completion(b"x" * 1000)[:-10])
        held = []
        for n in range(200):
            held.append(site.connect(kinds[n % 4]))
            if n % 50 == 49:
                site.until(lambda: site.health() == 200)
                site.until(lambda: status(site.complete()) == 200)
        limited = [site.metric("http_connections_limited_total", limit=why) for why in ("shed", "full")]
        assert sum(limited) > 150
        assert site.metric("http_connections") <= 41
        for connection in held:
            connection.close()


def test_connections_that_are_served_keep_their_place(byte_level: Path):
    with Site(byte_level, limits=HttpOptions(limit_concurrency=4)) as site:
        site.engine.behaviour.mute = True
        body = b'{"prompt": [5], "max_tokens": 4000}'
        held = [site.connect(completion(body)) for _ in range(4)]
        site.until(lambda: site.client.in_flight == 4)
        answer = site.ask(GET + b"\r\n")
        assert status(answer) == 503
        assert b"retry-after: 1\r\n" in answer
        held.pop().close()
        site.until(lambda: site.health() == 200)
        site.until(lambda: site.client.in_flight == 3)
        for connection in held:
            connection.close()


def test_bodies_share_their_memory(byte_level: Path):
    limits = HttpOptions(max_body_memory=3 << 20)
    with Site(byte_level, limits=limits) as site:

        def upload() -> socket.socket:
            connection = site.connect(completion(b"x" * (2 << 20))[: -(1 << 20)])
            return connection

        held = [upload(), upload()]
        site.until(lambda: site.metric("http_body_bytes") > 1.9 * (1 << 20))
        big = completion(b'{"prompt": "' + b"x" * (2 << 20) + b'"}', close=True)
        site.until(lambda: status(site.ask(big)) == 400)  # (the prompt is too long: it was read)
        assert site.metric("http_body_evicted_total") >= 1
        site.until(lambda: site.metric("http_body_bytes") < 1.1 * (1 << 20))
        assert sorted(status(connection.recv(1 << 16)) for connection in held[:1]) == [503]
        for connection in held:
            connection.close()
        site.until(lambda: site.metric("http_body_bytes") == 0)


def test_on_notice_all_is_served_and_ready_says_no(byte_level: Path):
    with Site(byte_level) as site, site.connect() as kept:
        kept.sendall(GET + b"\r\n")
        assert b"connection: close" not in kept.recv(1 << 16)
        with pytest.raises(OptionError, match="in use"):
            listen("127.0.0.1", site.port)
        site.call(site.http.leave)
        ready = site.ask(b"GET /ready HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert status(ready) == 503
        assert b"stop soon" in ready
        assert status(site.complete()) == 200
        kept.sendall(GET + b"\r\n")
        assert b"connection: close" in read_all(kept), "clients move on"
        with listen("127.0.0.1", site.port), pytest.raises(OptionError, match="in use"):
            listen("127.0.0.1", site.port)


def test_an_address_of_another_machine_is_named():
    with pytest.raises(OptionError, match=r"192\.0\.2\.1.*; give an address of this machine with --host"):
        listen("192.0.2.1", 0)  # (of RFC 5737: nobody's)


def test_what_has_begun_to_arrive_is_answered(byte_level: Path):
    """A client sends on a connection that it kept in the moment in which the server stops."""
    with Site(byte_level) as site:
        kept = [site.connect(GET + b"\r\n") for _ in range(3)]
        for connection in kept:
            assert status(connection.recv(1 << 16)) == 200
        body = completion(b'{"prompt": [5], "max_tokens": 2}')
        kept[1].sendall(body[:-5])
        kept[2].sendall(GET)
        site.until(lambda: site.metric("http_connections_waiting", **{"for": "body"}) == 1)
        site.until(lambda: site.metric("http_connections_waiting", **{"for": "head"}) == 1)

        def send_and_stop() -> None:
            """In one turn of the server's event loop, so that it cannot have read it."""
            kept[0].sendall(GET + b"\r\n")
            for connection in site.http.server_state.connections:
                connection.shutdown()

        site.call(send_and_stop)
        kept[1].sendall(body[-5:])
        kept[2].sendall(b"\r\n")
        for connection in kept:
            answer = read_all(connection)
            assert status(answer) == 200
            assert b"connection: close" in answer
            connection.close()


def test_a_client_that_had_just_connected_is_answered(byte_level: Path, monkeypatch: pytest.MonkeyPatch):
    """It cannot tell a close from a server that failed."""
    monkeypatch.setattr(http_server, "_UPLOADING_S", DEADLINE_S)
    with Site(byte_level, shutdown_timeout_s=DEADLINE_S) as site:
        kept, fresh = site.connect(GET + b"\r\n"), site.connect()
        assert status(kept.recv(1 << 16)) == 200
        site.until(lambda: site.call(lambda: len(site.http.server_state.connections)) == 2)
        site.stop()
        assert read_all(kept) == b"", "what a client kept is closed"
        fresh.sendall(GET + b"\r\n")
        answer = read_all(fresh)
        assert status(answer) == 200
        assert b"connection: close" in answer
        for connection in (kept, fresh):
            connection.close()


def test_an_answer_that_has_not_begun_says_that_it_is_the_last(byte_level: Path):
    with Site(byte_level) as site, site.connect() as kept:
        site.engine.behaviour.mute = True
        kept.sendall(completion(b'{"prompt": [5], "max_tokens": 2}'))
        site.until(lambda: site.client.in_flight == 1)
        site.call(site.http.leave)
        site.call(lambda: site.client.cluster.cancel_all(BadRequest("enough")))
        assert b"connection: close" in read_all(kept)


def test_the_end(byte_level: Path, caplog: pytest.LogCaptureFixture):
    """Uploads that hang, clients that do not read, streams: no traceback, and new connections hear 503."""
    caplog.set_level(logging.INFO)
    with Site(byte_level, shutdown_timeout_s=0.5) as site:
        site.engine.behaviour.mute = True
        hanging = [site.connect(completion(b"x" * 1000)[:-10]) for _ in range(5)]
        heads = [site.connect(GET) for _ in range(5)]
        stream = site.connect(completion(b'{"prompt": [5], "max_tokens": 9, "stream": true}'))
        site.until(lambda: site.client.in_flight == 1)
        site.stop()
        assert {status(read_all(connection)) for connection in hanging} == {503}
        assert {read_all(connection) for connection in heads} == {b""}
        refused = site.ask(GET + b"\r\n")
        assert (status(refused), b"retry-after: 2" in refused) == (503, True)
        assert b"shutting_down" in read_all(stream)
        site.join()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
