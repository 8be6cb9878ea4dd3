"""Baton: an LLM serving engine with a hand-over that can be trusted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.version import __version__

__all__ = ["LLM", "AsyncLLM", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from baton.llm import LLM, AsyncLLM, SamplingParams


def __getattr__(name: str) -> object:
    """Loads the Python API on first use, so that `import baton` costs a process nothing."""
    if name in ("LLM", "AsyncLLM", "SamplingParams"):
        import baton.llm

        return getattr(baton.llm, name)
    raise AttributeError(f"module 'baton' has no attribute {name!r}")
