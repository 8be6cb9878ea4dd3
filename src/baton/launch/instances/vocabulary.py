"""The file with the model's tokens that the workers of an instance read (`InstanceConfig.vocabulary`)."""

from __future__ import annotations

import asyncio
import logging
from functools import lru_cache
from pathlib import Path

log = logging.getLogger(__name__)


async def write_vocabulary(tokenizer: str, path: Path) -> None:
    """Writes it in a thread; it has its name when it is complete.  A failure is logged: then constrained
    requests fail, and no others."""
    try:
        await asyncio.to_thread(_write, tokenizer, path)
    except (OSError, ValueError) as error:
        log.warning("structured outputs will fail: %s", error)


def _write(tokenizer: str, path: Path) -> None:
    unfinished = path.with_suffix(".new")
    unfinished.write_bytes(_vocabulary(tokenizer))
    unfinished.rename(path)


@lru_cache(1)
def _vocabulary(tokenizer: str) -> bytes:
    """Made once for all instances of a server.  Raises `TokenizerError`."""
    from baton.gateway.text.tokenizer import Tokenizer
    from baton.gateway.text.vocabulary import vocabulary_of

    return vocabulary_of(Tokenizer.from_directory(tokenizer)).encode()
