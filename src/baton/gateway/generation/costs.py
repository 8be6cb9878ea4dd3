"""What a request may cost altogether.  Each field has bounds of its own; here is their product bounded."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from baton.gateway.api.fields import MAX_SEQUENCES
from baton.gateway.errors import BadRequest
from baton.gateway.served_model import ServedModel
from baton.protocol.params.sampling import LISTED_LOGPROBS
from baton.protocol.params.sampling_params import InvalidParameter, SamplingParams

MAX_PROMPT_TOKENS = 1 << 24
"""Of one request: each prompt's tokens times n.  128 answers to a prompt of 131,072 tokens."""
MAX_BESIDE_PROMPTS = 1 << 20
"""Of one request: prompts times n times what each of these sequences carries beside its prompt, in characters
of stop strings, stop tokens and biased tokens.  4,096 sequences with 256 of them; 3 with all that the fields
take."""
MAX_GRAMMARS = 8 << 20
"""Of one request: prompts times n times the characters of its grammar."""

MAX_ROUTES = 256 << 20
"""Of one request: bytes of the ids of experts that its answers may say."""

MAX_LOGPROB_ENTRIES = 1 << 22
"""Of one request over HTTP that asks for more than `LISTED_LOGPROBS` of each token: over all of its tokens,
those of prompts too.  32 MiB of memory; some 300 MB of JSON, which is written piece by piece."""


def counted(params: SamplingParams, served: ServedModel) -> SamplingParams:
    """With the size of the vocabulary where -1 stands for it.  Raises `InvalidParameter` for more
    log-probabilities than the server gives."""
    found = {}
    for name in ("logprobs", "prompt_logprobs"):
        value: int | None = getattr(params, name)
        if value is not None and (count := count_logprobs(name, value, served)) != value:
            found[name] = count
    return params.replace(**found) if found else params


def count_logprobs(name: str, value: int, served: ServedModel) -> int:
    """As `counted`, of one field."""
    all_of_them = served.vocab_size
    most = (all_of_them or value) if served.max_logprobs == -1 else served.max_logprobs
    count = all_of_them if value == -1 else value
    if 0 <= value <= most or (value == -1 and 0 < all_of_them <= most):
        return count
    what = "the whole vocabulary" if value == -1 else str(value)
    raise InvalidParameter(
        name, f"{what} is more than the {most} that this server gives; lower it, or start with --max-logprobs"
    )


def fill_logprobs(body: msgspec.Struct, served: ServedModel, *names: str) -> None:
    """`count_logprobs` of these fields of a body, in it."""
    for name in names:
        value: int | None = getattr(body, name)
        if value is not None:
            setattr(body, name, count_logprobs(name, value, served))


def wants_many_logprobs(params: SamplingParams) -> bool:
    return max(params.logprobs or 0, params.prompt_logprobs or 0) > LISTED_LOGPROBS


def check_logprobs(prompts: Sequence[Sequence[int]], params: SamplingParams, served: ServedModel) -> None:
    """Of a request that wants many.  Raises `BadRequest`."""
    entries = 0
    for prompt in prompts:
        room = served.max_model_len - len(prompt)
        answer = room if params.max_tokens is None else min(params.max_tokens, room)
        entries += params.n * (answer * (params.logprobs or 0) + len(prompt) * (params.prompt_logprobs or 0))
    if entries > MAX_LOGPROB_ENTRIES:
        name = "logprobs" if (params.logprobs or 0) > LISTED_LOGPROBS else "prompt_logprobs"
        raise BadRequest(
            f"{name}: those of all tokens may come to {entries}, more than {MAX_LOGPROB_ENTRIES}; lower "
            "max_tokens or n, give a shorter prompt, or ask for those of some tokens (logprob_token_ids)",
            param=name,
        )


def check_routes(
    prompts: Sequence[Sequence[int]], params: SamplingParams, served: ServedModel, field: str
) -> None:
    """Of a request that asks which experts its tokens go to.  Raises `BadRequest`."""
    routing, start = served.routing, params.routed_experts_prompt_start
    if routing is None:
        raise BadRequest(
            "return_routed_experts: not here; start the server, of a mixture of experts, with "
            "--enable-return-routed-experts",
            param="return_routed_experts",
            code="unsupported_parameter",
        )
    shortest = min(map(len, prompts))
    if start >= shortest:
        raise BadRequest(
            f"routed_experts_prompt_start: {start} must be less than the {shortest} tokens of {field}",
            param="routed_experts_prompt_start",
        )
    rows = 0
    for prompt in prompts:
        room = served.max_model_len - len(prompt)
        answer = room if params.max_tokens is None else min(params.max_tokens, room)
        rows += len(prompt) - start + params.n * answer
    size = rows * routing.row_bytes
    if size > MAX_ROUTES:
        raise BadRequest(
            f"return_routed_experts: {rows} tokens with {routing.row_bytes} bytes of ids each may come to "
            f"{size >> 20} MiB, more than {MAX_ROUTES >> 20}; lower n or max_tokens, give "
            "routed_experts_prompt_start, or send several requests",
            param="return_routed_experts",
        )


def check_cost(
    prompts: Sequence[Sequence[int]], params: SamplingParams, field: str = "prompt", grammar_size: int = 0
) -> None:
    """Raises `BadRequest`, which names the fields and the limit; prompts are in `field`."""
    sequences = len(prompts) * params.n
    if sequences > MAX_SEQUENCES:
        raise BadRequest(
            f"{field}: {len(prompts)} prompts with n = {params.n} are more than {MAX_SEQUENCES} "
            "sequences; send several requests",
            param=field,
        )
    tokens = params.n * sum(map(len, prompts))
    if tokens > MAX_PROMPT_TOKENS:
        raise BadRequest(
            f"{field}, n: {tokens} prompt tokens over all {sequences} sequences are more than "
            f"{MAX_PROMPT_TOKENS}; send several requests",
            param=field,
        )
    if sequences * grammar_size > MAX_GRAMMARS:
        raise BadRequest(
            f"prompt, n: {sequences} sequences with a grammar of {grammar_size} characters each are more "
            f"than {MAX_GRAMMARS} characters; send several requests",
            param=field,
        )
    parts = {
        "stop": sum(map(len, params.stop_strings)),
        "stop_token_ids": len(params.stop_token_ids or ()),
        "logit_bias": len(params.logit_bias or ()),
        "bad_words": sum(map(len, params.bad_words or ())),
        "allowed_token_ids": len(params.allowed_token_ids or ()),
    }
    cost = sequences * sum(parts.values())
    if cost > MAX_BESIDE_PROMPTS:
        raise BadRequest(
            f"prompt, n, {', '.join(parts)}: {sequences} sequences with {parts['stop']} characters of stop "
            f"strings, {parts['stop_token_ids']} stop tokens, {parts['logit_bias']} biased tokens, "
            f"{parts['bad_words']} characters of bad words and {parts['allowed_token_ids']} allowed tokens "
            f"each cost {cost}, more than {MAX_BESIDE_PROMPTS}; send several requests, or less of these",
            param=max(parts, key=lambda name: parts[name]),
        )
