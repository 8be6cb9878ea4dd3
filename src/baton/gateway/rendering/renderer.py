"""What the HTTP layer asks of a renderer, whatever the API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from baton.gateway.errors import ApiError
from baton.gateway.generation.generation import Completion, Update
from baton.gateway.generation.progress import Progress
from baton.gateway.rendering.formats import Part


class Renderer(Protocol):
    """Writes one endpoint's shapes for one generation."""

    def whole(self, completions: list[Completion]) -> Iterator[Part]:
        """The body of an answer that is not streamed."""

    def begin(self) -> bytes:
        """Events that say that there is an answer, before anything of it is known.  (None that load
        generators take for a first token.)"""

    def chunk(self, update: Update) -> bytes:
        """The event for an update; empty if it says nothing new."""

    def parts(self, update: Update) -> Iterator[Part]:
        """The same, for an update that brings much."""

    def end(self) -> bytes:
        """Events after the last update, the end mark among them."""

    def failure(self, error: ApiError) -> bytes:
        """The last events of a stream that cannot go on."""

    def sign_of_life(self, silent_s: float) -> bytes:
        """What a stream is sent after so long a silence, of a kind that the API's clients take for a sign of
        life."""

    def progress(self, progress: Progress) -> bytes:
        """The event that tells how far the prompt is, to who asked."""
