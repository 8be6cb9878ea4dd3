"""Where traces are sent, with OpenTelemetry's SDK: the flag says where, the environment how.

`OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_TRACES_SAMPLER`, `OTEL_SDK_DISABLED`, the
`OTEL_EXPORTER_OTLP_…` of headers, certificates, compression, time-outs and the protocol, and the
`OTEL_BSP_…` of the queue, which here counts requests.  OpenTelemetry is imported only where the flag is
given.  What its exporters log is kept for the tracer's own warning, which comes once a minute at most.
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
        from opentelemetry.sdk import trace as sdk
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        class OneResource(Resource):  # type: ignore[misc]  # (an extra: not there for mypy)
            """Does not make JSON of itself for each span that is encoded: there is one."""

            def __hash__(self) -> int:
                return id(self)

            def __eq__(self, other: object) -> bool:
                return self is other

        own = {
            "service.name": "baton",
            "service.version": __version__,
            "service.instance.id": f"{socket.gethostname()}:{os.getpid()}",
        }
        resource = Resource.create(own).merge(OTELResourceDetector().detect())
        self._resource = OneResource(resource.attributes, resource.schema_url)
        self._sampler = sdk.TracerProvider(resource=resource).sampler
        self._disabled = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
        self._scope = InstrumentationScope("baton", __version__)
        self._trace, self._sdk = trace, sdk
        self._sampled = trace.TraceFlags(trace.TraceFlags.SAMPLED)
        self._unset = trace.Status(trace.StatusCode.UNSET)
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
        otel = self._trace
        state = otel.TraceState.from_header([trace.state]) if trace.state else None
        own = otel.SpanContext(trace.trace_id, trace.span_id, False, self._sampled, state)
        caller = trace.caller
        parent = None
        if caller is not None:
            parent = otel.SpanContext(trace.trace_id, caller.span_id, True, self._sampled, state)
        made = [self._span(root, own, parent, otel.SpanKind.SERVER)]
        for child, id in zip(children, ids, strict=True):
            context = otel.SpanContext(trace.trace_id, id, False, self._sampled, state)
            made.append(self._span(child, context, own, otel.SpanKind.INTERNAL))
        return made

    def _span(self, told: Traced, context: Any, parent: Any, kind: Any) -> Any:
        otel, status = self._trace, self._unset
        if told.error is not None:
            status = otel.Status(otel.StatusCode.ERROR, told.error)
        return self._sdk.ReadableSpan(
            told.name,
            context,
            parent,
            self._resource,
            told.attributes,
            [self._sdk.Event(name, attributes, _ns(at)) for at, name, attributes in told.events],
            kind=kind,
            status=status,
            start_time=_ns(told.begin),
            end_time=_ns(told.end),
            instrumentation_scope=self._scope,
        )

    def send(self, spans: Sequence[Any]) -> bool:
        from opentelemetry.sdk.trace.export import SpanExportResult

        return self._exporter.export(spans) is SpanExportResult.SUCCESS

    def close(self) -> None:
        self._exporter.shutdown()


def _exporter(endpoint: str, protocol: str) -> SpanExporter:
    parts = urlsplit(endpoint)
    parts = parts._replace(scheme=_SCHEMES[parts.scheme])
    if protocol == GRPC:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(endpoint=urlunsplit(parts))
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as OverHttp

    if not parts.path.strip("/"):
        parts = parts._replace(path=_PATH)
    return OverHttp(endpoint=urlunsplit(parts))


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
