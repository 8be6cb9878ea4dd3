"""The model's own MTP layer on rank 0: its pool, and steps of it (`drafting/models/mtp_drafter.py`).

Its weights are part of the model's (`model/decoder/mtp.py`): they lie in the same image and change with them.
Its KV is in the model's dtype, in a pool with a block for each of the model's.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from baton.drafting.base import Drafter
from baton.drafting.making import make_mtp_drafter
from baton.drafting.models.draft_kv import blocks_ahead
from baton.drafting.models.mtp_drafter import MtpDrafter
from baton.executor.base import Int32Array, Int64Array
from baton.executor.devices.sizes import attention_shape
from baton.executor.drafts.draft_model import DTYPES, Needs
from baton.executor.kv_pool import KvPool
from baton.executor.weights.forms import ExecutorError
from baton.model.attention import AttentionStep, attention_backend
from baton.model.checkpoint.config import ModelConfig
from baton.model.checkpoint.files import LoadError
from baton.model.decoder.decoder import Decoder
from baton.model.decoder.mtp import Mtp, config_of_mtp
from baton.model.loader import AnyDecoder, is_finite
from baton.protocol.config import InstanceConfig


class MtpLayer:
    """A `drafting.models.mtp_drafter.MtpModel`.  `follow` and `make_pool` come before the first `compute`."""

    def __init__(self, config: InstanceConfig, model: ModelConfig, device: torch.device) -> None:
        wanted = config.speculation
        assert wanted is not None
        whole = msgspec.structs.replace(config, tensor_parallel_size=1, kv_cache_dtype=None)
        shape = attention_shape(whole, config_of_mtp(model), 0, DTYPES[config.dtype], device)
        self.backend = attention_backend(shape)
        self.max_len = config.max_model_len
        self._ahead = blocks_ahead(config.max_num_seqs, wanted.num_speculative_tokens, config.block_size)
        self._mtp: Mtp | None = None
        self._drafter: MtpDrafter | None = None
        self._blocks = 0
        self._pool: KvPool | None = None

    def follow(self, model: AnyDecoder) -> None:
        """From now on this model is the one that runs, with these weights.  No slot is taken."""
        assert isinstance(model, Decoder)
        assert model.mtp is not None
        self._mtp = model.mtp
        if self._drafter is not None:
            self._drafter.weights_changed()

    @property
    def needs(self) -> Needs:
        block = self.backend.block_bytes
        return Needs(block, self._ahead * block)

    @property
    def told(self) -> str:
        """For the banner."""
        assert self._pool is not None
        return f"MTP layer, KV {self._pool.num_blocks * self._pool.block_bytes / 1e6:.0f} MB"

    def make_pool(self, num_blocks: int) -> None:
        """A block for each of the model's, and those for drafts behind them.  Not in inference mode.

        Raises `LoadError` if the weights give no numbers."""
        assert self._mtp is not None
        shape = self.backend.shape
        sizes = shape.num_layers, shape.num_kv_heads, self.backend.tile_shape
        self._blocks = num_blocks
        self._pool = KvPool(num_blocks + self._ahead, *sizes, self.backend.pool_dtype, shape.device)
        self.backend.bind(self._pool.tensor)
        count = min(shape.block_size, 4)
        step = AttentionStep(
            np.zeros(1, np.int32), np.array([count], np.int32), np.zeros((1, 1), np.int32), 0
        )
        with torch.inference_mode():
            hidden = torch.ones((count, self._mtp.hidden_size), dtype=shape.dtype, device=shape.device)
            _, logits = self._mtp(np.arange(count, dtype=np.int32), hidden, step, np.arange(count))
            if logits is None or not is_finite(logits):
                raise LoadError("the MTP layer gives NaN or infinity; its weights are damaged")
            self._pool.tensor[0].zero_()

    def drafter(self, config: InstanceConfig) -> Drafter:
        """Of the instance, once the pool is there."""
        assert config.speculation is not None
        self._drafter = make_mtp_drafter(
            config.speculation,
            self,
            max_num_seqs=config.max_num_seqs,
            num_blocks=self._blocks,
            block_size=config.block_size,
            max_model_len=config.max_model_len,
        )
        return self._drafter

    def keep(self, states: Tensor) -> Tensor:
        return states.clone()

    def compute(
        self,
        tokens: Int32Array,
        states: Sequence[Tensor],
        starts: Int32Array,
        counts: Int32Array,
        tables: Int32Array,
        wanted: Int64Array,
    ) -> tuple[Int32Array, Tensor]:
        assert self._pool is not None
        assert self._mtp is not None
        self._pool.use(tables[tables < self._blocks])
        step = AttentionStep(starts, counts, tables, int((counts == 1).sum()))
        ends = np.cumsum(counts, dtype=np.int64) - 1
        with torch.inference_mode():
            hidden = states[0] if len(states) == 1 else torch.cat(list(states))
            found, logits = self._mtp(tokens, hidden, step, ends[wanted])
            if logits is None:
                return np.empty(0, np.int32), found
            drafts: Int32Array = logits.argmax(dim=-1).to(torch.int32).cpu().numpy()
        return drafts, found

    def close(self) -> None:
        if self._pool is not None:
            tensor = self._pool.tensor
            self.backend.bind(torch.empty((0, *tensor.shape[1:]), dtype=tensor.dtype))
            del tensor
            self._pool.close()
            self._pool = None


def mtp_layer_of(
    config: InstanceConfig, model: ModelConfig, rank: int, device: torch.device
) -> MtpLayer | None:
    """What the instance's rank 0 drafts with, before the model is loaded; None if it does not.

    Raises `ExecutorError` on each rank if the model has no such layer.
    """
    if config.speculation is None or config.speculation.method != "mtp":
        return None
    if model.mtp is None:
        raise ExecutorError(f"speculative_config: {model.why_no_mtp(config.model)}")
    return MtpLayer(config, model, device) if rank == 0 else None


def longest_row(config: InstanceConfig, model: ModelConfig) -> int:
    """Elements of what a product takes, at most."""
    longest = max(model.hidden_size, model.intermediate_size)
    if model.mtp is None or config.speculation is None or config.speculation.method != "mtp":
        return longest
    return max(longest, 2 * model.hidden_size, config_of_mtp(model).intermediate_size)
