"""Keys of the prefix index, which engines keep and gateways route by.

The key of a full block is a chained hash, key(i) = H(key(i-1) ‖ token ids of block i), and key(-1) = H(salt):
so equal keys mean equal tokens at equal positions under the same salt.  H is BLAKE2b with 128 bits.  On the
wire to a gateway (`Load`) a key is its first 8 bytes: a collision there costs a poor choice of instance,
never a wrong token.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b

KEY_BYTES = 16


def root_key(salt: str) -> bytes:
    """The key in front of a sequence's first block."""
    return blake2b(salt.encode(), digest_size=KEY_BYTES, person=b"baton-prefix").digest()


def extend_keys(keys: list[bytes], root: bytes, tokens: array[int], block_size: int, count: int) -> None:
    """Appends to `keys` until it has `count` keys, that of the first `count` blocks of `tokens`."""
    key = keys[-1] if keys else root
    for index in range(len(keys), count):
        content = tokens[index * block_size : (index + 1) * block_size].tobytes()
        key = blake2b(key + content, digest_size=KEY_BYTES).digest()
        keys.append(key)


def short_key(key: bytes) -> int:
    """The part of a key that travels in `Load`: 8 bytes, little-endian, signed."""
    return int.from_bytes(key[:8], "little", signed=True)


def short_keys(tokens: bytes, salt: str, block_size: int) -> list[int]:
    """Those of all full blocks of packed int32 tokens."""
    ids = array("i")
    ids.frombytes(tokens)
    keys: list[bytes] = []
    extend_keys(keys, root_key(salt), ids, block_size, len(ids) // block_size)
    return [short_key(key) for key in keys]
