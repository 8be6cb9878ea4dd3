"""What is put into the places of a class of transformers: packed products, and parameters in our memory.

Each is a `Layer` of ours, which the loader fills and an image keeps, and a module around it, which the class
calls.  Tensors have the names that they have in the class.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from baton.model.layers.layers import Layer, Matrix, VocabParallelEmbedding
from baton.model.layers.piece import Piece
from baton.model.layers.placement import Placement


class Kept(Layer):
    """A parameter or buffer that stays as the file has it, in the model's dtype."""

    def __init__(self, name: str, shape: tuple[int, ...], placement: Placement, beside: str = "") -> None:
        """`beside`: what its name ends with, if another layer is made of the same tensor."""
        super().__init__()
        self.kept = placement.parameter(name + beside, *(shape or (1,)))
        # (A single number is a row of one here.)
        self.pieces = [Piece(name, shape, "kept", transform=None if shape else _as_row)]

    def as_it_is(self) -> Tensor:
        """In the shape that the file has."""
        return self.kept.view(self.pieces[0].shape)


class WholeMatrix(Matrix):
    """Of one rank.  `turned`: the file has it as [in, out]."""

    def __init__(
        self, name: str, sizes: tuple[int, int], bias: bool, turned: bool, placement: Placement
    ) -> None:
        out_features, in_features = sizes
        super().__init__(name, out_features, in_features, bias, placement)
        shape = (in_features, out_features) if turned else (out_features, in_features)
        self.pieces = [Piece(f"{name}.weight", shape, "weight", transform=_turned if turned else None)]
        if bias:
            self.pieces.append(Piece(f"{name}.bias", (out_features,), "bias"))


def _as_row(number: Tensor) -> Tensor:
    return number.view(1)


def _turned(weight: Tensor) -> Tensor:
    return weight.t().contiguous()


class PackedLinear(nn.Module):
    """In the place of an `nn.Linear`, or of GPT-2's `Conv1D`."""

    def __init__(self, layer: WholeMatrix, placement: Placement) -> None:
        super().__init__()
        object.__setattr__(self, "_layer", layer)
        self._ops = placement.ops

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] → [..., out]"""
        layer: Any = self._layer
        rows = x.reshape(-1, x.shape[-1])
        found = layer.multiply(self._ops.quantize(rows, layer.form))
        return self._ops.dequantize(found).view(*x.shape[:-1], -1)


class PackedTable(nn.Module):
    """In the place of the `nn.Embedding` of tokens."""

    def __init__(self, layer: VocabParallelEmbedding) -> None:
        super().__init__()
        object.__setattr__(self, "_layer", layer)

    def forward(self, tokens: Tensor) -> Tensor:
        """[..., T] → [..., T, hidden]"""
        layer: Any = self._layer
        found: Tensor = layer.look_up(tokens.reshape(-1))
        return found.view(*tokens.shape, -1)


class PackedHead(nn.Module):
    """In the place of the output head."""

    def __init__(self, layer: VocabParallelEmbedding, bias: Kept | None, placement: Placement) -> None:
        super().__init__()
        object.__setattr__(self, "_layer", layer)
        object.__setattr__(self, "_bias", bias)
        self._ops = placement.ops

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] → [..., vocab] in float32"""
        layer: Any = self._layer
        rows = x.reshape(-1, x.shape[-1])
        found: Tensor = layer.logits(self._ops.quantize(rows, layer.form))
        bias: Any = self._bias
        if bias is not None:
            found = found + bias.kept
        return found.view(*x.shape[:-1], -1)


def in_our_memory(module: nn.Module, name: str, kept: Tensor) -> None:
    """`kept` takes the place of the parameter or buffer `name` of the module itself."""
    if name in module._parameters:
        module._parameters[name] = nn.Parameter(kept, requires_grad=False)
    else:
        module._buffers[name] = kept
