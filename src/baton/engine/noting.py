"""Writing a note about a request, if its gateway wants to know its way (`protocol/notes.py`).  Pure."""

from __future__ import annotations

from baton.engine.request import Request


def note(request: Request, now: float, what: str, a: int = 0, b: int = 0, c: int = 0, text: str = "") -> None:
    """What the numbers and the text mean: `notes.MEANING`."""
    if request.notes is not None:
        request.notes.add(now, what, a, b, c, text)
