"""What the end of a sequence in the engine is for its client: a good end, or which error."""

from __future__ import annotations

from typing import Literal

from baton.gateway.errors import ApiError, BadRequest, InstanceUnavailable, InternalError, Overloaded
from baton.gateway.sharing import retry_after
from baton.protocol.messages.requests import Finished
from baton.protocol.params.sampling import ASKS_FOR_GRAMMAR, NOTHING_LEFT
from baton.protocol.params.sampling_params import SamplingParams

EndReason = Literal["stop", "length", "abort", "repetition"]
"""`abort`: the server ended it; see `pausing.py`."""
END_REASONS: dict[str, EndReason] = {
    "stop": "stop",
    "length": "length",
    "pooled": "stop",
    "aborted": "abort",
}
"""Of good ends.  `aborted` is what this side ended (`Generation.abort`); what it cancels tells it nothing."""


def failure_of(finished: Finished, params: SamplingParams, grammar_field: str) -> ApiError | None:
    """The error that an end of the engine stands for, None for a good end.  `grammar_field`: which field
    asked for the grammar; the instance does not know."""
    if finished.reason in END_REASONS:
        return None
    message = finished.message or f"the instance ended the request: {finished.code or finished.reason}"
    field = None
    if message.startswith(f"{ASKS_FOR_GRAMMAR}: "):
        field = grammar_field
        message = field + message.removeprefix(ASKS_FOR_GRAMMAR)
    elif message.startswith(NOTHING_LEFT):
        field = "bad_words" if params.allowed_token_ids is None else "allowed_token_ids"
    match finished.code:
        case "queue_full":
            return Overloaded(message, code="queue_full", retry_after_s=retry_after(finished.retry_after_s))
        case "never_fits" | "bad_request":
            return BadRequest(message, param=field, code=finished.code)
        case "shutting_down":
            return InstanceUnavailable(message, code="shutting_down", retry_after_s=5)
    return InternalError(message, param=field, code=finished.code or finished.reason)
