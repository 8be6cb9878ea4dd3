"""How messages become bytes: MessagePack through msgspec, with packed integer arrays.

A `Codec` is bound to one direction of one channel, that is, to the union of messages allowed on it.
Whatever else arrives raises `MalformedMessage`; receivers log it with the sender and drop it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")

INT32 = "i"
INT64 = "q"
if array(INT32).itemsize != 4 or array(INT64).itemsize != 8:  # pragma: no cover
    raise ImportError("Baton needs a platform where C int is 32 bits and long long is 64 bits")


class MalformedMessage(ValueError):
    """Bytes that are not a message of this channel: unknown tag, wrong type, or truncated."""


class Codec(Generic[T]):
    """Encodes and decodes the messages of one channel.

    `kinds` is a msgspec struct type or a union of tagged struct types.
    """

    def __init__(self, kinds: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(kinds)

    def encode(self, message: T) -> bytes:
        return self._encoder.encode(message)

    def decode(self, data: bytes | memoryview) -> T:
        """Returns the message.  Raises `MalformedMessage` with the reason otherwise."""
        try:
            message: T = self._decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            # (msgspec passes on what the interpreter says of a wrong string or of nesting without end.)
            raise MalformedMessage(str(error)) from None
        return message


def pack_int32(values: Iterable[int]) -> bytes:
    """Packs ints as int32 in machine order (little-endian on every platform Baton supports)."""
    return values.tobytes() if isinstance(values, array) else array(INT32, values).tobytes()


def unpack_int32(data: bytes | memoryview) -> array[int]:
    """The inverse of `pack_int32`.  Raises `MalformedMessage` if the length is no multiple of 4."""
    return _unpack(INT32, data)


def pack_int64(values: Iterable[int]) -> bytes:
    return array(INT64, values).tobytes()


def unpack_int64(data: bytes | memoryview) -> array[int]:
    return _unpack(INT64, data)


def _unpack(kind: str, data: bytes | memoryview) -> array[int]:
    result = array(kind)
    try:
        result.frombytes(data)
    except ValueError as error:
        raise MalformedMessage(f"packed {kind!r} array of {len(data)} bytes: {error}") from None
    return result
