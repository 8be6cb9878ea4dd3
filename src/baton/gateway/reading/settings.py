"""What reading bodies depends on, of the model and of the server."""

from __future__ import annotations

from typing import Any

import msgspec

from baton.gateway.api.messages import ContentFormat
from baton.gateway.parsing.choice import Formats
from baton.gateway.served_model import Judge
from baton.gateway.text.encoding import Source


class Settings(msgspec.Struct, frozen=True):
    """What reading depends on besides the body."""

    max_model_len: int
    vocab_size: int = 0
    """0: unknown."""
    template: str | None = None
    content_format: ContentFormat = "openai"
    """`openai`: parts of a text are the template's to read, where it does."""
    refuses: bool = False
    """Conversations with parts that are no texts."""
    special_tokens: dict[str, str] = {}
    template_defaults: dict[str, Any] = {}
    """Of the template's own switches."""
    formats: Formats = Formats()
    """How the model writes calls and reasoning."""
    judge: Judge | None = None
    """What the model is asked about pairs of texts; None: nothing, each text is a prompt of its own."""
    special_names: dict[str, int] = {}
    """Special tokens: text → id."""
    encoding: Source | None = None
    """How helpers encode texts; None: not at all."""
    cpu_s: float = 3.0
    """CPU time that a helper may spend on a body ..."""
    cpu_s_per_byte: float = 5e-7
    """... and so much for each byte of it: what tokenizers take."""
    memory: int = 256 << 20
    """Bytes that it may need for one ..."""
    memory_per_byte: int = 64
    """... and so many for each byte of the body: what JSON's smallest values become."""
    keeps: bool = False
    """Answers are kept for requests that go on from them."""
    refuse_tools: bool = False
    """Tools that the server cannot serve are refused, not left out."""
    nice: int = 10
    """The niceness of a helper that has a share of a busy machine; 0: none gives way, for whatever body."""
