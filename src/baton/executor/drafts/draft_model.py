"""A draft model on rank 0: its weights, its pool, and steps of it (`drafting/models/model_drafter.py`).

It is whole on rank 0, also under tensor parallelism: it is small, and a draft step shared among ranks would
wait twice a layer for the others.  They wait for rank 0's tokens as in any step.  Its weights are those of
its checkpoint, in an image that other workers of the host share, like the serving model's; its KV is in its
own dtype, in a pool with a block for each of the serving model's.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from baton.drafting.base import Drafter
from baton.drafting.making import make_model_drafter
from baton.drafting.models.draft_kv import blocks_ahead
from baton.executor.base import Int32Array
from baton.executor.checks import gives_numbers
from baton.executor.devices.kernels import kernels_of, ops_of
from baton.executor.devices.sizes import attention_shape
from baton.executor.kv_pool import KvPool
from baton.executor.weights.forms import ExecutorError, groups_of, weights_form
from baton.executor.weights.images import WeightMemory, open_weights
from baton.model.attention import AttentionStep, attention_backend
from baton.model.checkpoint.config import ModelConfig
from baton.model.checkpoint.files import LoadError
from baton.model.decoder.decoder import Decoder
from baton.model.layers.parallel import TensorParallel
from baton.model.layers.placement import Placement
from baton.model.loader import load_model
from baton.protocol.config import InstanceConfig

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Needs(NamedTuple):
    """Memory of a draft model's pool."""

    of_block: int = 0
    """Bytes beside each block of the serving model."""
    fixed: int = 0


class LoadedDraftModel:
    """A `drafting.models.model_drafter.DraftModel`.  `make_pool` comes before the first `compute`."""

    def __init__(self, config: InstanceConfig, model: Decoder, memory: WeightMemory, ahead: int) -> None:
        self._model = model
        self._memory = memory
        self._ahead = ahead
        """Blocks for drafts that go beyond the known ones."""
        self._blocks = 0
        self._pool: KvPool | None = None
        self._directory, self._dtype = config.model, config.dtype
        self.max_len = config.max_model_len

    @property
    def needs(self) -> Needs:
        block = self._model.backend.block_bytes
        return Needs(block, self._ahead * block)

    @property
    def told(self) -> str:
        """For the banner."""
        assert self._pool is not None
        kv = self._pool.num_blocks * self._pool.block_bytes
        weights = self._model.weight_bytes() / 1e6
        return f"draft model {self._directory} in {self._dtype}, {weights:.0f} MB, KV {kv / 1e6:.0f} MB"

    def make_pool(self, num_blocks: int) -> None:
        """A block for each of the serving model's, and those for drafts behind them.  Not in inference mode.

        Raises `LoadError` if the weights give no numbers."""
        backend = self._model.backend
        shape, device = backend.shape, backend.shape.device
        sizes = shape.num_layers, shape.num_kv_heads, backend.tile_shape
        self._blocks = num_blocks
        self._pool = KvPool(num_blocks + self._ahead, *sizes, backend.pool_dtype, device)
        backend.bind(self._pool.tensor)
        with torch.inference_mode():
            if not gives_numbers(self._model, self._model.config.vocab_size, np.zeros((1, 1), np.int32)):
                raise LoadError(
                    f"{self._directory!r}: the draft model gives NaN or infinity in {self._dtype}; "
                    "its weights are damaged, or too large for it"
                )
            self._pool.tensor[0].zero_()

    def drafter(self, config: InstanceConfig) -> Drafter:
        """Of the instance, once the pool is there."""
        assert config.speculation is not None
        return make_model_drafter(
            config.speculation,
            self,
            max_num_seqs=config.max_num_seqs,
            num_blocks=self._blocks,
            block_size=config.block_size,
            max_model_len=config.max_model_len,
        )

    def compute(
        self, tokens: Int32Array, starts: Int32Array, counts: Int32Array, tables: Int32Array, wanted: bool
    ) -> Int32Array:
        assert self._pool is not None
        self._pool.use(tables[tables < self._blocks])
        if self._model.is_program:
            logits = self._run(tokens, starts, counts, tables, wanted)
        else:
            with torch.inference_mode():
                logits = self._run(tokens, starts, counts, tables, wanted)
        if not wanted or logits is None:
            return np.empty(0, np.int32)
        found: Int32Array = logits.argmax(dim=-1).to(torch.int32).cpu().numpy()
        return found

    def close(self) -> None:
        if self._pool is not None:
            tensor = self._pool.tensor
            self._model.backend.bind(torch.empty((0, *tensor.shape[1:]), dtype=tensor.dtype))
            del tensor
            self._pool.close()
            self._pool = None
        self._memory.release()

    def _run(
        self, tokens: Int32Array, starts: Int32Array, counts: Int32Array, tables: Int32Array, wanted: bool
    ) -> Tensor | None:
        ends = np.cumsum(counts, dtype=np.int64) - 1
        step = AttentionStep(starts, counts, tables, int((counts == 1).sum()))
        return self._model(tokens, step, ends if wanted else ends[:0], None, False)[1]


def load_draft_model(
    config: InstanceConfig, serving: ModelConfig, device: torch.device
) -> LoadedDraftModel | None:
    """What the instance's rank 0 drafts with; None if it has no draft model.

    Raises `ExecutorError`, `UnsupportedModel`, `ModelNotFound` or `LoadError`, each of one line.
    """
    wanted = config.speculation
    if wanted is None or wanted.method != "draft":
        return None
    model = ModelConfig.from_directory(wanted.model, config.model_impl)
    reason = why_no_draft_model(model, serving.vocab_size)
    if reason:
        raise ExecutorError(f"speculative_config: draft model {wanted.model!r} {reason}")
    own = msgspec.structs.replace(
        config,
        model=wanted.model,
        dtype=wanted.dtype or config.dtype,
        max_model_len=min(config.max_model_len, model.max_context),
        tensor_parallel_size=1,
        quantization=None,
        quantization_group_size=None,
        quantize_head=16,
        kv_cache_dtype=None,
        speculation=None,
    )
    dtype = DTYPES[own.dtype]
    with torch.inference_mode():
        backend = attention_backend(attention_shape(own, model, 0, dtype, device))
        weights = weights_form(own, dtype, device)
        longest = max(model.hidden_size, model.intermediate_size)
        ops = ops_of(dtype, device, longest)
        groups = groups_of(own, model, device)
        memory = open_weights(own, Path(own.model), 0, weights, groups)
        try:
            kernels, store = kernels_of(own, device), memory.store
            placement = Placement(
                TensorParallel(), dtype, device, weights, ops, **groups, store=store, kernels=kernels
            )
            loaded = load_model(
                Path(own.model), model, placement, backend, own.max_model_len, memory.progress
            )
            memory.done()
        except BaseException:
            memory.release()
            raise
    assert isinstance(loaded, Decoder)
    ahead = blocks_ahead(config.max_num_seqs, wanted.num_speculative_tokens, config.block_size)
    return LoadedDraftModel(own, loaded, memory, ahead)


def why_no_draft_model(model: ModelConfig, vocab_size: int) -> str:
    """Why this model cannot draft for one with so many tokens, or ""."""
    if model.implementation != "baton":
        return f"is {model.architecture}, which transformers would compute; give one of Baton's own families"
    if model.labels:
        return "has a head of scores, and none of tokens; give one that generates text"
    if model.vocab_size != vocab_size:
        return (
            f"has {model.vocab_size} tokens, the model {vocab_size}: their vocabularies must be the same; "
            "give a smaller model of the same family"
        )
    return ""
