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
class Said:
    """A stretch of the answer's text, or of reasoning."""

    reasoning: bool
    pieces: list[str]


@dataclass(slots=True)
class Parsed:
    """All of an answer: deltas put together."""

    parts: list[Said | Called] = field(default_factory=list)
    """In their order; two texts that follow each other are one."""

    @property
    def content(self) -> list[str]:
        return self._pieces(False)

    @property
    def reasoning(self) -> list[str]:
        return self._pieces(True)

    @property
    def calls(self) -> list[Called]:
        return [part for part in self.parts if isinstance(part, Called)]

    def add(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            match delta:
                case Content(text):
                    self._say(False, text)
                case Reasoning(text):
                    self._say(True, text)
                case Call(_, name, arguments, id):
                    if name is not None:
                        self.parts.append(Called(name, id=id))
                    called = self.parts[-1]
                    assert isinstance(called, Called)  # (a call is through before anything else comes)
                    called.arguments.append(arguments)

    def _say(self, reasoning: bool, text: str) -> None:
        last = self.parts[-1] if self.parts else None
        if isinstance(last, Said) and last.reasoning is reasoning:
            last.pieces.append(text)
        else:
            self.parts.append(Said(reasoning, [text]))

    def _pieces(self, reasoning: bool) -> list[str]:
        return [
            piece
            for part in self.parts
            if isinstance(part, Said) and part.reasoning is reasoning
            for piece in part.pieces
        ]
