"""A server whose answers a test writes."""

from __future__ import annotations

import http.server
import json
import threading


class Scripted:
    """An HTTP server on a port of its own that gives the answers that it is told to, and can go away."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self.host = host
        self.hosts: list[str] = []
        """By what name it was asked."""
        self.answers: list[tuple[int, bytes]] = []
        self.asked: list[tuple[str, str, dict, str | None]] = []
        self.redirect = ""
        self._start(port)

    def _start(self, port: int) -> None:
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                key = self.headers.get("authorization")
                outer.hosts.append(self.headers["host"])
                outer.asked.append((self.command, self.path, json.loads(body) if body else {}, key))
                status, text = outer.answers.pop(0) if outer.answers else (200, b'{"state": "ready"}')
                self.send_response(status)
                self.send_header("content-length", str(len(text)))
                if outer.redirect:
                    self.send_header("location", outer.redirect)
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_PUT = do_POST = do_DELETE = answer

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer((self.host, port), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def go(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def come_back(self) -> None:
        self._start(self.port)
