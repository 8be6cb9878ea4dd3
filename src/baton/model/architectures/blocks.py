"""What Llama and its kin are made of: attention, the MLP, and a block of both.

The residual stream x is one tensor for the whole step.  A sublayer's result y is not added at once: the next
norm takes (x, y), adds and normalizes in one pass (`fused.FusedOps.add_norm`).  Of a layer there remain four
products, two such norms, the SwiGLU, and what attention does: rotate and store, attend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.model.attention import AttentionBackend, CpuAttention
from baton.model.checkpoint.config import ModelConfig
from baton.model.cpu.kernels import HeadNorms
from baton.model.layers.layers import Linear, Module, RMSNorm, RowParallelLinear, column_parallel
from baton.model.layers.placement import Placement
from baton.model.layers.rotary import Rotary, rotate
from baton.model.ops.fused import Activations, Result


@dataclass(frozen=True)
class LayerContext:
    """What the layers of one step share."""

    rotary: Rotary
    turns: tuple[Tensor, Tensor] | None
    """cos and sin of the step's positions; None where the attention backend rotates by itself."""
    plan: Any
    """The attention backend's."""


class Attention(Module):
    def __init__(
        self,
        name: str,
        layer: int,
        config: ModelConfig,
        placement: Placement,
        backend: AttentionBackend,
        max_model_len: int,
    ) -> None:
        rank, size = placement.parallel.rank, placement.parallel.size
        self.layer = layer
        self.window = config.window_of(layer, max_model_len)
        self.backend = backend
        self.ops = placement.ops
        self.head_dim = config.head_dim
        self.head_norms: HeadNorms | None = None
        self.num_heads = config.num_attention_heads // size
        first_kv, stop_kv = config.kv_heads_of_rank(rank, size)
        self.num_kv_heads = stop_kv - first_kv
        dim = config.head_dim
        queries = config.num_attention_heads * dim
        keys = config.num_kv_heads * dim
        share = self.num_heads * dim
        parts = [
            (f"{name}.q_proj", queries, rank * share, (rank + 1) * share),
            (f"{name}.k_proj", keys, first_kv * dim, stop_kv * dim),
            (f"{name}.v_proj", keys, first_kv * dim, stop_kv * dim),
        ]
        self.qkv = self.make_qkv(name, parts, config, placement)
        self.output = RowParallelLinear(
            f"{name}.o_proj", queries, config.hidden_size, config.output_bias, placement
        )

    def make_qkv(
        self, name: str, parts: list[tuple[str, int, int, int]], config: ModelConfig, placement: Placement
    ) -> Linear:
        return Linear(parts, config.hidden_size, config.qkv_bias, placement)

    def __call__(self, x: Activations, context: LayerContext) -> Result:
        qkv = self.ops.dequantize(self.qkv.multiply(x))
        if isinstance(self.backend, CpuAttention):
            rotary = context.rotary
            queries = self.backend.rotate_and_write(
                self.layer, qkv, rotary.cos, rotary.sin, self.head_norms, context.plan
            )
        else:
            queries = self._rotate_and_write(qkv, context)
        mixed = self.backend.attend(self.layer, queries, self.window, context.plan)
        return self.output.multiply(self.ops.quantize(mixed, self.output.form))

    def _rotate_and_write(self, qkv: Tensor, context: LayerContext) -> Tensor:
        """[T, out of qkv] → queries [T, heads, head_dim], for a backend that does not rotate."""
        assert context.turns is not None
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        split = self.num_heads + self.num_kv_heads
        turning = heads[:, :split]
        if self.head_norms is not None:
            queries, keys = turning[:, : self.num_heads], turning[:, self.num_heads :]
            norms, size = self.head_norms, (self.head_dim,)
            turning = torch.cat(
                (
                    F.rms_norm(queries, size, norms.queries, norms.eps),
                    F.rms_norm(keys, size, norms.keys, norms.eps),
                ),
                dim=1,
            )
        rotated = rotate(turning, *context.turns)
        self.backend.write_kv(self.layer, rotated[:, self.num_heads :], heads[:, split:], context.plan)
        return rotated[:, : self.num_heads]


class MLP(Module):
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, name: str, config: ModelConfig, placement: Placement) -> None:
        self.ops = placement.ops
        self.gate_up = column_parallel(
            [f"{name}.gate_proj", f"{name}.up_proj"],
            config.intermediate_size,
            config.hidden_size,
            config.mlp_bias,
            placement,
        )
        self.down = RowParallelLinear(
            f"{name}.down_proj", config.intermediate_size, config.hidden_size, config.mlp_bias, placement
        )

    def __call__(self, x: Activations) -> Result:
        return self.down.multiply(self.ops.silu_mul(self.gate_up.multiply(x), self.down.form))


class Block(Module):
    def __init__(self, name: str, attention: Attention, config: ModelConfig, placement: Placement) -> None:
        size, eps = config.hidden_size, config.norm_eps
        self.attention_norm = RMSNorm(f"{name}.input_layernorm", size, eps, placement)
        self.attention = attention
        self.mlp_norm = RMSNorm(f"{name}.post_attention_layernorm", size, eps, placement)
        self.mlp = MLP(f"{name}.mlp", config, placement)

    def __call__(self, x: Tensor, y: Result | None, context: LayerContext) -> Result:
        """Adds y, and all of this block's result but its last term, to x, in place; returns that term."""
        mixed = self.attention(self.attention_norm(x, y, self.attention.qkv.form), context)
        return self.mlp(self.mlp_norm(x, mixed, self.mlp.gate_up.form))
