"""What `launch/http` builds on in uvicorn, which is no public interface of it, and where it listens.

Where this fails a newer uvicorn differs: compare its `protocols/http/httptools_impl.py` with the last version
that was tried, carry over to `launch/http/protocol.py` what concerns `Connection` and `_CloseDelimited`, run
`tests/launch`, and raise the bound in pyproject.toml.  Before 0.45 cycles have other arguments; before 0.53
an answer that is the last one of its connection does not say so.
"""

from __future__ import annotations

import inspect
import logging
import socket
import tomllib
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from packaging.requirements import Requirement
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from baton.launch.http import listening, protocol
from baton.launch.http.listening import Listener, listen_all
from baton.launch.limits import OptionError
from tests.launch.http_site import Site

HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
CYCLE = {
    "scope",
    "transport",
    "flow",
    "logger",
    "access_logger",
    "access_log",
    "default_headers",
    "message_event",
    "expect_100_continue",
    "keep_alive",
    "on_response",
}
"""Arguments of `RequestResponseCycle`, as `Connection.on_headers_complete` gives them."""
OVERRIDDEN = {
    HttpToolsProtocol: (
        "connection_made",
        "connection_lost",
        "data_received",
        "eof_received",
        "pause_writing",
        "resume_writing",
        "on_message_begin",
        "on_url",
        "on_header",
        "on_headers_complete",
        "on_body",
        "on_message_complete",
        "on_response_complete",
        "shutdown",
        "_start_asgi_task",
    ),
    RequestResponseCycle: ("send", "receive", "run_asgi"),
    uvicorn.Server: ("startup", "main_loop", "shutdown", "on_tick", "capture_signals", "serve"),
}
"""What is overridden or called: a method that is no more is overridden in vain."""


def _bounds() -> Requirement:
    declared = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    requirements = map(Requirement, declared["project"]["dependencies"])
    return next(one for one in requirements if one.name == "uvicorn")


def test_the_version_is_one_that_was_tried():
    bounds = _bounds()
    assert bounds.specifier.contains(uvicorn.__version__)
    assert not bounds.specifier.contains("0.52.4"), "it does not say that an answer is the last one"
    assert not bounds.specifier.contains("0.55.0"), "nobody has tried it"


def test_a_cycle_takes_what_connections_give():
    assert set(inspect.signature(RequestResponseCycle).parameters) == CYCLE


@pytest.mark.parametrize("kind", OVERRIDDEN)
def test_what_is_overridden_is_there(kind: type):
    assert [name for name in OVERRIDDEN[kind] if not hasattr(kind, name)] == []


def test_a_connection_has_what_is_read_of_it():
    source = inspect.getsource(HttpToolsProtocol.__init__) + inspect.getsource(HttpToolsProtocol)
    for name in ("scope", "headers", "flow", "cycle", "pipeline", "parser", "url", "expect_100_continue"):
        assert f"self.{name}" in source, name


def test_what_is_not_the_clients_fault_is_logged_and_no_400(
    byte_level: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """As with a uvicorn whose cycles take other arguments: the server looked alive and said nothing."""

    def other(*_: Any, **__: Any) -> None:
        raise TypeError("unexpected keyword argument")

    with caplog.at_level(logging.DEBUG), Site(byte_level) as site:
        assert site.ask(HEALTH).startswith(b"HTTP/1.1 200 ")
        for nonsense in (b"\x16\x03\x01 nonsense\r\n\r\n", b"GET \xff\xfe HTTP/1.1\r\nhost: a\r\n\r\n"):
            assert site.ask(nonsense).startswith(b"HTTP/1.1 400 ")
        assert not [one for one in caplog.records if one.levelno >= logging.ERROR]
        monkeypatch.setattr(protocol, "RequestResponseCycle", other)
        answer = site.ask(HEALTH)
    assert answer.startswith(b"HTTP/1.1 500 ")
    assert b"server_error" in answer
    (line,) = [one for one in caplog.records if one.levelno >= logging.ERROR]
    assert line.exc_info is not None
    assert "unexpected keyword argument" in str(line.exc_info[1])


def test_a_connection_that_cannot_be_made_is_logged(
    byte_level: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def other(*_: Any) -> None:
        raise TypeError("missing argument")

    with caplog.at_level(logging.DEBUG), Site(byte_level) as site:
        assert site.ask(HEALTH).startswith(b"HTTP/1.1 200 ")
        (acceptor,) = site.http._acceptors
        monkeypatch.setattr(acceptor, "_make", other)
        assert site.ask(HEALTH) == b""
    errors = [one for one in caplog.records if one.levelno >= logging.ERROR]
    assert [str(one.exc_info[1]) for one in errors if one.exc_info] == ["missing argument"]


def test_localhost_is_served_at_each_of_its_addresses(monkeypatch: pytest.MonkeyPatch):
    """Node and others ask ::1 first."""
    if not _has_ipv6():
        pytest.skip("no ::1 here")
    found = [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)),
    ]
    real = socket.getaddrinfo

    def resolve(host: str, port: int, *more: Any, **named: Any) -> Any:
        return found if host == "localhost" else real(host, port, *more, **named)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    listeners = listen_all("localhost", 0)
    try:
        assert [one.getsockname()[0] for one in listeners] == ["127.0.0.1", "::1"]
        (port,) = {one.getsockname()[1] for one in listeners}
        for address in ("127.0.0.1", "::1"):
            socket.create_connection((address, port), timeout=60).close()
        with pytest.raises(OptionError, match="in use"):
            listen_all("localhost", port)
    finally:
        for one in listeners:
            one.close()
    for host in ("127.0.0.1", "::1"):
        (alone,) = listen_all(host, 0)
        assert alone.getsockname()[0] == host
        alone.close()


def test_an_address_that_the_machine_lacks_is_left_out(monkeypatch: pytest.MonkeyPatch):
    real = listening.listen

    def listen(host: str, port: int) -> Listener:
        if host == "127.0.0.9":
            raise listening._NoAddress("no such address")
        return real(host, port)

    monkeypatch.setattr(listening, "listen", listen)
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, 0)) for one in ("127.0.0.1", "127.0.0.9")]
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, port, **more: found if host == "box" else found[:1]
    )
    (only,) = listen_all("box", 0)
    assert only.getsockname()[0] == "127.0.0.1"
    only.close()


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False
