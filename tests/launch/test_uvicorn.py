"""What `launch/http` builds on in uvicorn, which is no public interface of it.

Where this fails a newer uvicorn differs: compare its `protocols/http/httptools_impl.py` with the last version that
was tried, carry over to `launch/http/protocol.py` what concerns `Connection` and `_CloseDelimited`, run
`tests/launch`, and raise the bound in pyproject.toml.  Before 0.45 cycles have other arguments; before 0.53 an
answer that is the last one of its connection does not say so.
"""

from __future__ import annotations

import inspect
import tomllib
from pathlib import Path

import pytest
import uvicorn
from packaging.requirements import Requirement
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

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
