"""What the decoder of a tokenizer.json makes of tokens, where each stands for fixed bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


class Decoder(NamedTuple):
    """A decoder whose tokens stand for fixed bytes."""

    to_bytes: Callable[[str], bytes]
    """How a vocabulary's entry becomes bytes."""
    falls_back: bool = False
    """Entries are texts, but for those that are a byte: see `FallbackDetokenizer`."""
    strips: bool = False
    """A text's first space is dropped."""


def decoder_of(decoder: Mapping[str, Any] | None) -> Decoder | None:
    """None if it is none of those that are known."""
    if decoder is None:
        return None
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return Decoder(_byte_level)
    fallback = "ByteFallback"
    if kinds.count(fallback) != 1:
        return None
    replaces = strips = False
    for number, step in enumerate(steps):
        before = kinds[:number]
        match step:
            case {"type": "Replace", "pattern": {"String": "▁"}, "content": " "} if (
                "ByteFallback" not in before
            ):
                replaces = True
            case {"type": "ByteFallback" | "Fuse"}:
                pass
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0} if "Fuse" in before:
                strips = True
            case _:
                return None
    return Decoder(_spaced if replaces else _plain, True, strips)


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte: itself if it is one, else the next from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet


_ALPHABET = _byte_level_alphabet()


def _byte_level(content: str) -> bytes:
    try:
        return bytes([_ALPHABET[character] for character in content])
    except KeyError:  # an added token with characters of its own
        return content.encode()


def byte_of(content: str) -> int | None:
    """The byte that an entry such as `<0xE6>` stands for."""
    byte = _BYTE_TOKEN.match(content)
    return int(byte[1], 16) if byte else None


def _plain(content: str) -> bytes:
    byte = byte_of(content)
    return content.encode() if byte is None else bytes([byte])


def _spaced(content: str) -> bytes:
    return _plain(content.replace("▁", " "))
