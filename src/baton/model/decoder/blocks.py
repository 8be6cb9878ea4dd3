"""What a decoder is made of: attention, and a block of it and an MLP (`mixture`), as its layer is described.

The residual stream x is one tensor for the whole step.  A sublayer's result y is not added at once: the next
norm takes (x, y), adds and normalizes in one pass (`fused.FusedOps.add_norm`).  Of a layer there remain four
products, two such norms, the gate, and what attention does: rotate and store, attend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from baton.model.attention import AttentionBackend
from baton.model.checkpoint.config import ModelConfig
from baton.model.cpu.kernels import HeadNorms
from baton.model.decoder.mixture import MLP, Mixture, MlpNames
from baton.model.description.model import LayerConfig, MlpConfig
from baton.model.layers.layers import Layer, Linear, Module, RMSNorm, RowParallelLinear
from baton.model.layers.piece import Piece
from baton.model.layers.placement import Placement
from baton.model.layers.rotary import Rotary, rotate
from baton.model.ops.fused import Activations, Form, Result
from baton.model.weights.rows import in_halves

_FINER = frozenset({2})
"""Of q, k and v: errors of v's rows are not weighed by a softmax, they are in the result as they are."""


@dataclass(frozen=True)
class LayerContext:
    """What the layers of one step share."""

    turns: dict[int, tuple[Tensor, Tensor]]
    """cos and sin of the step's positions by rotary; none where the attention backend rotates by itself."""
    growth: Tensor | None
    """[T, 1, 1] by which queries are multiplied; likewise."""
    plan: Any
    """The attention backend's."""
    present: Tensor | None = None
    """int64 [T], below 0 for rows that are padding; None: there are none."""


class QueryKeyNorms(Layer):
    """Weights of the norms of q and k: [head_dim] for each head, or [heads * head_dim] for all together."""

    def __init__(
        self,
        names: tuple[str, str],
        spans: tuple[tuple[int, int, int], tuple[int, int, int]],
        order: Callable[[Tensor], Tensor] | None,
        placement: Placement,
    ) -> None:
        """`spans`: whole size, first and last + 1 element of this rank, of queries and of keys.  `order`: of
        the elements of heads, as the rows of q and k have it."""
        super().__init__()
        (_, first, stop), (_, first_key, stop_key) = spans
        self.queries = placement.parameter(f"{names[0]}.weight", stop - first)
        self.keys = placement.parameter(f"{names[1]}.weight", stop_key - first_key)
        for name, parameter, (size, start, end) in zip(names, ("queries", "keys"), spans, strict=True):
            self.pieces.append(Piece(f"{name}.weight", (size,), parameter, 0, 0, start, end, order))


class Sinks(Layer):
    """A score for each head of this rank, float32: see `AttentionConfig.sinks`."""

    def __init__(self, name: str, whole: int, first: int, stop: int, placement: Placement) -> None:
        """`whole`: heads of the model."""
        super().__init__()
        self.scores = placement.store.make(name, (stop - first,), torch.float32, placement.device)
        self.pieces = [Piece(name, (whole,), "scores", 0, 0, first, stop)]


class Attention(Module):
    """Of one layer."""

    def __init__(
        self,
        number: int,
        config: ModelConfig,
        rotary: tuple[int, Rotary],
        placement: Placement,
        backend: AttentionBackend,
        max_model_len: int,
    ) -> None:
        """`rotary`: which of the model's, and itself."""
        self.config = told = config.layers[number].attention
        name, names = f"{config.names.layers}.{number}.", config.names
        parallel = self.parallel = placement.parallel
        rank, size, dim = parallel.rank, parallel.size, told.head_dim
        self.layer, self.backend, self.ops = number, backend, placement.ops
        self.window = config.window_of(number, max_model_len)
        self.rotary_index, self.rotary = rotary
        self.norm_plus, self.norm_eps = float(config.norm_plus_one), config.norm_eps
        self.num_heads = told.heads // size
        first_kv, stop_kv = config.kv_heads_of_rank(rank, size)
        self.num_kv_heads = stop_kv - first_kv
        queries, keys, share = told.heads * dim, told.kv_heads * dim, self.num_heads * dim
        mine, mine_kv = (rank * share, (rank + 1) * share), (first_kv * dim, stop_kv * dim)
        if names.qkv:
            whole, fused = queries + 2 * keys, name + names.qkv
            begins = zip((0, queries, queries + keys), (mine, mine_kv, mine_kv), strict=True)
            parts = [(fused, whole, begin + start, begin + stop) for begin, (start, stop) in begins]
        else:
            parts = [
                (name + names.queries, queries, *mine),
                (name + names.keys, keys, *mine_kv),
                (name + names.values, keys, *mine_kv),
            ]
        rope = told.rope
        order = None
        if rope is not None and (rope.neighbours or rope.rotated(dim) < dim):
            order = partial(in_halves, head_dim=dim, rotated=rope.rotated(dim), neighbours=rope.neighbours)
        self.qkv = Linear(parts, config.hidden_size, told.qkv_bias, placement, [order, order, None], _FINER)
        self.output = RowParallelLinear(
            name + names.output, queries, config.hidden_size, told.output_bias, placement
        )
        self.sinks: Sinks | None = None
        if told.sinks:
            first = rank * self.num_heads
            self.sinks = Sinks(name + names.sinks, told.heads, first, first + self.num_heads, placement)
        self.head_norms: HeadNorms | None = None
        self.wide_norms: QueryKeyNorms | None = None
        if told.qk_norm:
            wide = told.qk_norm == "wide"
            spans = ((queries, *mine), (keys, *mine_kv)) if wide else ((dim, 0, dim), (dim, 0, dim))
            called = name + names.query_norm, name + names.key_norm
            weights = self.norm_weights = QueryKeyNorms(called, spans, order, placement)
            if wide:
                self.wide_norms = weights
            else:
                self.head_norms = HeadNorms(weights.queries, weights.keys, self.norm_eps, self.norm_plus)
        self.rotates = backend.turns(self.head_norms, told.growth is not None)
        """Whether the backend rotates by itself."""

    def __call__(self, x: Activations, context: LayerContext) -> Result:
        qkv = self.ops.dequantize(self.qkv.multiply(x))
        if self.wide_norms is not None:
            self._normalize(qkv, self.wide_norms)
        if self.rotates:
            rotary = self.rotary
            queries = self.backend.rotate_and_write(
                self.layer, qkv, rotary.cos, rotary.sin, rotary.growth, self.head_norms, context.plan
            )
        else:
            queries = self._rotate_and_write(qkv, context)
        sinks = None if self.sinks is None else self.sinks.scores
        mixed = self.backend.attend(self.layer, queries, self.window, context.plan, sinks)
        return self.output.multiply(self.ops.quantize(mixed, self.output.form))

    def _normalize(self, qkv: Tensor, norms: QueryKeyNorms) -> None:
        """All query heads together, and all key heads, in place."""
        dim = self.config.head_dim
        queries, keys = self.num_heads * dim, self.num_kv_heads * dim
        parts = (
            (qkv[:, :queries], norms.queries, self.config.heads * dim),
            (qkv[:, queries : queries + keys], norms.keys, self.config.kv_heads * dim),
        )
        if self.parallel.size == 1:
            for part, weight, _ in parts:
                self.ops.normalize(part, weight, self.norm_eps, self.norm_plus)
            return
        sums = torch.stack([part.float().square().sum(1) for part, _, _ in parts])
        if self.parallel.size > self.config.kv_heads:  # ranks that share a key head count it once each
            sums[1] /= self.parallel.size // self.config.kv_heads
        sums = self.parallel.all_reduce(sums)
        for (part, weight, size), total in zip(parts, sums, strict=True):
            inverse = torch.rsqrt(total / size + self.norm_eps).unsqueeze(1)
            part.copy_(part.float() * inverse * (weight.float() + self.norm_plus))

    def _rotate_and_write(self, qkv: Tensor, context: LayerContext) -> Tensor:
        """[T, out of qkv] → queries [T, heads, head_dim], for a backend that does not rotate."""
        heads = qkv.view(qkv.shape[0], -1, self.config.head_dim)
        split = self.num_heads + self.num_kv_heads
        turning = heads[:, :split]
        if self.head_norms is not None:
            turning = self.head_norms.of(turning, self.num_heads)
        rotated = rotate(turning, *context.turns[self.rotary_index])
        self.backend.write_kv(self.layer, rotated[:, self.num_heads :], heads[:, split:], context.plan)
        queries = rotated[:, : self.num_heads]
        return queries if context.growth is None else (queries * context.growth).to(queries.dtype)


class Block(Module):
    """Attention and MLP of one layer, with the norms that it has."""

    def __init__(self, attention: Attention, config: ModelConfig, placement: Placement) -> None:
        number = attention.layer
        told: LayerConfig = config.layers[number]
        names, self.ops, self.residual = config.names, placement.ops, config.residual_factor

        def norm(there: bool, name: str) -> RMSNorm | None:
            if not there:
                return None
            whole = f"{names.layers}.{number}.{name}"
            plus = float(config.norm_plus_one)
            return RMSNorm(whole, config.hidden_size, config.norm_eps, placement, plus)

        self.attention_norm = norm(told.norms.inputs, names.attention_input_norm)
        self.attention = attention
        self.attention_result_norm = norm(told.norms.results, names.attention_result_norm)
        self.mlp_norm = norm(told.norms.inputs, names.mlp_input_norm)
        self.mlp: MLP | Mixture = (
            MLP(MlpNames.of_layer(number, names), told.mlp, config.hidden_size, placement)
            if isinstance(told.mlp, MlpConfig)
            else Mixture(number, told.mlp, config, placement)
        )
        self.mlp_result_norm = norm(told.norms.results, names.mlp_result_norm)

    def __call__(self, x: Tensor, y: Result | None, context: LayerContext) -> Result:
        """Adds y, and all of this block's result but its last term, to x, in place; returns that term."""
        attention, mlp = self.attention, self.mlp
        mixed = attention(self._input(x, y, self.attention_norm, attention.qkv.form), context)
        mixed = self._normalized(mixed, self.attention_result_norm)
        taken = self._input(x, mixed, self.mlp_norm, mlp.form)
        found = mlp(taken) if isinstance(mlp, MLP) else mlp(taken, context.present)
        return self._normalized(found, self.mlp_result_norm)

    def _input(self, x: Tensor, y: Result | None, norm: RMSNorm | None, form: Form) -> Activations:
        if norm is not None:
            return norm(x, y, form, self.residual)
        return self.ops.add_norm(x, y, None, 0.0, form, factor=self.residual)

    def _normalized(self, y: Result, norm: RMSNorm | None) -> Result:
        if norm is None:
            return y
        found = self.ops.dequantize(y)
        self.ops.normalize(found, norm.weight, norm.eps, norm.plus)
        return found
