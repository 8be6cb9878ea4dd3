"""Prompts as an answer: /v1/chat/completions/render and /v1/completions/render, in vLLM's shape."""

from __future__ import annotations

from typing import Any

import msgspec

from baton.gateway.reading.prompts import Prompt
from baton.protocol.params.sampling_params import SamplingParams


def rendered(
    prompt: Prompt, params: SamplingParams, *, request_id: str, model: str, max_model_len: int, stream: bool
) -> dict[str, Any]:
    """What would be generated from, and how.  The text itself is an addition to vLLM's shape."""
    if params.max_tokens is None:
        params = params.replace(max_tokens=max_model_len - len(prompt.ids))
    return {
        "request_id": request_id,
        "token_ids": list(prompt.ids),
        "prompt": prompt.text,
        "features": None,
        "sampling_params": msgspec.to_builtins(params, str_keys=True),
        "model": model,
        "stream": stream,
    }
