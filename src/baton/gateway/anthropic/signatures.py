"""Signatures of thinking blocks: strings that mean something to this server alone.

Anthropic's clients send thinking blocks back with their signature, and some drop those without one.  Where a
client wants no text of thoughts (`display: omitted`), the signature has them, so that the model still knows
in the next turn what it thought in this one.
"""

from __future__ import annotations

import base64
import binascii

_PREFIX = "baton1."
_EMPTY = _PREFIX + base64.urlsafe_b64encode(b"\0").decode()


def sign(thoughts: str | None = None) -> str:
    """`thoughts`: what the block does not show; None: it shows all."""
    if thoughts is None:
        return _EMPTY
    return _PREFIX + base64.urlsafe_b64encode(thoughts.encode()).decode()


def thoughts_in(signature: object) -> str:
    """Those that a block does not show; "" if there are none, or the signature is of another server."""
    if not isinstance(signature, str) or not signature.startswith(_PREFIX) or signature == _EMPTY:
        return ""
    try:
        return base64.b64decode(signature[len(_PREFIX) :], altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return ""
