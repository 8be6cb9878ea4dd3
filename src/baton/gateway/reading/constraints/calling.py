"""Calls that a request demands, and the schemas that bind them, as a description of the answer (`Structure`).

The frames are those of `parsing.formats`, written instead of read.  What an answer has before its calls or
its content (reasoning) is free.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.gateway.api.tools import Tools
from baton.gateway.errors import BadRequest
from baton.gateway.parsing.choice import Formats
from baton.gateway.parsing.frames import Think
from baton.gateway.reading.constraints.functions import Function
from baton.gateway.reading.constraints.template_calls import written
from baton.gateway.reading.constraints.writing import (
    TRIGGERS,
    WRITING,
    Writing,
    json_call,
    until,
)
from baton.grammar.description import (
    AnyText,
    Content,
    Either,
    Ending,
    Regex,
    Repeat,
    Structure,
    Tag,
    Tagged,
    Text,
    Until,
)
from baton.grammar.description import Sequence as Parts

_SPACES = Regex(r"[ \n]{0,4}")


def structure_of(
    formats: Formats,
    tools: Tools,
    functions: Sequence[Function],
    *,
    parallel: bool,
    thinking: bool,
    content: Content | None = None,
    budget: int | None = None,
) -> Structure | None:
    """What the answer must be; None: whatever.  `functions`: the tools with the schemas that bind their
    arguments.  `content`: what binds an answer that calls nothing.  `thinking`: the answer begins inside of
    reasoning, which has `budget` tokens at most.  Raises `BadRequest` for schemas that this format cannot
    keep."""
    think = formats.thinking_in(thinking)
    if think is None and not formats.is_harmony:
        budget = None
    demanded = tools.demanded
    if not tools.wanted or not (demanded or tools.strict or tools.bound or content is not None):
        answer = content
    else:
        if tools.named:
            functions = [one for one in functions if one.name == tools.choice]
        answer = _answer(formats, functions, demanded, parallel and not tools.named, content)
    if answer is None:
        if budget is None:
            return None
        answer = _anything(formats)
    elif formats.is_harmony and answer is content:
        answer = Parts([Text("<|channel|>final<|message|>"), answer])
    if formats.is_harmony:
        return Structure(_after_analysis(answer, budget))
    return Structure(_after_thoughts(think, answer, thinking, budget))


def _answer(
    formats: Formats,
    functions: Sequence[Function],
    demanded: bool,
    parallel: bool,
    content: Content | None,
) -> Content:
    writing = _writing(formats)
    calls = Either([writing.call(one) for one in functions])
    several = Repeat(calls, separator=writing.between) if parallel and not writing.once else calls
    frame = Parts([Text(writing.before), several, Text(writing.after)])
    if demanded:
        return frame
    if formats.is_harmony:
        final: Content = AnyText() if content is None else content
        return Either([frame, Parts([Text("<|channel|>final<|message|>"), final])])
    if content is not None:
        return Either([frame, content])
    if writing.before:
        # (A trigger is one token where the model has it as one.)
        marks = [mark for mark in formats.markers if writing.before.startswith(mark)]
        trigger = max(marks, key=len, default=writing.before)
        return Tagged([Tag(writing.before, Parts([several, Text(writing.after)]))], [trigger])
    triggers = TRIGGERS if formats.response is None else {formats.calls: _begin(formats).split("NAME")[0]}
    if formats.calls not in triggers:  # the answer's first character tells
        return Either([frame, Regex(r"([^\s{\[](.|\n)*)?")])
    trigger = triggers[formats.calls]
    return Tagged([_tag(trigger, writing.call(one)) for one in functions], [trigger])


def _writing(formats: Formats) -> Writing:
    """Raises `BadRequest` where a `response_template` says only how calls are read."""
    if formats.response is None:
        return WRITING[formats.calls]
    found = written(formats.template)
    if found is None:
        raise BadRequest(
            "tools: this model's response_template tells how calls are read, not how they are written: they "
            "cannot be demanded, be strict, or stand beside response_format; start the server with "
            "--tool-call-parser NAME",
            param="tools",
            code="unsupported_parameter",
        )
    return Writing(json_call(*found))


def _begin(formats: Formats) -> str:
    """What stands before a call, with `NAME` for its name."""
    found = written(formats.template)
    return "" if found is None else found[0]


def _tag(trigger: str, call: Content) -> Tag:
    """The call, which begins with the trigger."""
    if not isinstance(call, Parts) or not isinstance(call.parts[0], Text):
        raise TypeError("a call begins with a text")
    if not call.parts[0].text.startswith(trigger):
        raise ValueError(f"{call.parts[0].text!r} does not begin with {trigger!r}")
    return Tag(call.parts[0].text, Parts(call.parts[1:]))


# -- reasoning before it


def _anything(formats: Formats) -> Content:
    """What an unbound answer has after its thoughts: text, and the format's tokens."""
    opening = formats.thinking.open if formats.thinking is not None else "<|channel|>analysis"
    text = AnyText(without=opening)
    marks = sorted(formats.markers - {opening})
    return Parts([text, Repeat(Parts([Either([Text(mark) for mark in marks]), text]), least=0)])


def _after_thoughts(think: Think | None, answer: Content, thinking: bool, budget: int | None) -> Content:
    if think is None:
        return answer
    thoughts = Parts([_thoughts(think.close, budget), _SPACES, answer])
    return thoughts if thinking else Either([Parts([_SPACES, Text(think.open), thoughts]), answer])


def _after_analysis(answer: Content, budget: int | None) -> Content:
    thoughts = _thoughts("<|end|>", budget)
    analysis = Parts([Text("<|channel|>analysis<|message|>"), thoughts, Text("<|start|>assistant"), answer])
    return Either([analysis, answer])


def _thoughts(end: str, budget: int | None) -> Content:
    """With what ends them."""
    if budget is None:
        return until(end, Text(""))
    return Until([Ending(Text(end), Text(""))], most_tokens=budget)
