"""Where traces are sent, with OpenTelemetry's SDK: the flag says where, the environment how.

`OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_TRACES_SAMPLER`, `OTEL_SDK_DISABLED`, the
`OTEL_EXPORTER_OTLP_…` of headers, certificates, compression, time-outs and the protocol, and the
`OTEL_BSP_…` of the queue, which here counts requests.  OpenTelemetry is imported only where the flag is
given.  What its exporters log is kept for the tracer's own warning, which comes once a minute at most.

Spans are made as the messages that go over the wire (`opentelemetry.proto`), and the SDK's exporters send
them.  Made as the SDK's objects first and then encoded, a request's spans take 120 us instead of 25.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from baton.observe.events.context import Caller, Trace
from baton.observe.tracing.traced import Traced
from baton.observe.tracing.tracer import Tracer
from baton.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

GRPC, HTTP = "grpc", "http/protobuf"
_MODULES = {
    GRPC: "opentelemetry.exporter.otlp.proto.grpc",
    HTTP: "opentelemetry.exporter.otlp.proto.http",
}
_SCHEMES = {"http": "http", "https": "https", "grpc": "http", "grpcs": "https"}
_PATH = "/v1/traces"
_FLAGS, _REMOTE = 0x100, 0x200
"""OTLP's span flags: it is said whether the parent is of another process, and it is."""


def check_endpoint(endpoint: str) -> None:
    """Raises `ValueError` with what to give, or to install."""
    protocol = protocol_of(endpoint, os.environ)
    parts = urlsplit(endpoint)
    if parts.scheme not in _SCHEMES or not parts.hostname:
        raise ValueError("give a URL such as http://127.0.0.1:4317 (gRPC) or http://127.0.0.1:4318/v1/traces")
    if protocol not in _MODULES:
        raise ValueError(f"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL: {protocol!r} must be {GRPC} or {HTTP}")
    if not all(map(_is_there, ("opentelemetry.sdk.trace", _MODULES[protocol]))):
        raise ValueError("OpenTelemetry is not installed; install it with pip install 'baton-llm[otel]'")


def protocol_of(endpoint: str, environment: Mapping[str, str]) -> str:
    """As the environment says, else by the scheme and by what collectors listen to: `http/protobuf` for a
    path and for port 4318, else gRPC."""
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if environment.get(name):
            return environment[name]
    parts = urlsplit(endpoint)
    if parts.scheme.startswith("grpc"):
        return GRPC
    return HTTP if parts.path.strip("/") or parts.port == 4318 else GRPC


def make_tracer(endpoint: str, model: str) -> Tracer:
    """Raises `ValueError` as `check_endpoint`."""
    check_endpoint(endpoint)
    environment = os.environ
    return Tracer(
        OtlpCollector(endpoint, protocol_of(endpoint, environment)),
        model,
        delay_s=_number(environment, "OTEL_BSP_SCHEDULE_DELAY", 1000) / 1000,
        most=_number(environment, "OTEL_BSP_MAX_QUEUE_SIZE", 2048),
        batch=_number(environment, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512),
    )


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name) or str(default)
    if not text.isdecimal() or not int(text):
        raise ValueError(f"{name}: {text[:50]!r} must be a whole number of at least 1")
    return int(text)


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # (not even what it is in)
        return False


class _LastWords(logging.Handler):
    """What OpenTelemetry's exporters say of a failure."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


class OtlpCollector:
    """A `Collector`."""

    def __init__(self, endpoint: str, protocol: str) -> None:
        from opentelemetry import trace
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
        from opentelemetry.proto.trace.v1 import trace_pb2
        from opentelemetry.sdk import trace as sdk
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource

        own = {
            "service.name": "baton",
            "service.version": __version__,
            "service.instance.id": f"{socket.gethostname()}:{os.getpid()}",
        }
        resource = Resource.create(own).merge(OTELResourceDetector().detect())
        self._sampler = sdk.TracerProvider(resource=resource).sampler
        self._disabled = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
        self._trace, self._trace_pb2 = trace, trace_pb2
        self._sampled = trace.TraceFlags(trace.TraceFlags.SAMPLED)
        self._empty = ExportTraceServiceRequest()
        """A request without spans."""
        of_us = self._empty.resource_spans.add(schema_url=resource.schema_url)
        _describe(of_us.resource.attributes, resource.attributes)
        of_us.scope_spans.add().scope.name = "baton"
        of_us.scope_spans[0].scope.version = __version__
        self._words = _LastWords(logging.WARNING)
        theirs = logging.getLogger("opentelemetry")
        theirs.addHandler(self._words)
        theirs.propagate = False
        self._exporter = _exporter(endpoint, protocol)

    @property
    def why(self) -> str:
        return self._words.text

    def samples(self, caller: Caller | None, trace_id: int, name: str, about: dict[str, Any]) -> str | None:
        if self._disabled:
            return None
        otel, context = self._trace, None
        if caller is not None:
            state = otel.TraceState.from_header([caller.state]) if caller.state else None
            flags = self._sampled if caller.sampled else otel.TraceFlags(otel.TraceFlags.DEFAULT)
            span = otel.SpanContext(caller.trace_id, caller.span_id, True, flags, state)
            context = otel.set_span_in_context(otel.NonRecordingSpan(span))
        result = self._sampler.should_sample(context, trace_id, name, otel.SpanKind.SERVER, about)
        if not result.decision.is_sampled():
            return None
        return "" if result.trace_state is None else result.trace_state.to_header()

    def spans(self, root: Traced, children: Sequence[Traced], trace: Trace, ids: Sequence[int]) -> list[Any]:
        own, caller = trace.span_id.to_bytes(8, "big"), trace.caller
        above = b"" if caller is None else caller.span_id.to_bytes(8, "big")
        flags = _FLAGS | (_REMOTE if caller is not None else 0)
        kinds, trace_id = self._trace_pb2.Span, trace.trace_id.to_bytes(16, "big")
        made = [self._span(root, own, above, kinds.SPAN_KIND_SERVER, flags)]
        for child, id in zip(children, ids, strict=True):
            made.append(self._span(child, id.to_bytes(8, "big"), own, kinds.SPAN_KIND_INTERNAL, _FLAGS))
        for span in made:
            span.trace_id, span.trace_state = trace_id, trace.state
        return made

    def _span(self, told: Traced, id: bytes, parent: bytes, kind: Any, flags: int) -> Any:
        span = self._trace_pb2.Span(
            span_id=id,
            parent_span_id=parent,
            name=told.name,
            kind=kind,
            start_time_unix_nano=_ns(told.begin),
            end_time_unix_nano=_ns(told.end),
            flags=flags,
        )
        _describe(span.attributes, told.attributes)
        for at, name, attributes in told.events:
            _describe(span.events.add(name=name, time_unix_nano=_ns(at)).attributes, attributes)
        if told.error is not None:
            span.status.code = self._trace_pb2.Status.STATUS_CODE_ERROR
            span.status.message = told.error
        return span

    def send(self, spans: Sequence[Any]) -> bool:
        from opentelemetry.sdk.trace.export import SpanExportResult

        request = type(self._empty)()
        request.CopyFrom(self._empty)
        request.resource_spans[0].scope_spans[0].spans.extend(spans)
        return self._exporter.export(_Encoded(request, len(spans))) is SpanExportResult.SUCCESS

    def close(self) -> None:
        self._exporter.shutdown()


class _Encoded(list[Any]):
    """Takes the place of spans where an exporter encodes them: holds the one request that they are in."""

    def __init__(self, request: Any, count: int) -> None:
        super().__init__(range(count))  # (exporters count them)
        self.request = request


def _take_as_it_is(module: Any) -> None:
    """Has the exporters of this module send an `_Encoded` without encoding it."""
    theirs = module.encode_spans
    module.encode_spans = lambda spans: spans.request if isinstance(spans, _Encoded) else theirs(spans)


def _describe(attributes: Any, values: Mapping[str, Any]) -> None:
    """Fills a message's attributes."""
    for name, value in values.items():
        one = attributes.add(key=name).value
        kind = type(value)
        if kind is str:
            one.string_value = value
        elif kind is bool:
            one.bool_value = value
        elif kind is int:
            one.int_value = value
        elif kind is float:
            one.double_value = value
        else:
            for text in value:
                one.array_value.values.add().string_value = text


def _exporter(endpoint: str, protocol: str) -> SpanExporter:
    parts = urlsplit(endpoint)
    parts = parts._replace(scheme=_SCHEMES[parts.scheme])
    if protocol == GRPC:
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as over_grpc

        _take_as_it_is(over_grpc)
        return over_grpc.OTLPSpanExporter(endpoint=urlunsplit(parts))
    from opentelemetry.exporter.otlp.proto.http import trace_exporter as over_http

    _take_as_it_is(over_http)
    if not parts.path.strip("/"):
        parts = parts._replace(path=_PATH)
    return over_http.OTLPSpanExporter(endpoint=urlunsplit(parts))


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
