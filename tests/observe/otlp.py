"""A collector for tests: takes OTLP over gRPC or HTTP on a free port, and keeps the spans."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

DEADLINE_S = 90.0


def plain(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)


class Collector:
    """A context manager.  `grpc`: by that, else HTTP."""

    def __init__(self, *, grpc: bool) -> None:
        self._grpc = grpc
        self._news = threading.Condition()
        self.spans: list[Span] = []
        self.resources: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []

    def __enter__(self) -> Collector:
        if self._grpc:
            self._server: Any = grpc.server(ThreadPoolExecutor(2))
            trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Servicer(self), self._server)
            self.url = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
            self._server.start()
        else:
            self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
            self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
            threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._grpc:
            self._server.stop(0).wait()
        else:
            self._server.shutdown()
            self._server.server_close()

    def take(self, request: Any, headers: dict[str, str]) -> None:
        with self._news:
            for resource in request.resource_spans:
                self.resources.append(plain(resource.resource.attributes))
                for scope in resource.scope_spans:
                    self.spans += scope.spans
            self.headers.append(headers)
            self._news.notify_all()

    def wait(self, found: Callable[[list[Span]], bool]) -> None:
        end = time.monotonic() + DEADLINE_S
        with self._news:
            while not found(self.spans):
                assert self._news.wait(end - time.monotonic()), [span.name for span in self.spans]

    def request(self, id: str) -> tuple[Span, list[Span]]:
        """The span of a request, and its children in order of time."""

        def root() -> list[Span]:
            return [one for one in self.spans if plain(one.attributes).get("baton.request.id") == id]

        self.wait(lambda _: bool(root()))
        (span,) = root()
        children = [one for one in self.spans if one.parent_span_id == span.span_id]
        return span, sorted(children, key=lambda one: (one.start_time_unix_nano, one.end_time_unix_nano))


class _Servicer(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def Export(self, request: Any, context: Any) -> Any:
        self._collector.take(request, dict(context.invocation_metadata()))
        return trace_service_pb2.ExportTraceServiceResponse()


def _handler(collector: Collector) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                data = gzip.decompress(data)
            headers = {name.lower(): value for name, value in self.headers.items()} | {"path": self.path}
            collector.take(trace_service_pb2.ExportTraceServiceRequest.FromString(data), headers)
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    return Handler
