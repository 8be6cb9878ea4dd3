"""One HTTP connection: uvicorn's protocol on httptools, with the limits of `limits.py`.

What is different from uvicorn's:

* A head is measured while it arrives: what the parser has put together, and what it holds back until a field
  is complete.  Trailers count as well.
* Each stage of a connection is told to the table, which a sweep looks at: there are no timers here.
* A refusal is OpenAI's error shape, and the client gets a moment to read it: what it still sends is thrown
  away, as a connection that is closed with unread data is reset, and the answer with it.
* An answer to HTTP/1.0 that has no length ends with the connection, not with a chunk.
* No WebSockets; an offer to upgrade is ignored.

`on_headers_complete` follows that of uvicorn 0.54.  What is subclassed here is no public interface of it:
pyproject.toml allows the versions that were tried, and `tests/launch/test_uvicorn.py` says what to look at in
a newer one.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import termios
import urllib.parse
from array import array
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from baton.launch.http.limits import Closed, Connections, Reason

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent
    from uvicorn.config import Config
    from uvicorn.server import ServerState

MAX_DISCARDED_BYTES = 1 << 20
"""So much of what a refused client still sends is thrown away; then it is cut."""
_FIELD_BYTES = 4
"""Of a header beside its name and value."""


class TooLarge(Exception):
    """Raised inside the parser to stop it."""


_CLIENTS = (httptools.HttpParserError, UnicodeError)
"""What callbacks of the parser raise for what a client has sent: a URL or a method that is none."""


class Connection(HttpToolsProtocol):
    """uvicorn makes none of these; `HttpServer` does."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        table: Connections[Connection],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(config, server_state, {}, loop)
        self._table = table
        self._max_head = table.limits.h11_max_incomplete_event_size
        self._max_headers = table.limits.h11_max_header_count
        self._head_bytes = 0
        self._num_headers = 0
        self._held_back = 0
        """Bytes that the parser has taken since it last said anything."""
        self.received = 0
        self._in_head = self._in_message = False
        """Between the first byte of a request and the last one of its head, or of all of it."""
        self._discarded = -1
        """Bytes that were thrown away since the client was refused; -1: it was not."""
        self._declining = False
        self.opened = False
        """The event loop has taken it over."""
        self.last = False
        """The next answer is the last one."""

    # -- what the table asks

    def paused(self) -> bool:
        return self.flow.read_paused

    def proven(self) -> bool:
        return bool(self.scope and self.scope["state"].get("key_id"))

    def unsent(self) -> int:
        return self.transport.get_write_buffer_size()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.opened = True
        self._table.opened(self, self.loop.time())

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._table.gone(self)

    def data_received(self, data: bytes) -> None:
        if self._discarded >= 0:
            self._discarded += len(data)
            if self._discarded > MAX_DISCARDED_BYTES:
                self.transport.abort()
            return
        self._held_back += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._decline(data[offer.args[0] :])
            return
        except httptools.HttpParserError as error:
            cause = error.__context__
            if isinstance(cause, TooLarge):
                self._refuse_head()
            elif cause is None or isinstance(cause, _CLIENTS):
                self.refuse(400, "this is no HTTP request", "malformed")
            else:
                self._failed(cause)
            return
        except Exception as error:
            self._failed(error)
            return
        if self._held_back > self._max_head:
            self._refuse_head()

    def eof_received(self) -> None:
        if self._discarded >= 0:
            self.transport.abort()  # it has read its refusal, or will not

    def pause_writing(self) -> None:
        super().pause_writing()
        self._table.unread(self, self.loop.time())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._table.read(self)

    # -- the parser's callbacks

    def on_message_begin(self) -> None:
        if self._declining:
            return
        super().on_message_begin()
        self._held_back = self._head_bytes = self._num_headers = self.received = 0
        self._in_head = self._in_message = True
        if self._answered:
            self._table.head(self, self.loop.time())

    def on_url(self, url: bytes) -> None:
        if self._declining:
            return
        self._grow_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._declining:
            return
        self._num_headers += 1
        if self._num_headers > self._max_headers:
            raise TooLarge
        self._grow_head(len(name) + len(value) + _FIELD_BYTES)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._declining:
            return
        self._held_back = 0
        self._in_head = False
        version = self.parser.get_http_version()
        self.scope["method"] = self.parser.get_method().decode("ascii")
        if version != "1.1":
            self.scope["http_version"] = version
        parsed = httptools.parse_url(self.url)
        path = parsed.path.decode("ascii")
        if "%" in path:
            path = urllib.parse.unquote(path)
        self.scope["path"] = self.root_path + path
        self.scope["raw_path"] = self.root_path.encode("ascii") + parsed.path
        self.scope["query_string"] = parsed.query or b""
        before = self.cycle
        kind = _CloseDelimited if version == "1.0" else RequestResponseCycle
        self.cycle = kind(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=version != "1.0" and self.parser.should_keep_alive() and not self.last,
            on_response=self.on_response_complete,
        )
        if before is None or before.response_complete:
            self._table.body(self, self.loop.time())
            self._start_asgi_task(self.cycle, self.app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))

    def on_body(self, body: bytes) -> None:
        self._held_back = 0
        self.received += len(body)
        self._table.more(self, self.loop.time())
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._held_back = 0
        self._in_message = False
        super().on_message_complete()
        if self._answered:
            self._table.idle(self, self.loop.time())
        else:
            self._table.busy(self)

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        now = self.loop.time()
        if self.transport.get_write_buffer_size():
            self._table.unread(self, now)
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            cycle, app = self.pipeline.pop()
            self._start_asgi_task(cycle, app)
            if cycle.more_body:
                self._table.body(self, now)
        elif self._in_head:
            self._table.head(self, now)
        elif self._in_message:  # answered before its body was there
            self._table.lingers(self, now)
        else:
            self._table.idle(self, now)

    # -- what the server wants

    def expire(self, why: Reason) -> None:
        """It has used up its time for this."""
        if why == "unread":
            self.cut("reader_timeout")
        elif why == "idle":
            self._table.note("idle")
            self.transport.close()
        elif why == "lingering":
            self.transport.abort()
        elif why == "head" and not self._in_message:  # it never said anything: nor does the server
            self.cut("head_timeout")
        elif why == "head":
            self.refuse(408, "the head of the request did not arrive in time", "head_timeout")
        else:
            seconds = self._table.limits.timeout_body
            self.refuse(408, f"no more of the body arrived for {seconds:g} seconds", "body_timeout")

    def cut(self, why: Closed) -> None:
        """Ends the connection at once."""
        self._table.note(why)
        self._table.busy(self)  # (until the event loop says that it is lost)
        self.transport.abort()

    def refuse(self, status: int, message: str, why: Closed | None = None) -> None:
        """The last answer, unless one has begun; what still comes is not looked at."""
        if why is not None:
            self._table.note(why)
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            begun = cycle.response_started or bool(self.pipeline)
            cycle.disconnected = True
            cycle.message_event.set()
            if begun:
                self.transport.abort()
                return
        self._discarded = 0
        self._table.lingers(self, self.loop.time())
        self.transport.write(refusal(status, message))
        self.transport.write_eof()

    def leave(self) -> None:
        """The next answer is the last one, also that which is being made and has not begun."""
        self.last = True
        if not self._answered and not self.cycle.response_started:
            self.cycle.keep_alive = False

    def shutdown(self) -> None:
        """The server stops: what was asked is answered, also what has come and was not read yet (a client
        may take a connection that it kept just now, and gets a reset if that is closed then).  A client that
        has only connected so far asks in a moment; it would take a close for a failure, where one that
        kept a connection tries another."""
        self.leave()
        if not self._answered:
            self.cycle.keep_alive = False
        elif self.cycle is not None and not self._in_head and not self._has_unread():
            self.transport.close()

    def end_upload(self) -> None:
        """The server waits no longer for requests that are not complete."""
        if self._answered:
            self.transport.close()
        elif self.cycle.more_body and not self.cycle.response_started and self.cycle.scope is self.scope:
            self.refuse(503, "the server shuts down")

    # -- inside

    def _failed(self, error: BaseException) -> None:
        """A defect, ours or of what this builds on: the client has done nothing wrong."""
        log.error("a request could not be taken: %r", error, exc_info=error)
        self.refuse(500, "internal error; the server's log has it")

    def _decline(self, rest: bytes) -> None:
        """The client offers another protocol (h2c, as Java's does, or WebSockets).  It is not taken up, and
        the request is served.  The parser has left the body out: another one, given what it has to know of
        the head, reads it from `rest` on."""
        cycle = self.cycle
        self.last, cycle.keep_alive = True, False
        fields = (b"content-length", b"transfer-encoding")
        framing = [b"%b: %b\r\n" % (name, value) for name, value in self.headers if name in fields]
        if not framing:
            return
        cycle.more_body, self._in_message = True, True
        self._table.body(self, self.loop.time())
        self.parser = httptools.HttpRequestParser(self)
        self._declining = True
        try:
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(framing) + b"\r\n")
        finally:
            self._declining = False
        if rest:
            self.data_received(rest)

    def _has_unread(self) -> bool:
        """Bytes that the kernel has and the event loop has not read."""
        count = array("i", [0])
        with contextlib.suppress(OSError):
            fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.FIONREAD, count)
        return bool(count[0])

    @property
    def _answered(self) -> bool:
        """No answer is being made."""
        return self.cycle is None or self.cycle.response_complete

    def _grow_head(self, size: int) -> None:
        self._held_back = 0
        self._head_bytes += size
        if self._head_bytes > self._max_head:
            raise TooLarge

    def _refuse_head(self) -> None:
        limit = f"{self._max_head >> 10} KiB and {self._max_headers} headers"
        self.refuse(431, f"the head of the request is larger than {limit}; send less", "too_large")


class _CloseDelimited(RequestResponseCycle):
    """The answer to a request of HTTP/1.0, which knows no chunks: what has no length ends with the
    connection."""

    async def send(self, message: ASGISendEvent) -> None:
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        fields = cast(dict[str, Any], message)
        if not self.response_started:
            self.response_started = True
            self.waiting_for_100_continue = False
            headers = [*self.default_headers, *fields.get("headers", ()), (b"connection", b"close")]
            lines = [name + b": " + value + b"\r\n" for name, value in headers]
            self.transport.write(b"".join([STATUS_LINE[fields["status"]], *lines, b"\r\n"]))
            return
        body = fields.get("body", b"")
        if body and self.scope["method"] != "HEAD":
            self.transport.write(body)
        if not fields.get("more_body", False):
            self.response_complete = True
            self.message_event.set()
            self.transport.close()
            self.on_response()


def refusal(status: int, message: str, retry_after_s: int | None = None) -> bytes:
    """A whole answer, after which the connection ends."""
    kind = {500: "server_error", 503: "service_unavailable_error"}.get(status, "invalid_request_error")
    error = {"message": message, "type": kind, "param": None, "code": HTTPStatus(status).name.lower()}
    body = msgspec.json.encode({"error": error})
    wait = f"retry-after: {retry_after_s}\r\n" if retry_after_s is not None else ""
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n{wait}connection: close\r\n\r\n"
    )
    return head.encode() + body
