"""The experts that the tokens of an answer went to, put together from what came (`protocol/routes.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from baton.gateway.generation.generation import Generation
from baton.protocol.routes import Routes

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ids: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]
    """uint8 or uint16."""
# numpy is imported by those who use it: a gateway that is not asked for experts starts without it.


def routed_experts(generation: Generation, index: int) -> Ids | None:
    """Of one choice that has ended: [tokens, mixtures, chosen], of the prompt's tokens from
    `routed_experts_prompt_start` on and of all generated ones but the last, which no expert has seen.

    None where it was not asked for, or where the choice ended before all of these were computed.  (Of the
    choices of one prompt only the first has told of the whole prompt.)
    """
    import numpy as np

    own = generation.sequences[index]
    start = own.routes_start
    if start is None:
        return None
    prompt = len(own.prompt)
    pieces = [*own.routes]
    shared = max(start, prompt - 1)
    if index % generation.choices:
        whole = generation.sequences[index - index % generation.choices]
        pieces = [*whole.routes, *pieces]
    found: list[Ids] = []
    position = start
    stop = prompt + max(own.num_generated, 1) - 1
    for number, piece in enumerate(pieces):
        inherited = number < len(pieces) - len(own.routes)
        part = _between(piece, position, min(stop, shared) if inherited else stop)
        if part is not None:
            found.append(part)
            position += len(part)
    return np.concatenate(found) if found and position == stop else None


def _between(piece: Routes, first: int, stop: int) -> Ids | None:
    """The rows of positions [first, stop), if the piece has the first of them."""
    import numpy as np

    if not piece.first <= first < min(piece.stop, stop):
        return None
    ids: Ids = np.frombuffer(piece.ids, f"<u{piece.width}").reshape(-1, piece.mixtures, piece.chosen)
    return ids[first - piece.first : stop - piece.first]
