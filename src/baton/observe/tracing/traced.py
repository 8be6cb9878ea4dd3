"""A story as spans for OpenTelemetry: the request, and below it what it was doing at each moment.

The request's span is named and described by OpenTelemetry's conventions for generative AI (`gen-ai-spans.md`
of its repository semantic-conventions-genai, as of 2026), as a server: its kind is SERVER, and the client's
span, if it has one, is its parent.  vLLM's `gen_ai.latency.time_to_first_token` is there as well; its other
latencies are those of the children.  These are the spans of `events/spans.py`, which leave no gap; those of a
request with several sequences say which one they are of, and those of one that was sent again which attempt.
Names of our own begin with `baton.`.  An attribute costs as much as three notes, so there is none in vain.

No texts: neither prompts, nor answers, nor stop strings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from baton.observe.events.placing import errors
from baton.observe.events.spans import Event, Span, events, spans
from baton.observe.events.story import Story
from baton.observe.events.trail import Trail

Value = bool | int | float | str | tuple[str, ...]
Attributes = dict[str, Value]

PROVIDER = "baton"
_INT64 = 1 << 63


@dataclass(slots=True)
class Traced:
    """A span.  Times are seconds since 1970."""

    name: str
    begin: float
    end: float
    attributes: Attributes
    events: list[tuple[float, str, Attributes]] = field(default_factory=list)
    error: str | None = None


def traced(story: Story, model: str, now: float) -> tuple[Traced, list[Traced]]:
    """(the request's span, its children).  `now`: on the gateway's clock."""
    wall = story.wall - story.arrived
    kept: list[Trail | None] = list(story.trails) or [None]
    children: list[Traced] = []
    noted: list[tuple[float, str, Attributes]] = []
    for index, trail in enumerate(kept):
        found = spans(story, trail, now)
        happened = [] if trail is None else events(trail)
        more: Attributes = {"baton.sequence": index} if story.sequences > 1 else {}
        wrong = {} if trail is None else errors(trail.told)
        again = len({span.id for span in found if span.id}) > 1
        for span, after in zip(found, [*found[1:], None], strict=True):
            own: Attributes = {"baton.instance": span.where, **more}
            if again:
                own["baton.attempt"] = span.id
            if span.slot >= 0:
                own["baton.slot"] = span.slot
            own |= _about(span, after, happened) | _wrong(wrong.get(span.where, 0.0))
            children.append(Traced(span.name, span.begin + wall, span.end + wall, own))
        noted += [(at + wall, name, told | more) for at, name, told in _noted(happened)]
    end = now if story.ended is None else story.ended
    root = Traced("", story.arrived + wall, end + wall, _request(story, model), sorted(noted, key=_at))
    root.name = f"{root.attributes['gen_ai.operation.name']} {model}"
    root.error = story.error
    return root, children


def _wrong(error: float | None) -> Attributes:
    """By how much the times can be wrong, where the clock is another host's."""
    if error is None:
        return {"baton.clock_error_known": False}
    return {"baton.clock_error_seconds": error} if error else {}


def _at(event: tuple[float, str, Attributes]) -> float:
    return event[0]


def _request(story: Story, model: str) -> Attributes:
    """What was asked for and what came of it."""
    trace, params = story.trace, story.params
    found: Attributes = {
        "gen_ai.operation.name": "chat" if trace is None else trace.operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.usage.input_tokens": story.prompt_tokens,
        "gen_ai.usage.output_tokens": story.generated_tokens,
        "baton.request.id": story.id,
    }
    if trace is not None:
        found["gen_ai.request.stream"] = trace.stream
        if trace.id_prefix is not None:
            found["gen_ai.response.id"] = trace.id_prefix + story.id
    if story.cached_tokens is not None:
        found["gen_ai.usage.cache_read.input_tokens"] = story.cached_tokens
    if story.max_tokens is not None:
        found["gen_ai.request.max_tokens"] = story.max_tokens
    if story.reasons:
        found["gen_ai.response.finish_reasons"] = story.reasons
    if story.error is not None:
        found["error.type"] = story.error
    if story.first_at is not None:
        found["gen_ai.latency.time_to_first_token"] = story.first_at - story.arrived
        if trace is not None and trace.stream:
            found["gen_ai.response.time_to_first_chunk"] = story.first_at - story.arrived
    if params is not None:
        found["gen_ai.request.temperature"] = params.temperature
        found["gen_ai.request.top_p"] = params.top_p
        for name, value, neutral in (
            ("choice.count", params.n, 1),
            ("top_k", float(max(params.top_k, 0)), 0.0),
            ("frequency_penalty", params.frequency_penalty, 0.0),
            ("presence_penalty", params.presence_penalty, 0.0),
        ):
            if value != neutral:
                found[f"gen_ai.request.{name}"] = value
        if params.seed is not None and params.seed < _INT64:  # (attributes are signed)
            found["gen_ai.request.seed"] = params.seed
    return found


def _about(span: Span, after: Span | None, happened: list[Event]) -> Attributes:
    """What notes say of a span besides its times."""
    if span.name == "handover":
        return _handover(span, after, happened)
    told: Attributes = {}
    for event in happened:
        note = event.note
        if event.id != span.id or event.where != span.where:
            continue
        if span.name == "prefill" and note.what == "admitted":
            told["baton.prompt.cached_tokens"] = note.b
        elif span.name == "prefill" and note.what == "prefilled":
            told["baton.prompt.tokens"] = note.a
        elif span.name == "decode" and note.what == "ended":
            told["baton.generated_tokens"] = note.a
    return told


def _handover(span: Span, after: Span | None, happened: list[Event]) -> Attributes:
    """`after`: where it went on.  Bytes, and seconds of fetching, are sums over ranks and fetches."""
    told: Attributes = {"baton.handover.from": span.where}
    if after is None:
        return told
    fetched = [
        event.note
        for event in happened
        if event.note.what == "fetched" and event.id == span.id and event.where == after.where
    ]
    told["baton.handover.to"] = after.where
    told["baton.handover.outcome"] = "taken" if after.name == "decode" else after.name
    told["baton.handover.bytes"] = sum(note.a for note in fetched)
    told["baton.handover.transport"] = ",".join(sorted({note.text for note in fetched} - {""}))
    told["baton.handover.fetch_seconds"] = sum(note.b for note in fetched) / 1e6
    return told


def _noted(happened: list[Event]) -> Iterator[tuple[float, str, Attributes]]:
    """Preemptions, and continuations after a loss: why it waited in the middle of its way."""
    lost: Event | None = None
    for event in happened:
        note = event.note
        if note.what == "preempted":
            yield event.at, "baton.preempted", {"baton.instance": event.where, "baton.attempt": event.id}
        elif note.what in ("lost", "moved"):
            lost = event
        elif note.what == "sent" and lost is not None:
            told: Attributes = {
                "baton.instance": note.text.partition(">")[0],
                "baton.attempt": note.a,
                "baton.tokens_kept": lost.note.b,
                "baton.seconds": event.at - lost.at,
            }
            if lost.note.what == "lost":
                told["baton.why"] = lost.note.text
            yield event.at, "baton.continued", told
            lost = None
