"""A layer that guesses the token after the next one (multi-token prediction), beside the decoder's layers.

Theory.  At position p it takes the model's hidden state h(p), which the token at p + 1 was drawn from, and
the embedding of that token, and guesses the token at p + 2:

    x(p) = projection [embedding_norm(embedding(token(p + 1))), hidden_norm(norm(h(p)))]
    g(p) = block(x(p)), which attends to x of all positions before;  logits(p) = head(norm(g(p)))

`norm`, embedding and head are the model's.  The layer's keys and values depend on its inputs alone.  For a
guess further on, g(p) stands in the place of h(p + 1), and the guess in that of the token.

*Sources.*  ERNIE-4.5: PaddlePaddle/FastDeploy `fastdeploy/model_executor/models/ernie4_5_mtp.py`
(`Ernie4_5_MTPModel.forward`: embedding first; `norm` of the model behind the block, and before `hidden_norm`,
since `previous_hidden_states` are what the model's last norm gave, or the layer's own call before);
vllm-project/vllm `vllm/model_executor/models/ernie_mtp.py` has the names of tensors, takes the same states,
but puts zeros in the place of the first embedding and has no norm behind the block.  PaddlePaddle/ERNIE
`ernie/modeling_moe.py`, where it is trained, has that norm and no zeros, but takes h(p) without `norm`.
jjang-ai/vmlx `vmlx_engine/models/ernie4_5/ernie4_5_moe.py` says that of eight variants FastDeploy's agreed
best with the weights of ERNIE-4.5-21B-A3B; that was not tried again here.  Another one would give worse
drafts, and the same answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.model.attention import AttentionBackend, AttentionStep
from baton.model.checkpoint.config import ModelConfig
from baton.model.decoder.blocks import Attention, Block, LayerContext
from baton.model.layers.layers import Linear, Module, RMSNorm, VocabParallelEmbedding
from baton.model.layers.parallel import TensorParallel
from baton.model.layers.placement import Placement
from baton.model.layers.rotary import Rotary
from baton.model.ops.fused import PLAIN
from baton.model.weights.store import Facts, WeightStore


@dataclass(frozen=True)
class Ends:
    """What of a decoder its MTP layer uses too.  (Not a `Module`: the decoder has them loaded.)"""

    embedding: VocabParallelEmbedding
    norm: RMSNorm
    head: VocabParallelEmbedding


class _Named:
    """Another's store, under names of its own: a whole table beside a rank's part of the same one."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self.complete = store.complete

    def make(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._store.make(f"mtp {name}", shape, dtype, device)

    def note(self, name: str, facts: Callable[[], Facts]) -> Facts:
        return self._store.note(f"mtp {name}", facts)


def config_of_mtp(config: ModelConfig) -> ModelConfig:
    """A model that has no other layer."""
    assert config.mtp is not None
    names = replace(config.names, layers=config.mtp.block)
    return replace(config, layers=(config.mtp.layer,), names=names, mtp=None)


class Mtp(Module):
    """Whole on one rank, also under tensor parallelism; then with tables of its own."""

    def __init__(
        self,
        config: ModelConfig,
        placement: Placement,
        backend: AttentionBackend,
        max_model_len: int,
        rotary: tuple[int, Rotary],
        ends: Ends,
    ) -> None:
        """`config`: the model's.  `rotary`: as `Attention`'s, of the model."""
        told, hidden, eps = config.mtp, config.hidden_size, config.norm_eps
        assert told is not None
        assert config.embedding_factor == config.logits_factor == 1
        assert config.logits_cap is None
        if placement.parallel.size > 1:
            placement = replace(placement, parallel=TensorParallel(), store=_Named(placement.store))
            ends = self._own_ends(config, placement, ends.norm)
        own, plus = config_of_mtp(config), float(config.norm_plus_one)
        self.hidden_size = hidden
        self.backend, self.ops, self._residual = backend, placement.ops, config.residual_factor
        self._device, self._ends, self._rotary = placement.device, ends, rotary
        self.embedding_norm = RMSNorm(told.embedding_norm, hidden, eps, placement, plus)
        self.hidden_norm = RMSNorm(told.hidden_norm, hidden, eps, placement, plus)
        self.projection = Linear([(told.projection, hidden, 0, hidden)], 2 * hidden, False, placement)
        attention = Attention(0, own, rotary, placement, backend, max_model_len)
        self.block = Block(attention, own, placement)

    def _own_ends(self, config: ModelConfig, placement: Placement, norm: RMSNorm) -> Ends:
        sizes, tied = (config.vocab_size, config.hidden_size), config.tie_word_embeddings
        self.embedding = VocabParallelEmbedding(
            "model.embed_tokens", *sizes, placement, lookup=True, head=tied
        )
        self.head = self.embedding
        if not tied:
            self.head = VocabParallelEmbedding("lm_head", *sizes, placement, lookup=False, head=True)
        return Ends(self.embedding, norm, self.head)

    def __call__(
        self,
        tokens: npt.NDArray[np.int32],
        hidden: Tensor,
        step: AttentionStep,
        wanted: npt.NDArray[np.int64],
    ) -> tuple[Tensor, Tensor | None]:
        """Of positions of some rows: the tokens that follow them [T] and their hidden states before the last
        norm [T, hidden] → the same state of the layer, of those `wanted` [n, hidden], and logits [n, vocab];
        None if n is 0.  Writes the layer's KV of all."""
        self.backend.clear_opened(step)
        ends, ops = self._ends, self.ops
        embedded = ends.embedding.look_up(self._int64(tokens))
        pair = torch.cat((self._plain(self.embedding_norm, embedded), self._states(hidden)), dim=-1)
        x = ops.dequantize(self.projection.multiply(ops.quantize(pair, self.projection.form)))
        ops.add(x, self.block(x, None, self._context(step)), self._residual)
        chosen = x[self._int64(wanted)]
        return chosen, self._logits(chosen) if len(chosen) else None

    def _states(self, hidden: Tensor) -> Tensor:
        return self._plain(self.hidden_norm, self._plain(self._ends.norm, hidden))

    @staticmethod
    def _plain(norm: RMSNorm, x: Tensor) -> Tensor:
        found = norm(x, form=PLAIN)
        assert isinstance(found, Tensor)
        return found

    def _logits(self, x: Tensor) -> Tensor | None:
        return self._ends.head.logits(self._ends.norm(x, form=self._ends.head.form))

    def _context(self, step: AttentionStep) -> LayerContext:
        index, rotary = self._rotary
        rotary.reach(step.block_tables.shape[1] * self.backend.shape.block_size)
        plan = self.backend.prepare(step)
        if self.block.attention.rotates:
            return LayerContext({}, None, plan)
        positions = self._int64(step.positions())
        return LayerContext({index: rotary.at(positions)}, rotary.growth_at(positions), plan)

    def _int64(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self._device)
