"""What the instances that serve can hold, and how large a message they read.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from baton.gateway.errors import BadRequest
from baton.protocol.messages.requests import TO_ENGINE, Submit, Welcome, max_message_bytes
from baton.protocol.params.sampling import Sampling, Stopping

_PLAN_BYTES = 4096
"""At most what the decoders of a plan weigh in a message."""
_FRAME_BYTES = 256
"""More than a flow, and lengths and numbers in a message of a prompt, take beyond those of one without."""
_LONGEST_ID = (1 << 63) - 1


class Limits(NamedTuple):
    """What the instances that serve now can hold."""

    max_num_seqs: int
    """Sequences that run at once, over all instances."""
    kv_tokens: int
    """Tokens in the KV cache of the instance that has the least: a sequence may get there."""


def limits_of(welcomes: Sequence[Welcome]) -> Limits | None:
    """None if there is no instance."""
    if not welcomes:
        return None
    return Limits(
        sum(welcome.max_num_seqs for welcome in welcomes),
        min(welcome.num_blocks * welcome.block_size for welcome in welcomes),
    )


def check_size(
    welcomes: Sequence[Welcome],
    num_instances: int,
    prompt_bytes: int,
    sampling: Sampling,
    stopping: Stopping,
    name: str,
    cache_salt: str,
) -> None:
    """Raises `BadRequest` if a sequence with a packed prompt of so many bytes, and all this, is larger than
    what the engines read that sent these `welcomes`."""
    beside = Submit(_LONGEST_ID, name, b"", sampling, stopping, cache_salt=cache_salt)
    size = prompt_bytes + len(TO_ENGINE.encode(beside)) + _FRAME_BYTES
    if num_instances > 1:
        size += _PLAN_BYTES
    limit = min(max_message_bytes(welcome.max_model_len) for welcome in welcomes)
    if size > limit:
        raise BadRequest(
            f"the request makes a message of {size} bytes, and an instance reads at most {limit}; "
            "send a shorter prompt, or less beside it"
        )
