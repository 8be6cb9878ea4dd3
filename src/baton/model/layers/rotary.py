"""Rotary position embedding (RoPE): the angles, with the scalings that extend a model's context.

Theory.  RoPE turns each pair of elements (i, i + head_dim/2) of a query or key head by the angle
`position * frequency[i]`, so that a dot product of a query and a key depends on the distance between them.
`frequency[i] = theta ** (-2i / head_dim)`.  A scaled model was trained on with other frequencies:

* linear: all divided by `factor`;
* llama3: those of long wavelength divided by `factor`, short ones kept, a linear blend between;
* yarn (arXiv 2309.00071): the same idea with the borders counted in rotations over the original context,
  and cos and sin multiplied by an attention factor;
* longrope (arXiv 2402.13753): each divided by a number of its own, from one list for contexts that fit what
  the model was first trained on, from another one for longer ones, and cos and sin multiplied by an attention
  factor.  Keys that are kept cannot turn with the context that comes after them, so the longest context that
  is served says which list it is;
* factors: each divided by a number of its own (how GGUF files have llama3's);
* dynamic: equal to default as long as a context fits `max_position_embeddings`, which Baton enforces.

Heads whose pairs are (2i, 2i+1) instead (ERNIE-4.5), or of which only a part is rotated, are reordered when
their weights are loaded (`weights.rows.in_halves`); a dot product does not notice that queries and keys are
permuted alike.  Elements that are not rotated are turned by an angle of 0, and so are all of a layer that has
no positions: nothing behind this file knows the difference.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from baton.model.description.model import QueryGrowth, RopeConfig


def rope_frequencies(rope: RopeConfig, head_dim: int, longest: int = 0) -> tuple[Tensor, float]:
    """([head_dim / 2] float32 frequencies in radians per position, factor of cos and sin).

    `head_dim`: elements that are rotated.  `longest`: context that is served, in tokens.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    base = 1.0 / (rope.theta**exponents)
    if rope.type == "longrope":
        return _longrope(base, rope, longest)
    if rope.type == "linear":
        return base / float(rope.parameters["factor"]), 1.0
    if rope.type == "factors":
        return base / torch.tensor(rope.parameters["factors"], dtype=torch.float32), 1.0
    if rope.type == "llama3":
        return _llama3(base, rope), 1.0
    if rope.type == "yarn":
        return _yarn(base, rope, head_dim)
    return base, 1.0


def _llama3(base: Tensor, rope: RopeConfig) -> Tensor:
    p = rope.parameters
    factor, low, high = float(p["factor"]), float(p["low_freq_factor"]), float(p["high_freq_factor"])
    original = float(p["original_max_position_embeddings"])
    wavelengths = 2 * math.pi / base
    # 0 where a wave turns fewer than `low` times in the original context, 1 where more than `high` times.
    kept = ((original / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * base / factor + kept * base


def _longrope(base: Tensor, rope: RopeConfig, longest: int) -> tuple[Tensor, float]:
    p = rope.parameters
    original, factor = int(p["original_max_position_embeddings"]), float(p["factor"])
    attention_factor = p.get("attention_factor")
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    factors = p[f"{rope.set_of(longest)}_factor"]
    return base / torch.tensor(factors, dtype=torch.float32), float(attention_factor)


def _yarn(base: Tensor, rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    p = rope.parameters
    factor, original = float(p["factor"]), float(p["original_max_position_embeddings"])

    def index_of(rotations: float) -> float:
        """The (fractional) pair index that turns so many times in the original context."""
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = index_of(float(p.get("beta_fast") or 32)), index_of(float(p.get("beta_slow") or 1))
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    frequencies = stretched * base / factor + (1 - stretched) * base

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention_factor = p.get("attention_factor")
    if attention_factor is None:
        if p.get("mscale") and p.get("mscale_all_dim"):
            attention_factor = magnitude(float(p["mscale"])) / magnitude(float(p["mscale_all_dim"]))
        else:
            attention_factor = magnitude(1.0)
    return frequencies, float(attention_factor)


_POSITIONS_AT_A_TIME = 4096


class Rotary:
    """cos and sin of the positions that have been reached, [positions, head_dim / 2] float32.

    A long context that nobody uses costs nothing: 1 M positions of 128 elements would be 512 MB.
    """

    cos: Tensor
    sin: Tensor

    growth: Tensor | None
    """[positions] float32 by which queries are multiplied; None: by nothing."""

    def __init__(
        self,
        rope: RopeConfig | None,
        head_dim: int,
        max_positions: int,
        device: torch.device,
        growth: QueryGrowth | None = None,
    ) -> None:
        """`rope` None: nothing is turned."""
        rotated = 0 if rope is None else rope.rotated(head_dim)
        self._frequencies = torch.zeros(head_dim // 2)
        self._factors = torch.ones(head_dim // 2)
        if rope is not None:
            self._frequencies[: rotated // 2], self._factors[: rotated // 2] = rope_frequencies(
                rope, rotated, max_positions
            )
        self._max_positions = max_positions
        self._growth = growth
        self.growth = None if growth is None else torch.empty(0, device=device)
        self.cos = self.sin = torch.empty(0, head_dim // 2, device=device)
        self.reach(1)

    def reach(self, positions: int) -> None:
        """Makes room for that many positions, or for as many as may be served if they are fewer.

        Always the same positions at a time, so that values do not depend on when they are computed.
        """
        have = len(self.cos)
        wanted = min(positions, self._max_positions)
        if wanted <= have:
            return
        stop = min(max(wanted, 2 * have), self._max_positions)
        cos, sin = [self.cos], [self.sin]
        for first in range(have, stop, _POSITIONS_AT_A_TIME):
            turns = torch.arange(first, first + _POSITIONS_AT_A_TIME, dtype=torch.float32)
            angles = torch.outer(turns, self._frequencies)
            cos.append((angles.cos() * self._factors).to(self.cos.device))
            sin.append((angles.sin() * self._factors).to(self.sin.device))
        self.cos, self.sin = torch.cat(cos), torch.cat(sin)
        if self._growth is not None:
            laps = torch.arange(len(self.cos), dtype=torch.float32) // self._growth.original
            self.growth = (1 + self._growth.beta * torch.log(1 + laps)).to(self.cos.device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[T] positions → (cos, sin), each [T, 1, head_dim / 2] float32."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)

    def growth_at(self, positions: Tensor) -> Tensor | None:
        """[T] positions → [T, 1, 1] float32 by which queries are multiplied; None: by nothing."""
        return None if self.growth is None else self.growth[positions].view(-1, 1, 1)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates [T, n, head_dim] heads, in float32; returns their own dtype.

    Halves a, b of a head become (a cos - b sin, b cos + a sin).
    """
    a, b = heads.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(heads.dtype)
