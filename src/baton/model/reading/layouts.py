"""From a module's tensors in a file's layout to a `Grouped`.

Theory.  Codes of 4 or 8 bits lie in 32-bit words, the first in the lowest bits:

* compressed-tensors `pack-quantized`: `weight_packed` [out, in / n] along the inputs, value + 2^(bits - 1);
  `weight_scale` [out, groups]; `weight_zero_point` packed likewise along the outputs; `weight_shape`;
  `weight_g_idx` [in], the group of each input, where these were sorted.  `int-quantized`: `weight` int8.
* AWQ (gemm): `qweight` [in, out / 8] along the outputs, of which eight stand as 0, 2, 4, 6, 1, 3, 5, 7;
  `qzeros` [groups, out / 8] likewise, `scales` [groups, out]; w = (code - zero) * scale.
* MXFP4: `blocks` [out, in / 32, 16], bytes of two numbers, the first in the lower half: a bit for the sign,
  then which of 0, .5, 1, 1.5, 2, 3, 4, 6; `scales` [out, in / 32], bytes s: 2^(s - 127).
* GPTQ: `qweight` [in / n, out] along the inputs; `qzeros` [groups, out / n], in its first version less one;
  `scales` [groups, out]; `g_idx` [in].

n is 32 / bits.  Inputs that were sorted come out as an `order`: the columns of each group side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.model.checkpoint.quantization import Layout, Scheme
from baton.model.weights.grouped import MIDDLE, Grouped, spread
from baton.model.weights.quantize import group_for

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Of outputs 0, 1, 2, … in a word of AWQ's."""


class LayoutError(ValueError):
    """Tensors that do not fit the scheme.  One line that names the tensor, without the module."""


@dataclass(frozen=True)
class Expected:
    """A tensor of a module."""

    shapes: tuple[tuple[int, ...], ...]
    """Any of these"""
    kinds: tuple[str, ...] = ("BF16", "F16", "F32")
    """As safetensors names them"""
    needed: bool = True


def expected(scheme: Scheme, shape: tuple[int, int]) -> dict[str, Expected]:
    """The tensors of a module with a weight [out, in], by the last parts of their names.

    Raises `LayoutError` if such a weight is not served.
    """
    out_features, in_features = shape
    if scheme.group is not None and in_features % scheme.group:
        raise LayoutError(f"{in_features} inputs are no multiple of the group of {scheme.group}")
    if not group_for(in_features, 128):
        raise LayoutError(
            f"{in_features} inputs are no multiple of 32, the smallest group that Baton multiplies"
        )
    groups = in_features // scheme.group if scheme.group else 1
    if scheme.layout == "mxfp4":
        kinds = ("U8",)
        return {
            "blocks": Expected(((out_features, groups, 16),), kinds),
            "scales": Expected(((out_features, groups),), kinds),
        }
    many = 32 // scheme.bits
    words, integers = ("I32",), ("I32", "I64")
    scales = Expected(((out_features, groups), *([(out_features,)] if groups == 1 else [])))
    order = Expected(((in_features,),), integers, needed=False)
    if scheme.layout in ("packed", "int"):
        packed = scheme.layout == "packed"
        rows = -(-out_features // many)
        zeros = Expected(
            ((rows, groups),) if packed else scales.shapes,
            words if packed else ("I8",),
            needed=not scheme.symmetric,
        )
        found = {"weight_scale": scales, "weight_zero_point": zeros, "weight_g_idx": order}
        if not packed:
            return {"weight": Expected((shape,), ("I8",)), **found}
        return {
            "weight_packed": Expected(((out_features, -(-in_features // many)),), words),
            "weight_shape": Expected(((2,),), integers, needed=False),
            **found,
        }
    stored = (
        (in_features, -(-out_features // many))
        if scheme.layout == "awq"
        else (-(-in_features // many), out_features)
    )
    return {
        "qweight": Expected((stored,), words),
        "qzeros": Expected(((groups, -(-out_features // many)),), words),
        "scales": Expected(((groups, out_features),)),
        **({"g_idx": order} if scheme.layout == "gptq" else {}),
    }


def read(scheme: Scheme, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Grouped:
    """A weight of `shape` [out, in] from tensors that are as `expected`.  Raises `ValueError` (one line)."""
    if scheme.layout == "mxfp4":
        return mxfp4(tensors["blocks"], tensors["scales"])
    in_features = shape[1]
    group = scheme.group or group_for(in_features, 128)
    kept = in_features // scheme.group if scheme.group else 1
    codes, scales, zeros = _READERS[scheme.layout](scheme, tensors, shape)
    nibbles = codes.shape[1] < in_features
    times = (in_features // group) // kept
    order = None
    indices = tensors.get("weight_g_idx", tensors.get("g_idx"))
    if indices is not None and scheme.group is not None:
        order = _order(indices, in_features, scheme.group)
        if order is not None:
            codes, nibbles = (spread(codes) if nibbles else codes)[:, order.long()], False
    scales, zeros = (part.float() for part in (scales, zeros))
    if times > 1:
        scales, zeros = (part.repeat_interleave(times, dim=1) for part in (scales, zeros))
    try:
        parts = codes.contiguous(), scales.contiguous(), zeros.contiguous()
        return Grouped(*parts, group, scheme.bits, order, nibbles=nibbles)
    except ValueError as error:
        raise LayoutError(f"its {error}") from None


def mxfp4(blocks: Tensor, scales: Tensor) -> Grouped:
    """blocks [out, groups, 16] and scales [out, groups], uint8, as the layout says."""
    if bool((scales == 255).any()):
        raise LayoutError("its scales hold NaN")
    # 2^(s - 127), by its bits: s is the exponent of a float32, but for s = 0
    factors = torch.where(scales == 0, 1 << 22, scales.int() << 23).view(torch.float32)
    return Grouped(blocks.flatten(1), factors, torch.zeros(scales.shape), 32, 4, e2m1=True, nibbles=True)


Parts = tuple[Tensor, Tensor, Tensor]
"""Codes [out, in], or [out, in / 2] with two a byte; scales and zeros [out, groups]."""


def _packed(scheme: Scheme, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Parts:
    out_features = shape[0]
    stored = tensors.get("weight_shape")
    if stored is not None and stored.tolist() != list(shape):
        raise LayoutError(f"weight_shape is {stored.tolist()}, config.json makes it {list(shape)}")
    codes = _in_bytes(tensors["weight_packed"])
    scales = tensors["weight_scale"].view(out_features, -1)
    if scheme.symmetric:
        return codes, scales, torch.full(scales.shape, MIDDLE[scheme.bits])
    zeros = unpacked(tensors["weight_zero_point"].t(), scheme.bits)[:, :out_features].t()
    return codes, scales, zeros.float()


def _int(scheme: Scheme, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Parts:
    codes = tensors["weight"].contiguous().view(torch.uint8) ^ 128
    scales = tensors["weight_scale"].view(shape[0], -1)
    zeros = torch.full(scales.shape, MIDDLE[8])
    if not scheme.symmetric:
        zeros += tensors["weight_zero_point"].view(scales.shape)
    return codes, scales, zeros


def _awq(scheme: Scheme, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Parts:
    zeros = unpacked(tensors["qzeros"], 4).view(-1, tensors["qzeros"].shape[1], 8)
    zeros = zeros[:, :, list(_AWQ_PLACES)].flatten(1)[:, : shape[0]].t()
    return _awq_nibbles(tensors["qweight"])[: shape[0]], tensors["scales"].t(), zeros.float()


def _awq_nibbles(words: Tensor) -> Tensor:
    """int32 [in, out / 8] → uint8 [out, in / 2], two codes of an output in a byte, without more room."""
    stored = _in_bytes(words)
    first, second = stored[::2], stored[1::2]
    # of two inputs, those outputs that stand in lower halves of bytes, and those in upper ones
    halves = first & 15 | second << 4, first >> 4 | second & 0xF0
    found = torch.empty((words.shape[1], 8, len(words) // 2), dtype=torch.uint8)
    for output, place in enumerate(_AWQ_PLACES):
        found[:, output] = halves[place % 2][:, place // 2 :: 4].t()
    return found.flatten(0, 1)


def _gptq(scheme: Scheme, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Parts:
    out_features = shape[0]
    codes = _in_bytes(tensors["qweight"].t())
    zeros = unpacked(tensors["qzeros"], scheme.bits)[:, :out_features].t().float()
    if scheme.zeros_less_one:
        zeros = (zeros + 1) % (1 << scheme.bits)  # 0 - 1 is stored as 15
    return codes, tensors["scales"].t(), zeros


_READERS: dict[Layout, Callable[[Scheme, Mapping[str, Tensor], tuple[int, int]], Parts]] = {
    "packed": _packed,
    "int": _int,
    "awq": _awq,
    "gptq": _gptq,
}


def unpacked(words: Tensor, bits: int) -> Tensor:
    """int32 [rows, n] → uint8 [rows, n * 32 / bits], the lowest bits of a word first."""
    return _in_bytes(words) if bits == 8 else spread(_in_bytes(words))


def _in_bytes(words: Tensor) -> Tensor:
    """int32 [rows, n] → uint8 [rows, 4 n], a code or two in each, the first in the lowest bits."""
    return words.contiguous().view(torch.uint8)  # (little-endian, as all that Baton runs on)


def _order(indices: Tensor, in_features: int, group: int) -> Tensor | None:
    """From the group of each input to the inputs, group by group; None if they lie so already."""
    indices = indices.flatten().long()
    if len(indices) != in_features:
        raise LayoutError(f"g_idx has {len(indices)} entries for {in_features} inputs")
    if bool((indices < 0).all()):  # as some programs write for none
        return None
    sizes = torch.bincount(indices.clamp(min=0), minlength=in_features // group)
    if bool((indices < 0).any()) or len(sizes) != in_features // group or bool((sizes != group).any()):
        raise LayoutError(f"g_idx does not give each of {in_features // group} groups {group} inputs")
    order = torch.argsort(indices, stable=True).int()
    return None if torch.equal(order, torch.arange(in_features, dtype=torch.int32)) else order
