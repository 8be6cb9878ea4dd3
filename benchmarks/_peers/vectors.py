"""The first vectors of a batch, for `embeddings.py` to compare."""

from __future__ import annotations

import json
from pathlib import Path

from answering import Settings


def keep(settings: Settings, name: str, vectors: list[list[float]]) -> None:
    place = Path(settings.converted)
    place.mkdir(parents=True, exist_ok=True)
    (place / f"vectors-{name}.json").write_text(json.dumps(vectors))
