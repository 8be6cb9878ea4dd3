"""A proxy that writes down what passes: requests as they came, answers, and when each piece of them came."""

from __future__ import annotations

import http.client
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

_OF_A_CONNECTION = {
    "connection",
    "keep-alive",
    "transfer-encoding",
    "host",
    "content-length",
    "accept-encoding",
}
_WAIT_S = 3600.0


class Recorder:
    """Listens on a free port of 127.0.0.1 and asks `upstream`; `exchanges`: what passed, as it arrived."""

    def __init__(self, upstream: str) -> None:
        self.exchanges: list[dict[str, Any]] = []
        self._address = urlsplit(upstream).netloc
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _pass(self) -> None:
                recorder._pass(self)

            do_GET = do_POST = do_HEAD = do_DELETE = _pass

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="recorder", daemon=True)
        self._thread.start()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(60)

    def _pass(self, client: BaseHTTPRequestHandler) -> None:
        body = client.rfile.read(int(client.headers.get("content-length") or 0))
        began = time.monotonic()
        exchange: dict[str, Any] = {
            "method": client.command,
            "path": client.path,
            "headers": dict(client.headers.items()),
            "body": _as_json(body),
            "pieces": [],
            "left": False,
        }
        self.exchanges.append(exchange)
        headers = {k: v for k, v in client.headers.items() if k.lower() not in _OF_A_CONNECTION}
        upstream = http.client.HTTPConnection(self._address, timeout=_WAIT_S)
        try:
            upstream.request(client.command, client.path, body=body or None, headers=headers)
            answer = upstream.getresponse()
            exchange["status"], exchange["answer_headers"] = answer.status, dict(answer.getheaders())
            client.send_response_only(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in _OF_A_CONNECTION:
                    client.send_header(name, value)
            client.send_header("transfer-encoding", "chunked")
            client.end_headers()
            while piece := answer.read1(1 << 16):
                exchange["pieces"].append(
                    (round(time.monotonic() - began, 3), piece.decode(errors="replace"))
                )
                client.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                client.wfile.flush()
            client.wfile.write(b"0\r\n\r\n")
        except (BrokenPipeError, ConnectionResetError):
            exchange["left"] = True  # the program gave up
        finally:
            exchange["seconds"] = round(time.monotonic() - began, 3)
            upstream.close()


def _as_json(body: bytes) -> Any:
    try:
        return json.loads(body) if body else None
    except ValueError:
        return body.decode(errors="replace")
