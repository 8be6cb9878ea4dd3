"""Secrets that show who was named by whom: short keyed hashes, each made for one purpose and no other.

Theory.  Each engine draws a *secret* when it starts.  Everything below is derived from it, so that nothing
needs to be remembered and nobody but the right parties can make it:

| what | who can make it | what it shows |
| --- | --- | --- |
| `gateway_key` of D | D, and every gateway that D has welcomed | |
| `pair_key` of P to D | the same, and P, which has it from the gateway's plan | a gateway knows P |
| `plan_pass` | the same as the gateway key | a gateway named P in the plan of this request |
| `link_proof` | P and D | this connection is made by one of the two |
| `grant_token` of P | P, and D, which has it from `Reserve` | D may fetch pages of this attempt |

Who reads what passes between two hosts in clear reads these as well.
"""

from __future__ import annotations

from hashlib import blake2b

KEY_BYTES = 16


def derive(key: bytes, purpose: str, *parts: str | int) -> bytes:
    """16 bytes for this purpose and these parts, whose order counts."""
    text = "".join(f"{len(part)}:{part}" for part in map(str, parts))
    person = purpose.encode()
    return blake2b(text.encode(), digest_size=KEY_BYTES, key=key, person=person).digest()


def gateway_key(secret: bytes) -> bytes:
    """What an engine gives to gateways (`Welcome.key`)."""
    return derive(secret, "gateway")


def pair_key(key: bytes, prefiller: str) -> bytes:
    """`key`: the decoding engine's gateway key; `prefiller`: the other one's incarnation."""
    return derive(key, "pair", prefiller)


def plan_pass(key: bytes, gateway: str, request: int, prefiller: str) -> bytes:
    """`key`: the decoding engine's gateway key."""
    return derive(key, "plan", gateway, request, prefiller)


def link_proof(pair: bytes, sender: str, session: str) -> bytes:
    return derive(pair, "link", sender, session)


def grant_token(secret: bytes, reader: str, number: int, attempt: int) -> bytes:
    """`secret`: the prefilling engine's."""
    return derive(secret, "grant", reader, number, attempt)
