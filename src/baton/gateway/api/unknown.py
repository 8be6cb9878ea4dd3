"""Fields of bodies that nobody knows, and those that are known and refused."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from baton.gateway.errors import BadRequest

log = logging.getLogger(__name__)

MAX_WARNED = 1000
"""Names of which anything is kept."""
_NEUTRAL_BYTES = 64
"""No value of an unsupported field that asks for nothing is written longer."""
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])

_OTHER = (
    "audio",
    "documents",
    "ec_transfer_params",
    "kv_transfer_params",
    "logits_processors",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "prediction",
    "prompt_embeds",
    "suffix",
    "web_search_options",
)
_PARTS_CUT = ("max_tokens_per_query", "max_tokens_per_doc")
Refusal = tuple[tuple[Any, ...], str]
"""Of a field: (values that ask for nothing, why it is refused).  null asks for nothing too."""
UNSUPPORTED: dict[str, Refusal] = {
    "functions": (([],), "is not supported; give tools"),
    "function_call": (("none", "auto"), "is not supported; give tools and tool_choice"),
    "messages": ((), "is for /v1/chat/completions; give the texts themselves"),
    "modalities": ((["text"],), "only text is generated; leave it out"),
    "use_beam_search": ((False,), "beam search is not supported; leave it out"),
    "chat_template": ((), "requests cannot bring one; start the server with --chat-template"),
    "thinking_token_budget": ((-1,), "is for /v1/chat/completions; leave it out"),
    "watermarking": ((False,), "texts are not watermarked; leave it out"),
    "return_token_offsets": ((False,), "offsets of tokens are not told; leave it out"),
    "return_weight_versions": ((False,), "which weights made a token is not told; leave it out"),
    **dict.fromkeys(_PARTS_CUT, ((0,), "is not supported; give truncate_prompt_tokens")),
    "return_prompt_text": ((False,), "is not supported; ask /v1/chat/completions/render"),
    "padding": (("do_not_pad",), "prompts are not padded; leave it out"),
    "embed_dtype": (("float32",), "vectors are of 32-bit floats; leave it out"),
    "endianness": (("native", "little"), "base64 is little-endian; leave it out"),
    "best_of": ((1,), "is for /v1/completions; leave it out"),
    **dict.fromkeys(_OTHER, ((), "is not supported; leave it out")),
}
"""Of a kind that has no table `UNSUPPORTED` of its own."""


class UnknownFields:
    """Warns of field names that nobody knows, once each, and of kinds of tools that were left out."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def warn(self, names: Iterable[str], what: str = "ignoring the unknown request field") -> None:
        for name in names:
            said = f"{what} {name[:100]!r}"
            if said not in self._warned and len(self._warned) < MAX_WARNED:
                self._warned.add(said)
                log.warning("%s (said once)", said)


def unknown_in(field: str, raw: msgspec.Raw, known: frozenset[str]) -> list[str]:
    """Names in an object of a body, as JSON, that are not among these.  (What else may be wrong in it, the
    decoder of the body says.)"""
    try:
        members = _MEMBERS.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return []
    return [f"{field}.{name}" for name in members if name not in known][:MAX_WARNED]


def is_refused(name: str, raw: msgspec.Raw, refused: Mapping[str, Refusal]) -> bool:
    """Whether the field is one that is known as not supported; it asks for nothing then.  Raises `BadRequest`
    if it does."""
    if name not in refused:
        return False
    neutral, reason = refused[name]
    data = bytes(raw)
    try:
        value = msgspec.json.decode(data) if len(data) <= _NEUTRAL_BYTES else data
    except msgspec.MsgspecError:  # a number out of range
        value = data
    # (0 is not false: a type that is not the field's asks for something that is not known.)
    asks_nothing = any(type(value) is type(one) and value == one for one in neutral)
    if value is not None and not asks_nothing:
        raise BadRequest(f"{name}: {reason}", param=name, code="unsupported_parameter")
    return True
