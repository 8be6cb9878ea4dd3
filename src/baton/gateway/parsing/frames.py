"""What frames of reasoning and calls are made of, as data."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_TAG = re.compile(r"<[^<>]+>|\[[A-Z/_]+\]")


def tags_in(markers: Iterable[str]) -> set[str]:
    """Whole tags in markers: what may be a token of its own.  (Of `">` or `<function=` none may.)"""
    return {tag for marker in markers for tag in _TAG.findall(marker)}


@dataclass(frozen=True, kw_only=True)
class Think:
    """A region of reasoning before the answer."""

    open: str
    close: str
    from_start: bool = False
    """An answer begins with reasoning even where neither the prompt nor the model opens it."""
    ends_at_call: bool = False
    """A call ends it at once: its marker is a token that nobody writes in a draft."""
    also: tuple[tuple[str, str], ...] = ()
    """Other ways to write (`open`, `close`)."""
    dropped: tuple[str, ...] = ()
    """Around the answer that follows it, and of no interest themselves."""

    @property
    def opens(self) -> tuple[str, ...]:
        return (self.open, *(one for one, _ in self.also))

    @property
    def closes(self) -> tuple[str, ...]:
        return (self.close, *(one for _, one in self.also))

    @property
    def words(self) -> set[str]:
        """Its tags, as they may be tokens."""
        return tags_in((*self.opens, *self.closes, *self.dropped))


@dataclass(frozen=True, kw_only=True)
class Frame:
    """What all frames of calls have."""

    open: tuple[str, ...]
    """A call begins at one of these."""
    close: str = ""
    """What follows it."""

    @property
    def markers(self) -> tuple[str, ...]:
        """All fixed texts of it."""
        return (*self.open, self.close)

    @property
    def words(self) -> set[str]:
        """Its tags, as they may be tokens."""
        return tags_in(self.markers)


@dataclass(frozen=True, kw_only=True)
class JsonFrame(Frame):
    """`{"name": …, "arguments": {…}}`, or a list of such."""

    keyed: bool = False
    """`{NAME: {…}}` in place of it."""
    known: bool = False
    """The name must be one of the request's tools, with arguments: the marker may stand before other JSON."""


@dataclass(frozen=True, kw_only=True)
class NamedFrame(Frame):
    """The name as it is, then the arguments as a JSON object."""

    before: str = ""
    """The name follows this; what stands before is of no interest."""
    ends: tuple[str, ...]
    """The name ends at one of these, or at the first `{`."""
    pattern: str = r"(?P<name>[^\s{}\"']+)"
    """What stands there as name, as a whole; `id`, if there is such a group, names the call."""
    skips: tuple[tuple[str, str], ...] = ()
    """(marker that ends the name, what ends the text after it): that text is of no interest."""
    or_json: bool = False
    """Or what a `JsonFrame` has."""

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.open, self.close, self.before, *self.ends)


@dataclass(frozen=True, kw_only=True)
class TaggedFrame(Frame):
    """A tag for each argument, with its value as text: JSON is made of it by the tool's schema."""

    head: str = ""
    """Before the name."""
    name_end: tuple[str, ...]
    """After the name; those that begin a parameter or end the call are not part of it."""
    name_pattern: str = r"[\"']?(?P<name>[^\s<>\"']+)[\"']?"
    """What stands there as name, as a whole."""
    key: str
    """Before a parameter's key."""
    key_end: str
    key_pattern: str = r"\s*[\"']?(?P<key>[^<>\"']+)[\"']?\s*"
    """What stands there, as a whole.  Groups `string` (`true`: the value is a text, `false`: JSON) and `type`
    (`string` is a text, others are JSON) say what the value is, where the tool's schema does not."""
    value: str = ""
    """Between key and value, after spaces."""
    value_end: str
    foot: str = ""
    """After the last parameter."""
    outer: str = ""
    """After the last call; not needed."""
    lines: bool = True
    """A line break at each end of a value is not part of it."""
    escapes: bool = False
    """`&quot;` and `&amp;` stand in names and keys."""

    @property
    def closers(self) -> tuple[str, ...]:
        """What may end a call, from the inside out."""
        return tuple(one for one in (self.foot, self.close, self.outer) if one)

    @property
    def markers(self) -> tuple[str, ...]:
        inner = (self.head, *self.name_end, self.key, self.key_end, self.value, self.value_end)
        return (*self.open, *inner, *self.closers)


@dataclass(frozen=True, kw_only=True)
class LeadingJson(Frame):
    """An answer that is a call from its first character: `{"name": …, "parameters": {…}}`, or several,
    between them `;`.  The name must be one of the request's tools."""

    listed: bool = False
    """A list of them."""


@dataclass(frozen=True, kw_only=True)
class LeadingPython(Frame):
    """The same as Python's calls: `[f(a=1), g(b="x")]`."""


@dataclass(frozen=True, kw_only=True)
class PythonFrame(Frame):
    """Python's calls between markers: `[f(a=1), g(b="x")]`, or one a line."""

    lines: bool = False


@dataclass(frozen=True, kw_only=True)
class LooseFrame(Frame):
    """`call:NAME{key:value,…}`, JSON whose keys have no quotes and whose texts stand between `quote`s."""

    before: str
    """The name follows this."""
    quote: str

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.open, self.close, self.quote)


@dataclass(frozen=True)
class Calls:
    """A format of calls."""

    frames: tuple[Frame, ...] = ()
    dropped: tuple[str, ...] = ()
    """Around calls, and of no interest themselves."""
    harmony: bool = False
    """gpt-oss: messages on channels; reasoning too."""
    short_ids: bool = False
    """Ids of calls have nine letters and digits."""

    @property
    def words(self) -> set[str]:
        """Its tags, as they may be tokens."""
        return tags_in(self.dropped) | {word for frame in self.frames for word in frame.words}
