"""POST requests over connections that are used again: HTTP/1.1, on TCP, TLS or a Unix socket."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httptools

_CONNECT_S = 30.0


class ConnectionLost(Exception):
    """Before an answer was complete."""


@dataclass(frozen=True)
class Address:
    """Where a server is."""

    host: str = "localhost"
    port: int = 0
    tls: ssl.SSLContext | None = None
    prefix: str = ""
    """Before each path."""
    path: str = ""
    """Of a Unix socket."""

    @classmethod
    def of(cls, url: str) -> Address:
        """Raises `ValueError`."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise ValueError(f"--url {url}: give http://HOST:PORT")
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if tls else 80), tls, prefix)

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"


@dataclass
class Answer:
    status: int
    headers: dict[str, str] = field(default_factory=dict)
    """Names in lower case."""
    body: bytes = b""

    @property
    def retry_after_s(self) -> float | None:
        try:
            return max(0.0, float(self.headers["retry-after"]))
        except (KeyError, ValueError):
            return None


class Connection:
    """One request at a time; connects when it has to."""

    def __init__(self, address: Address, api_key: str | None = None) -> None:
        self._address = address
        host = f"[{address.host}]" if ":" in address.host else address.host
        key = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = f"host: {host}:{address.port}\r\n{key}accept: application/json\r\n"
        self._transport: asyncio.Transport | None = None
        self._reader: _Reader | None = None

    async def post(self, path: str, body: bytes, request_id: str, timeout_s: float) -> Answer:
        """Raises `ConnectionLost`, `TimeoutError`."""
        head = (
            f"POST {self._address.prefix}{path} HTTP/1.1\r\n{self._head}x-request-id: {request_id}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return await self._exchange(head.encode() + body, timeout_s)

    async def get(self, path: str, timeout_s: float) -> Answer:
        """Raises `ConnectionLost`, `TimeoutError`."""
        return await self._exchange(
            f"GET {self._address.prefix}{path} HTTP/1.1\r\n{self._head}\r\n".encode(), timeout_s
        )

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        self._transport = self._reader = None

    async def _exchange(self, data: bytes, timeout_s: float) -> Answer:
        try:
            async with asyncio.timeout(timeout_s):
                used = self._reader is not None and not self._reader.lost
                while True:
                    if self._reader is None or self._reader.lost or self._transport is None:
                        await self._connect()
                    assert self._reader is not None
                    assert self._transport is not None
                    answer = self._reader.expect()
                    self._transport.write(data)
                    try:
                        return await answer
                    except ConnectionLost:
                        if not used or self._reader.has_begun:
                            raise
                        used = False  # (closed while it was idle: the request was not looked at)
        except BaseException:
            self.close()
            raise

    async def _connect(self) -> None:
        loop, address = asyncio.get_running_loop(), self._address
        try:
            async with asyncio.timeout(_CONNECT_S):
                if address.path:
                    self._transport, self._reader = await loop.create_unix_connection(_Reader, address.path)
                else:
                    self._transport, self._reader = await loop.create_connection(
                        _Reader, address.host, address.port, ssl=address.tls
                    )
        except OSError as error:  # (TimeoutError is one)
            raise ConnectionLost(f"no connection to {address}: {error or 'no answer'}") from None


class _Reader(asyncio.Protocol):
    """Reads answers."""

    def __init__(self) -> None:
        self.lost = False
        self.has_begun = False
        """Something came of the answer that is expected."""
        self._answer: asyncio.Future[Answer] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._pieces: list[bytes] = []

    def expect(self) -> asyncio.Future[Answer]:
        self.has_begun = False
        self._headers, self._pieces = {}, []
        self._answer = asyncio.get_running_loop().create_future()
        return self._answer

    def data_received(self, data: bytes) -> None:
        self.has_begun = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"what came is not HTTP: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(f"the connection was lost: {error or 'closed by the server'}")

    def _fail(self, why: str) -> None:
        self.lost = True
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionLost(why))

    # -- called by the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.lost = True
        answer = Answer(self._parser.get_status_code(), self._headers, b"".join(self._pieces))
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(answer)
        self._parser = httptools.HttpResponseParser(self)
