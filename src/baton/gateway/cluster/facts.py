"""What an instance must be like to take part, how it stands in words, and what follows from how all of them
stand."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from baton.gateway.cluster.member import LABELS, Member
from baton.gateway.cluster.request import EngineRequest
from baton.gateway.errors import InstanceUnavailable
from baton.protocol.messages.requests import Welcome


class Requirements(NamedTuple):
    """What an instance must be like to take part; 0: does not matter."""

    max_model_len: int = 0
    vocab_size: int = 0

    def misfit(self, welcome: Welcome) -> str | None:
        """Why an instance that joined does not serve the same model, as far as it can be seen."""
        if min(welcome.block_size, welcome.num_blocks, welcome.max_num_seqs) < 1:
            return "it says that its KV cache has no blocks, blocks of no tokens, or that it runs nothing"
        if self.vocab_size and welcome.vocab_size != self.vocab_size:
            return (
                f"its model has a vocabulary of {welcome.vocab_size}, the one that is served here "
                f"of {self.vocab_size}; start it with the same model"
            )
        if welcome.max_model_len < self.max_model_len:
            return (
                f"its context of {welcome.max_model_len} tokens is shorter than the {self.max_model_len} "
                "served here; start it with the same --max-model-len"
            )
        return None


def check_label(label: str, what: str = "label") -> None:
    """Raises `ValueError` for one that does not exist."""
    if label not in LABELS:
        raise ValueError(f"{what}: {label!r} is none; give one of {', '.join(LABELS)}")


def unavailable(members: Iterable[Member], call: Callable[[str], str]) -> InstanceUnavailable:
    """Why nothing can be submitted now, for the client.  `call`: how an instance is called there."""
    single = [member.unavailable(call(member.name)) for member in members]
    if not single:
        return InstanceUnavailable("no instance has joined the cluster", code="no_instance", retry_after_s=5)
    if len(single) == 1:
        return single[0]
    message = "no instance can serve now: " + "; ".join(error.message for error in single)
    waits = [error.retry_after_s for error in single if error.retry_after_s is not None]
    best = next((error for error in single if error.retry_after_s is not None), single[0])
    return InstanceUnavailable(message, code=best.code, retry_after_s=min(waits, default=None))


def leads(members: Iterable[Member]) -> bool:
    """Whether it is this gateway that acts where one is to act for all: it is connected longest with the
    ready instance of the smallest name, of those that joined if any has.  Gateways that see the same
    instances agree."""
    ready = [member for member in members if member.welcome is not None]
    shared = [member for member in ready if member.joined] or ready
    least = min(shared, key=lambda member: member.name, default=None)
    return least is not None and least.welcome is not None and least.welcome.first


def describe(
    member: Member, now: float, *, drained: bool, requests: Collection[EngineRequest]
) -> dict[str, Any]:
    """An instance, for people and programs.  `drained`, `requests` (those that are there): as the table of
    requests says.  `gateway/arranging/described.py` reads it back."""
    load, welcome = member.load, member.welcome
    return {
        "name": member.name,
        "label": member.label,
        "state": member.state,
        "draining": member.draining,
        "drained": drained,
        "paused": member.paused,
        "joined": member.joined,
        "standing": member.standing.generation,
        "incarnation": member.incarnation,
        "failure": member.failure,
        "restarts": member.restarts,
        "in_flight": len(requests),
        "decoding": sum(request.heard for request in requests),
        "expires_in_s": None if member.lease is None else round(member.lease.until - now, 3),
        "hands_over": member.hands_over,
        "num_blocks": welcome.num_blocks if welcome else None,
        "block_size": welcome.block_size if welcome else None,
        "max_num_seqs": welcome.max_num_seqs if welcome else None,
        "reported_ago_s": round(now - member.loaded_at, 3) if member.welcome else None,
        "running": load.running if load else None,
        "waiting": load.waiting if load else None,
        "waiting_tokens": load.waiting_tokens if load else None,
        "queued_tokens": member.queued_tokens,
        "free_blocks": load.free_blocks if load else None,
        "prefill_tokens_per_s": load.prefill_tokens_per_s if load else None,
        "decode_step_s": load.decode_step_s if load else None,
        "cached_prefix_blocks": len(member.digest),
        "weights": welcome.weights.describe() if welcome else None,
        "detail": welcome.detail if welcome else None,
    }
