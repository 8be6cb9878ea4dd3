"""What all routes of one application share, and how they read a request."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from baton.gateway.access import Access
from baton.gateway.api.content import Noted
from baton.gateway.api.pooling import PoolingFields
from baton.gateway.api.schemas import (
    SamplingFields,
    StreamOptions,
    decode_body,
)
from baton.gateway.api.unknown import UnknownFields
from baton.gateway.errors import BadRequest, ContextTooLong, NotFound
from baton.gateway.generation.costs import check_logprobs, counted, wants_many_logprobs
from baton.gateway.generation.generation import Generation
from baton.gateway.generation.generator import Generator
from baton.gateway.generation.pausing import Pausing
from baton.gateway.generation.permits import Permits
from baton.gateway.helpers.grammars import Grammars
from baton.gateway.helpers.metrics import HelperStats
from baton.gateway.helpers.pool import LONG_BODY, Helpers
from baton.gateway.http.bodies import Bodies
from baton.gateway.instances.client import ClusterClient
from baton.gateway.names import Alias
from baton.gateway.parsing.choice import Formats, choose
from baton.gateway.reading.jobs import CONVERSATIONS, Job, with_more
from baton.gateway.reading.reader import Found, Reader, decode_answer
from baton.gateway.reading.settings import Settings
from baton.gateway.responses.store import ResponseStore
from baton.gateway.served_model import ServedModel
from baton.gateway.sharing import Sharing
from baton.gateway.text.tokenizer import Tokenizer
from baton.observe.events.context import Trace, caller_of
from baton.observe.metrics import Metrics
from baton.observe.tracing.tracer import Tracer
from baton.protocol.params.sampling_params import SamplingParams

log = logging.getLogger(__name__)

_MIN_BODY_BYTES = 4 << 20
_MAX_BODY_BYTES = 16 << 20
_BODY_BYTES_PER_TOKEN = 256
_MAX_ORDER_BYTES = 64 << 10
"""Of the body of an operator's or an instance's request."""

NOTED = b"x-unsupported-content"
"""Header of an answer to a conversation with parts that the model does not read: `image=2, file=1`."""

_OPERATIONS = {
    "/v1/chat/completions": ("chat", "chatcmpl-"),
    "/v1/completions": ("text_completion", "cmpl-"),
    "/v1/messages": ("chat", "msg_"),
    "/v1/responses": ("chat", None),
}
"""For traces: what a path asks for, and what an answer's id has before the request's."""

T = TypeVar("T", bound=msgspec.Struct)


def _this_one() -> dict[str, int]:
    return {"gateway": os.getpid()}


@dataclass
class Gateway:
    """One served model on a cluster of instances."""

    served: ServedModel
    tokenizer: Tokenizer
    client: ClusterClient
    generator: Generator
    metrics: Metrics
    pausing: Pausing = field(init=False)
    helpers: Helpers = field(init=False)
    access: Access = field(default_factory=Access)
    bodies: Bodies = field(default_factory=Bodies)
    leaving: bool = field(init=False, default=False)
    """The server will stop soon: load balancers should look for another one."""
    started_with: Mapping[str, Any] = field(init=False, default_factory=dict)
    """What /server_info says besides the model: `flags`, `given`, `instance` (`answers.ServerInfo`)."""
    processes: Callable[[], Mapping[str, int]] = field(init=False, default_factory=lambda: _this_one)
    """Process ids of the server's processes on this host, by what they are."""
    placing: Callable[[], list[dict[str, Any]]] = field(init=False, default_factory=lambda: list)
    """Instances that have no place yet, or none any more (`states.Unplaced`)."""
    formats: Formats = field(init=False)
    """How the model writes calls and reasoning."""
    _reader: Reader = field(init=False)
    _unknown: UnknownFields = field(default_factory=UnknownFields)
    _noted: Noted = field(default_factory=Noted)
    sharing: Sharing = field(default_factory=Sharing)
    responses: ResponseStore = field(default_factory=ResponseStore)
    refuse_tools: bool = False
    """Tools that the server cannot serve are refused, not left out."""
    grammars: Grammars = field(init=False)
    _aliases_told: set[Alias] = field(init=False, default_factory=set)
    """Those that the log has said are used."""
    _permits: Permits = field(default_factory=Permits)
    """Of requests that want many log-probabilities."""

    def __post_init__(self) -> None:
        self.metrics.registry.register(self.bodies)
        self.metrics.registry.register(self.responses)
        self.pausing = Pausing(self.client, self.generator)
        self.formats = choose(
            self.tokenizer.template_source,
            self.served.tool_call_parser,
            self.served.reasoning_parser,
            response=self.tokenizer.response_template,
        )
        settings = Settings(
            max_model_len=self.served.max_model_len,
            vocab_size=self.served.vocab_size,
            template=self.tokenizer.template_source,
            content_format="string" if self.served.content_format == "string" else "openai",
            refuses=self.served.unsupported_content == "refuse",
            special_tokens=self.tokenizer.special_tokens,
            template_defaults=dict(self.served.template_defaults),
            formats=self.formats,
            judge=self.served.judge,
            keeps=self.responses.keeps,
            refuse_tools=self.refuse_tools,
            encoding=self.tokenizer.encoding.source(),
            special_names=self.tokenizer.special_names,
        )
        self.helpers = Helpers(settings)
        self.metrics.registry.register(HelperStats(self.helpers, self.served.name))
        self._reader = Reader(settings)
        self.grammars = Grammars(self.helpers)

    def close(self) -> None:
        """Gives up what runs beside the event loop."""
        self.helpers.close()

    def tell_traces(self, timeout_s: float) -> None:
        """At the end: sends what has not been sent of traces.  Blocks for so long at most."""
        if self.generator.tracer is not None:
            self.generator.tracer.close(timeout_s)

    @property
    def checkpoint(self) -> str:
        """What tells the weights apart that are served now; "" if nothing does."""
        weights = self.client.cluster.weights
        if not weights.generation:
            return self.served.checkpoint
        return weights.name if weights.name != weights.path else ""

    async def start(self, prompts: Sequence[Sequence[int]], params: SamplingParams, **how: Any) -> Generation:
        """`Generator.start`, after a wait where the answer costs much.  Raises what that does, `Overloaded`
        too."""
        params = counted(params, self.served)
        if not wants_many_logprobs(params):
            return self.generator.start(prompts, params, **how)
        check_logprobs(prompts, params, self.served)
        permits = self._permits
        await permits.take("logprobs")
        try:
            generation = self.generator.start(prompts, params, **how)
        except BaseException:
            permits.release()
            raise
        generation.permit = permits
        return generation

    async def read(self, request: Request, kind: type[T]) -> T:
        """The body of a request without prompts, a short one.  Raises what `Body.receive` does, and
        `BadRequest`."""
        body = self.bodies.begin()
        try:
            decoded, unknown = decode_body(b"".join(await body.receive(request, _MAX_ORDER_BYTES)), kind)
        finally:
            body.end()
        self._unknown.warn(unknown)
        return decoded

    async def read_prompted(
        self, request: Request, job: Job, more: Callable[[Any], bytes | None] | None = None
    ) -> tuple[Any, Found]:
        """(the body as a struct of `KINDS[job]`, or `Translated`; its prompts).  Raises `BadRequest`, or what
        `Body.receive` and `Helpers.answer` do.

        A conversation is read in a helper, because of the model's template, and so is every long body, and
        one whose texts take long to encode, or whose ids to decode.

        `more`, of jobs in `jobs.MORE`: from what is known of the body (`Translated.body`) to what has to be
        known before it can be read; None: nothing.
        """
        body = self.bodies.begin()
        try:
            pieces = await body.receive(request, self.max_body_bytes)
            found: Found | None = None
            if body.size < LONG_BODY and job not in CONVERSATIONS:
                decoded, found, unknown = self._reader.read(job, b"".join(pieces))
            if found is None or found.is_long:
                sent = pieces if more is None else with_more(b"", pieces)
                decoded, found, unknown = decode_answer(job, await self.helpers.answer(job, *sent))
            if more is not None and (known := more(decoded.body)) is not None:
                sent = with_more(known, pieces)
                decoded, found, unknown = decode_answer(job, await self.helpers.answer(job, *sent))
        finally:
            body.end()
        self._unknown.warn(unknown)
        self._unknown.warn(found.skipped, "leaving out a tool that this server does not have:")
        if found.notes:
            self._noted.warn(found.notes)
            self.metrics.content_noted(found.notes)
            told = ", ".join(f"{kind}={count}" for kind, count in found.notes.items())
            request.scope["state"].setdefault("headers", []).append((NOTED, told.encode()))
        return decoded, found

    async def grammar(self, found: Found) -> tuple[str, str]:
        """What binds the answers, checked in a helper, and the field that asks for it; "": nothing.  What was
        checked lately is kept.  Raises `BadRequest`, or what `Helpers.answer` does."""
        for binding in found.bindings[:-1]:
            try:
                return await self.grammars.of(binding), binding.field
            except BadRequest:  # what it asks may be more than can be kept
                continue
        if not found.bindings:
            return "", ""
        return await self.grammars.of(found.bindings[-1]), found.bindings[-1].field

    @property
    def max_body_bytes(self) -> int:
        """What a request's body may weigh: it follows the context, within bounds."""
        wanted = _BODY_BYTES_PER_TOKEN * self.served.max_model_len
        return min(max(wanted, _MIN_BODY_BYTES), _MAX_BODY_BYTES)

    def model_name(self, asked: str | None) -> str:
        """The name to answer under.  Raises `NotFound` for a model that is not served."""
        if asked is None or asked == "":
            return self.served.name
        if asked in self.served.names:
            return asked
        alias = self.served.alias_of(asked)
        if alias is None:
            names = ", ".join(repr(name) for name in [*self.served.names, *map(str, self.served.aliases)])
            raise NotFound(
                f"model: {asked[:200]!r} is not served here; ask for {names}, or start the server with "
                "--served-model-name for other names",
                param="model",
                code="model_not_found",
            )
        if alias not in self._aliases_told:
            self._aliases_told.add(alias)
            log.warning(
                "a client asks for the model %r: %s answers, as to all names that match %s "
                "(--served-model-name says which)",
                asked[:200],
                self.served.name,
                alias.pattern,
            )
        return alias.name or asked


def stream_options(request: SamplingFields) -> StreamOptions:
    """Raises `BadRequest` where the client gave some for an answer that is not streamed."""
    if request.stream_options is not None and not request.stream:
        raise BadRequest(
            "stream_options: only with stream set to true; set that or leave it out", param="stream_options"
        )
    return request.stream_options or StreamOptions()


def check_whole(body: SamplingFields) -> None:
    """Raises `BadRequest` for what is told with the whole answer only."""
    for name, asked in (
        ("prompt_logprobs", body.prompt_logprobs is not None),
        ("return_routed_experts", bool(body.return_routed_experts)),
    ):
        if asked and body.stream:
            raise BadRequest(f"{name}: not with stream; set stream to false", param=name)


def identity(gateway: Gateway, request: Request, body: SamplingFields | PoolingFields) -> dict[str, Any]:
    """The arguments of `Generator.start` that say who and when, and in whose trace.  Raises `BadRequest`."""
    priority = body.priority or 0
    best = getattr(request.state, "min_priority", None)
    if best is not None and priority < best:
        raise BadRequest(
            f"priority: {priority} is better (lower) than {best}, the best that users may ask for here",
            param="priority",
        )
    key, sharing = getattr(request.state, "key_id", ""), gateway.sharing
    return {
        "trace": _trace(gateway.generator.tracer, request, bool(getattr(body, "stream", None))),
        "request_id": body.request_id or request.state.request_id,
        "priority": priority,
        "cache_salt": sharing.salt(key, body.cache_salt or ""),
        "flow": sharing.flow(key, body.user),
    }


def _trace(tracer: Tracer | None, request: Request, stream: bool) -> Trace | None:
    if tracer is None:
        return None
    path, headers = request.scope["path"], request.headers
    operation, id_prefix = _OPERATIONS.get(path, (path.rpartition("/")[2], None))
    caller = caller_of(headers.get("traceparent"), ",".join(headers.getlist("tracestate")))
    return tracer.begin(caller, operation, id_prefix, stream)


def check_room(asked: int | None, field_name: str, longest: int, max_model_len: int, source: str) -> None:
    """Refuses a prompt that leaves no room for an answer, and an explicit `max_tokens` that the context
    cannot hold.  `longest`: tokens of the longest prompt; `source`: the field that it comes from."""
    room = max_model_len - longest
    if room < 1:
        raise ContextTooLong(
            max_model_len,
            f"your {source} resulted in {longest} tokens, which leaves no room for an answer",
            f"Please reduce the length of the {source}, to at most {max_model_len - 1} tokens",
            param=source,
            tokens=longest,
        )
    if asked is not None and asked > room:
        raise ContextTooLong(
            max_model_len,
            f"you requested {longest + asked} tokens ({longest} in the {source}, {asked} in the completion)",
            f"Please reduce the length of the {source} or completion: {field_name} may be at most {room}",
            param=field_name,
        )
