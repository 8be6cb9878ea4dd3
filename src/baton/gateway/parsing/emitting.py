"""Where a parser's generators put what they found."""

from __future__ import annotations

from collections.abc import Callable

from baton.gateway.parsing.deltas import Call, Content, Delta, Reasoning, append
from baton.gateway.parsing.reading import nothing


class Words:
    """A text without the spaces at its ends.

    Spaces in front of a region belong to neither; they are given where the text goes on after it.
    """

    __slots__ = ("_begun", "_give", "_held", "_skips")

    def __init__(self, give: Callable[[str], None], *, strict: bool = False) -> None:
        """`strict`: also without those at the ends of the whole."""
        self._give = give
        self._held = ""
        """Spaces of which it is not known whether text follows."""
        self._begun = False
        self._skips = strict

    def push(self, text: str) -> None:
        if self._skips:
            text = text.lstrip()
            if not text:
                return
            self._skips = False
        bare = text.rstrip()
        if not bare:
            self._held += text
            return
        self._begun = True
        self._give(self._held + bare)
        self._held = text[len(bare) :]

    def region(self) -> None:
        """Something else follows."""
        if not self._begun:
            self._held = ""
        self._skips = True

    def separate(self, by: str | None = None) -> None:
        """What follows is another part of the text; `by`: what stands between them, else spaces do."""
        if self._begun and by is not None:
            self._held = by
        elif self._begun and not self._held:
            self._held = "\n"

    def end(self) -> None:
        """The text is over."""
        if self._held and not self._skips:
            self._give(self._held)
        self._held = ""


class Output:
    """Deltas that were not taken yet."""

    def __init__(self, *, parallel: bool, demanded: bool = False) -> None:
        """`demanded`: the answer is calls alone; what looks like text is a part of one that was cut off."""
        self.deltas: list[Delta] = []
        self.begun = 0
        """Calls, unwanted ones too."""
        self.num_calls = 0
        self.num_complete = 0
        """Calls whose arguments are a JSON object."""
        self._parallel = parallel
        self._drops = False
        """The call that is written now is not wanted."""
        self.content = Words(nothing if demanded else lambda text: append(self.deltas, Content(text)))
        self.reasoning = Words(lambda text: append(self.deltas, Reasoning(text)), strict=True)

    def begin(self, name: str, id: str | None = None) -> None:
        """A call; its arguments follow."""
        self.begun += 1
        self._drops = self.num_calls > 0 and not self._parallel
        self.content.region()
        self.content.separate()
        if not self._drops:
            append(self.deltas, Call(self.num_calls, name, "", id))
            self.num_calls += 1

    def arguments(self, text: str) -> None:
        if text and not self._drops:
            append(self.deltas, Call(self.num_calls - 1, None, text))

    def complete(self) -> None:
        """The call's arguments are complete."""
        if not self._drops:
            self.num_complete += 1

    def take(self) -> list[Delta]:
        deltas, self.deltas = self.deltas, []
        return deltas
