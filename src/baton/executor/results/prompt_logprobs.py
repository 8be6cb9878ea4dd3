"""Log-probabilities of the tokens of prompts, from the hidden states before them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from baton.executor.base import Int32Array
from baton.model.loader import AnyDecoder
from baton.model.sampling.logprobs import token_logprobs
from baton.protocol.params.sampling import TokenLogprobs

_CHUNK_BYTES = 64 << 20
"""Of logits in float32, at a time."""


def prompt_logprobs(
    model: AnyDecoder, hidden: Tensor, targets: Int32Array, count: int
) -> list[TokenLogprobs]:
    """Hidden states [n, hidden] before the last norm and the tokens that followed [n]; with `count` others
    each.  [] on ranks without logits."""
    step = max(1, _CHUNK_BYTES // (4 * model.config.vocab_size))
    wanted = torch.from_numpy(targets.astype(np.int64)).to(hidden.device)
    found: list[TokenLogprobs] = []
    for first in range(0, len(targets), step):
        logits = model.logits(hidden[first : first + step])
        if logits is not None:
            found.extend(token_logprobs(logits, wanted[first : first + step], count))
    return found
