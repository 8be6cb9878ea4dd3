"""An executor that computes a whole text and gives all of its logits, for evaluations (`bench.perplexity`).

It is the one that serves, without requests: the text is one prompt, computed in pieces in the first blocks of
the pool.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from baton.executor.base import Int32Array
from baton.executor.expanded import expand
from baton.executor.torch_executor import TorchExecutor
from baton.model.attention import AttentionStep
from baton.model.decoder.decoder import Decoder

_PIECE = 512
"""Tokens a forward pass."""
_LOGITS_BYTES = 64 << 20
"""In float32, at a time."""


class TextScorer(TorchExecutor):
    """See above.  One rank only."""

    @torch.inference_mode()
    def expand(self, *, rounded: bool = False) -> int:
        """See `expanded.expand`."""
        assert isinstance(self._model, Decoder)
        return expand(self._model, rounded=rounded)

    @property
    def weight_bytes(self) -> int:
        """Of all weights as they are held: codes, scales, zero points, embedding, head, norms."""
        return self._model.weight_bytes()

    @torch.inference_mode()
    def text_logits(self, tokens: Int32Array, first: int = 0) -> Iterator[Tensor]:
        """[n, vocab] in float32 after each of `tokens` [T] from `first` on, in order, n at a time.

        Raises `ValueError` if the text has more tokens than the pool has room for.
        """
        blocks = -(-len(tokens) // self._block_size)
        if blocks > self._pool.num_blocks:
            raise ValueError(f"{len(tokens)} tokens need {blocks} blocks; there are {self._pool.num_blocks}")
        table = np.arange(blocks, dtype=np.int32)[None]
        rows = max(1, _LOGITS_BYTES // (4 * self._vocab_size))
        nothing = np.empty(0, np.int64)
        self._pool.use(table)
        for begin in range(0, len(tokens), _PIECE):
            piece = tokens[begin : begin + _PIECE]
            step = AttentionStep(np.array([begin], np.int32), np.array([len(piece)], np.int32), table, 0)
            hidden, _ = self._model(piece, step, nothing)
            for row in range(max(first - begin, 0), len(piece), rows):
                logits = self._model.logits(hidden[row : row + rows])
                assert logits is not None
                yield logits
