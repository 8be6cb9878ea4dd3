"""What a parser gives, piece by piece."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Content:
    """More of the answer's text."""

    text: str


@dataclass(slots=True)
class Reasoning:
    """More of what the model thought before it."""

    text: str


@dataclass(slots=True)
class Call:
    """More of a call: its name comes first and once, then its arguments, JSON when it is complete."""

    index: int
    name: str | None
    """Only in the first one of a call."""
    arguments: str
    id: str | None = None
    """The model's own name of the call, where its format has one; only in the first one."""


Delta = Content | Reasoning | Call


def append(deltas: list[Delta], new: Delta) -> None:
    """As part of the last one, if they are of one kind."""
    last = deltas[-1] if deltas else None
    if isinstance(new, Call):
        if isinstance(last, Call) and last.index == new.index:
            last.arguments += new.arguments
            return
    elif last is not None and type(last) is type(new):
        last.text += new.text
        return
    deltas.append(new)


@dataclass(slots=True)
class Called:
    """A call as a whole."""

    name: str
    arguments: list[str] = field(default_factory=list)
    id: str | None = None


@dataclass(slots=True)
class Parsed:
    """All of an answer: deltas put together."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[Called] = field(default_factory=list)

    def add(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            match delta:
                case Content(text):
                    self.content.append(text)
                case Reasoning(text):
                    self.reasoning.append(text)
                case Call(_, name, arguments, id):
                    if name is not None:
                        self.calls.append(Called(name, id=id))
                    self.calls[-1].arguments.append(arguments)
