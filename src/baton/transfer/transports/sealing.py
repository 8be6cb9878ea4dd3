"""Records of an encrypted page connection, without a socket: lengths, keys and numbers.

Theory.  The bytes of one direction are cut into records: 4 bytes with the length of what follows, that much
ciphertext, 16 bytes that prove it (AES-256-GCM).  Each direction of each connection has a key of its own,
and its records are numbered from 0; the number is the nonce and is not sent.  So a record that is changed,
left out, repeated or put elsewhere does not open, and nor does any after it.

A key seals `_RECORDS_A_KEY` records, at most 16 GiB, far below what AES-GCM bears; then both ends hash it
into the next one.

`encryption.py` says where the keys come from.
"""

from __future__ import annotations

import hmac

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from baton.transfer.base import TransferError

HEAD_BYTES, TAG_BYTES = 4, 16
RECORD_BYTES = 256 << 10
"""Most bytes of pages in a record."""
KEY_BYTES = 32
_RECORDS_A_KEY = 1 << 16


class Seal:
    """One end of one direction."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._cipher = AESGCM(key)
        self._number = 0

    def seal(self, content: memoryview, record: memoryview) -> int:
        """Writes the record of `content` to the beginning of `record`; returns its length.  `content` may be
        `record[HEAD_BYTES:]`'s own beginning."""
        size = len(content)
        record[:HEAD_BYTES] = size.to_bytes(HEAD_BYTES, "big")
        end = HEAD_BYTES + size + TAG_BYTES
        self._cipher.encrypt_into(self._nonce(), content, None, record[HEAD_BYTES:end])
        return end

    def open(self, sealed: memoryview, content: memoryview) -> None:
        """`sealed`: what follows a record's length.  `content`: as long as what it holds; may be the
        beginning of `sealed`.  Raises `TransferError`: then nothing may be believed of the connection."""
        try:
            self._cipher.decrypt_into(self._nonce(), sealed, None, content)
        except InvalidTag:
            raise TransferError("what came was changed on the way") from None

    def _nonce(self) -> bytes:
        if self._number == _RECORDS_A_KEY:
            self._key = hmac.digest(self._key, b"next", "sha256")
            self._cipher, self._number = AESGCM(self._key), 0
        nonce = self._number.to_bytes(12, "big")
        self._number += 1
        return nonce
