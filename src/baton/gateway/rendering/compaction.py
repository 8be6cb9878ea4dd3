"""The answer of /v1/responses/compact, which is not streamed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from baton.gateway.errors import ApiError
from baton.gateway.generation.generation import Completion, Generation, Update
from baton.gateway.generation.progress import Progress
from baton.gateway.rendering.formats import Part, encode
from baton.gateway.rendering.responses import usage_of
from baton.gateway.responses.compaction import compaction_item


class CompactionRenderer:
    """A `Renderer` of one sequence, which is the summary."""

    def __init__(self, generation: Generation, token: str, items: Sequence[tuple[str, str]]) -> None:
        """`items`: what is kept as it is, with ids, as JSON."""
        self._generation = generation
        self._token = token
        self._items = items

    def whole(self, completions: list[Completion]) -> Iterator[Part]:
        (completion,) = completions
        parsed = completion.parsed
        summary = completion.text if parsed is None else "".join(parsed.content)
        if parsed is not None and not summary.strip():
            summary = "".join(parsed.reasoning)  # (its tokens ended before it said more)
        head = {
            "id": f"resp_{self._token}",
            "object": "response.compaction",
            "created_at": int(time.time()),
        }
        made = encode(compaction_item(summary.strip()))
        listed = b",".join([*(item.encode() for _, item in self._items), made])
        usage = encode(usage_of(self._generation))
        yield len(self._items) + 1, encode(head)[:-1] + b',"output":[' + listed + b'],"usage":' + usage + b"}"

    def begin(self) -> bytes:
        return b""

    def chunk(self, update: Update) -> bytes:
        return b""

    def parts(self, update: Update) -> Iterator[Part]:
        yield 1, b""

    def end(self) -> bytes:
        return b""

    def failure(self, error: ApiError) -> bytes:
        return b""

    def sign_of_life(self, silent_s: float) -> bytes:
        return b""

    def progress(self, progress: Progress) -> bytes:
        return b""
