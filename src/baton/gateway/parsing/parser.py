"""Reads what a model writes, by its formats, while it comes.

Theory.  The result is defined on the characters: a marker of the formats opens a region, which a generator
reads (`calls`, `python_calls`, here for reasoning and harmony).  A frame that turns out to hold no call is
text: its opening marker is given as such, and reading goes on right behind it.  All of this depends on the
text alone, never on its pieces; tests cut thousands of texts everywhere.

A call within thoughts ends them if they never end otherwise; if their end comes behind it, it was a draft
and stays a thought.  So from its marker on thoughts are held back, while a parser of its own reads what the
marker begins (its values may hold the thoughts' end): until it is no call, thoughts end, the text ends, or
`MAX_HELD` characters were held, when a call that has begun counts as one.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from baton.gateway.parsing.calls import CallReader
from baton.gateway.parsing.deltas import Call, Content, Delta, Parsed
from baton.gateway.parsing.emitting import Output
from baton.gateway.parsing.frames import Calls, Frame, LeadingJson, LeadingPython, TaggedFrame, Think
from baton.gateway.parsing.python_calls import python_calls
from baton.gateway.parsing.reading import Reading, Step, markers_of
from baton.gateway.parsing.results import BROKEN, DONE, MAX_HELD, NOT, Result
from baton.gateway.parsing.tags import Types

_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_HEADS = ("<|start|>", "<|channel|>", "<|message|>")
HARMONY_MARKERS = (*_ENDS, *_HEADS, "<|constrain|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")


class ResponseParser:
    """Parses one answer."""

    __slots__ = (
        "_ahead",
        "_caller",
        "_calling",
        "_calls",
        "_drafted",
        "_known",
        "_output",
        "_reading",
        "_step",
        "_think",
        "_types",
        "_unclosed",
        "_whole",
        "stopped",
        "thinking",
    )

    def __init__(
        self,
        think: Think | None,
        calls: Calls | None,
        *,
        calling: bool = True,
        tools: Collection[str] = (),
        types: Types | None = None,
        thinking: bool = False,
        parallel: bool = True,
        demanded: bool = False,
        ahead: bool = False,
    ) -> None:
        """`think` None: there is no reasoning (but harmony's, if `calls` is that).  `calling` false: what
        looks like a call is text.  `tools`: names.  `thinking`: the text begins inside of reasoning
        (`choice.begins_thinking`).  `parallel`: more than one call.  `demanded`: the answer is calls alone.
        `ahead`: the text is what thoughts hold from a call's marker on; it is read to where they end."""
        self._think = think
        self._calls = calls
        self._calling = calling
        self._known = frozenset(tools)
        self._types = types or {}
        self._ahead = ahead
        self._whole = False
        self.stopped = ""
        """With `ahead`: what ends the thoughts, once that was read."""
        self._drafted = 0
        """Characters that follow and are a draft of calls, which thoughts hold."""
        self._reading = Reading()
        self._output = Output(parallel=parallel, demanded=demanded)
        self._caller = CallReader(self._reading, self._output, self._types, self._known.__contains__)
        self._unclosed = 0
        """Frames that were text, and whose ends will be."""
        self.thinking = think is not None and thinking
        """The text goes on inside of reasoning."""
        self._step = self._harmony() if calls is not None and calls.harmony else self._regions()
        next(self._step)

    @property
    def num_complete(self) -> int:
        """Calls whose arguments are a JSON object."""
        return self._output.num_complete

    @property
    def holds(self) -> bool:
        """What came last may be the beginning of a marker."""
        return self._reading.at < len(self._reading.buffer)

    @property
    def rest(self) -> str:
        """What came and is not read."""
        return self._reading.rest

    def push(self, text: str) -> list[Delta]:
        """What this piece of the text decides."""
        if not text:
            return []
        self._reading.push(text)
        next(self._step)
        return self._output.take()

    def finish(self, *, whole: bool = False) -> list[Delta]:
        """What was held back; the text is over.  `whole`: the model ended it, and was not cut off."""
        self._reading.ended = True
        self._whole = whole
        for _ in self._step:
            raise AssertionError("a text that has ended was waited for")
        output = self._output
        output.reasoning.region()
        output.reasoning.end()
        output.content.end()
        return output.take()

    # -- regions between markers

    def _regions(self) -> Step[None]:
        yield
        reading, output, think = self._reading, self._output, self._think
        frames = self._calls.frames if self._calls is not None and self._calling else ()
        dropped = self._calls.dropped if self._calls is not None else ()
        opens = {marker: frame for frame in frames for marker in frame.open}
        closes = {end for frame in frames for end in _ends_of(frame) if end.startswith("<")}
        marks: tuple[str, ...] = ()
        if think is not None:
            marks = (*think.opens, *think.closes)
            dropped = (*dropped, *think.dropped)
        markers = markers_of(tuple(dict.fromkeys((*marks, *opens, *closes, *dropped))))
        leading = next((one for one in frames if isinstance(one, LeadingJson | LeadingPython)), None)
        if self.thinking:
            yield from self._reason((*opens, *dropped))
        if leading is not None:
            yield from self._lead(leading)
        while True:
            found = yield from reading.until(markers, output.content.push)
            if not found:
                return
            if think is not None and found in marks:
                if self._ahead and found in think.closes:
                    self.stopped = found
                    yield
                    return
                output.content.region()
                if found in think.opens:
                    yield from self._reason((*opens, *dropped))
                    if leading is not None and not output.begun:
                        yield from self._lead(leading)
            elif found in opens:
                yield from self._call(opens[found], found)
            elif found in dropped or not self._unclosed:
                output.content.region()
            else:
                self._unclosed -= 1
                output.content.push(found)

    def _reason(self, opens: tuple[str, ...]) -> Step[None]:
        """To the end of the region."""
        reading, output, think = self._reading, self._output, self._think
        assert think is not None
        self.thinking = True
        output.reasoning.separate()
        marks = markers_of(tuple(dict.fromkeys((*think.opens, *think.closes, *opens))))
        while True:
            found = yield from reading.until(marks, output.reasoning.push)
            if found in think.opens:  # (once more: the prompt has it, or the model repeats itself)
                continue
            if not found or found in think.closes:
                break
            if think.ends_at_call or (yield from self._calls_within(found)):
                reading.unread(found)
                break
            output.reasoning.push(found + self._draft())
        self.thinking = False
        output.reasoning.region()
        output.content.region()

    def _calls_within(self, opened: str) -> Step[bool]:
        """Whether a marker within thoughts begins calls with which the answer ends.  All that follows is held
        until that is known, and read by a parser of its own."""
        reading, think, calls = self._reading, self._think, self._calls
        if not self._calling:
            return False
        reading.mark()
        ahead = ResponseParser(think, calls, tools=self._known, types=self._types, ahead=True)
        deltas = ahead.push(opened)
        given = 0
        while True:
            text = reading.rest[: MAX_HELD - reading.held]
            reading.at += len(text)
            given += len(text)
            deltas += ahead.push(text)
            if ahead.stopped or (deltas and isinstance(deltas[0], Content)):
                found = False
                break
            if reading.held >= MAX_HELD or (reading.ended and not reading.rest):
                found = any(isinstance(delta, Call) for delta in deltas)
                break
            yield
        reading.back()
        self._drafted = given - len(ahead.stopped) - len(ahead.rest) if ahead.stopped else 0
        return found

    def _draft(self) -> str:
        """Reads what thoughts hold behind a call's marker, to their end; it may hold that end in a value."""
        reading = self._reading
        text = reading.rest[: self._drafted]
        reading.at += len(text)
        self._drafted = 0
        return text

    def _lead(self, frame: Frame) -> Step[None]:
        """What the answer begins with may be a call without a marker."""
        reading, output = self._reading, self._output
        blank = yield from reading.spaces()
        first = yield from reading.peek()
        if first and first in "[{":
            reading.mark()
            if (yield from self._attempt(self._leading(frame))) is not NOT:
                return
        output.content.push(blank)

    def _call(self, frame: Frame, opened: str) -> Step[None]:
        reading, output = self._reading, self._output
        reading.mark()
        if isinstance(frame, LeadingJson | LeadingPython):
            yield from reading.spaces()
            step = self._leading(frame)
        else:
            step = self._caller.read(frame, opened)
        if (yield from self._attempt(step)) is NOT:
            self._unclosed += bool(frame.close)
            output.content.push(opened)

    def _leading(self, frame: Frame) -> Step[Result]:
        reading = self._reading
        if isinstance(frame, LeadingPython):
            return (yield from python_calls(reading, self._output, self._known.__contains__))
        if isinstance(frame, LeadingJson) and frame.listed:
            return (yield from self._caller.json(frame, self._known.__contains__))
        result = yield from self._caller.json_call(self._known.__contains__)
        while result is DONE:
            reading.mark()
            yield from reading.spaces()
            yield from reading.one_of((";", ","))
            yield from reading.spaces()
            result = yield from self._caller.json_call(self._known.__contains__)
            if result is NOT:
                reading.back()
                return DONE
        return result

    def _attempt(self, step: Step[Result]) -> Step[Result]:
        """Reads a call that may be none; the place goes back to the mark then."""
        reading, output = self._reading, self._output
        before = output.begun
        while True:
            try:
                next(step)
            except StopIteration as end:
                result: Result = end.value
                break
            if output.begun == before and self._caller.is_long:
                step.close()
                result = NOT
                break
            yield
        if result is NOT:
            reading.back()
        reading.release()
        return result

    # -- harmony

    def _harmony(self) -> Step[None]:
        yield
        reading, output = self._reading, self._output
        while True:
            found = yield from reading.until(markers_of((*_ENDS, *_HEADS)), output.content.push)
            if not found:
                return
            if found in _HEADS:
                reading.mark()
                if (yield from self._attempt(self._message(found))) is NOT:
                    output.content.push(found)

    def _message(self, found: str) -> Step[Result]:
        reading, output = self._reading, self._output
        head = found
        if found != "<|message|>":
            text, end = yield from reading.upto(markers_of(("<|message|>", *_ENDS)))
            if end != "<|message|>" or reading.held > MAX_HELD:
                return NOT
            head += text
        channel = _CHANNEL.search(head)
        recipient = _RECIPIENT.search(head)
        if recipient is not None and self._calling:
            yield from reading.spaces()
            ends = bool((yield from reading.ahead(reading.one_of((*_ENDS, *_HEADS)))))
            if ends or (self._whole and not (yield from reading.peek())):
                return self._caller.empty(recipient[1])
            return (yield from self._caller.arguments(recipient[1]))
        reading.release()
        output.begun += 1  # (it is a message, and stays one)
        thinks = channel is not None and channel[1] == "analysis"
        words = output.reasoning if thinks else output.content
        words.separate()
        self.thinking = thinks
        end = yield from reading.until(markers_of((*_ENDS, *_HEADS)), words.push)
        self.thinking = False
        words.region()
        if end in _HEADS:
            reading.unread(end)
        return DONE


def _ends_of(frame: Frame) -> tuple[str, ...]:
    return (frame.close, frame.outer) if isinstance(frame, TaggedFrame) else (frame.close,)


def parse(parser: ResponseParser, text: str) -> Parsed:
    """A whole text."""
    parsed = Parsed()
    parsed.add(parser.push(text))
    parsed.add(parser.finish())
    return parsed


__all__ = ["BROKEN", "DONE", "NOT", "ResponseParser", "parse"]
