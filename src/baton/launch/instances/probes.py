"""`--probe-port`: what an instance without HTTP tells those who watch over it (Kubernetes' kubelet, `curl`).

| path | 200 | 503 |
| --- | --- | --- |
| `/health` | the instance runs, or is being started | it has given up and exits |
| `/ready` | the server that it joined sends requests to it | it loads, was not taken yet, or drains |

Of a host that does not lead (`node.py`): `/health` 200 while the process runs, `/ready` 200 while it takes
part in an instance.

Nothing else is answered, and nothing of a request is in it, so everybody may ask.  An answer costs no thread
and no process: the listener belongs to the supervisor's event loop.  At most `_MOST` connections are read at
a time, each to `_LONGEST` bytes, and each is closed `_PATIENCE_S` after it came.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from baton.launch.limits import OptionError

_MOST = 16
_PATIENCE_S = 2.0
_LONGEST = 4096

Why = Callable[[], str]
"""Why not; "" if all is well."""


class Probes:
    """Answers from `start` to `close`."""

    def __init__(self, host: str, port: int, *, unhealthy: Why, unready: Why) -> None:
        self._host, self._port = host, port
        self._answers = {b"/health": unhealthy, b"/ready": unready}
        self._places = asyncio.Semaphore(_MOST)
        self._server: asyncio.Server | None = None

    async def start(self) -> int:
        """Returns the port.  Raises `OptionError`."""
        try:
            self._server = await asyncio.start_server(
                self._serve, self._host, self._port, limit=_LONGEST, start_serving=True
            )
        except OSError as error:
            reason = error.strerror or str(error)
            raise OptionError(f"--probe-port {self._port}: {reason}; give another port") from None
        return int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_PATIENCE_S), self._places:
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head))
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(_PATIENCE_S):
                    await writer.wait_closed()

    def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        why = self._answers.get(path)
        if method not in (b"GET", b"HEAD"):
            return _answer("405 Method Not Allowed", "use GET", method)
        if why is None:
            return _answer(
                "404 Not Found", "an instance answers /health and /ready; requests go to its server", method
            )
        reason = why()
        return _answer("503 Service Unavailable" if reason else "200 OK", reason or "ok", method)


def _answer(status: str, text: str, method: bytes) -> bytes:
    body = f"{text}\n".encode()
    head = (
        f"HTTP/1.1 {status}\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: {len(body)}\r\n"
        "connection: close\r\n\r\n"
    )
    return head.encode() + (b"" if method == b"HEAD" else body)
