"""What a gateway does when it names one engine to another."""

from __future__ import annotations

from baton.protocol.messages.requests import Target
from baton.protocol.rules.passes import gateway_key, pair_key, plan_pass


def introduce(
    name: str, endpoint: str, to: str, request: int = 0, gateway: str = "gate", key: bytes | None = None
) -> Target:
    """The engine `name` as it is named to the engine `to`, which prefills this request.  `key`: what the
    gateway was welcomed with; without one, that of an engine without a secret."""
    key = gateway_key(b"") if key is None else key
    return Target(name, endpoint, pair_key(key, to), plan_pass(key, gateway, request, to))
