"""A checkpoint of compressed-tensors' int4 as GGUF in Q4_0, code by code: both hold the same weights.

Q4_0 has blocks of 32 inputs, each with a scale in float16, and codes whose middle is 8, as the checkpoint
has them in groups of 64 or 128; so codes are copied, and a group's scale is repeated.  Experts, which the
checkpoint has one by one, become one tensor a layer.  What is bfloat16 there, embedding and head, gets Q6_K,
which llama.cpp's own tool gives a head in this format; norms and routers are float32.

One tensor is in memory at a time, and files are mapped: a model need not fit into it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from answering import NotOffered

Array = npt.NDArray[Any]
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(\w+_proj)$")
_TYPES = {"BF16": "<u2", "F32": "<f4", "I32": "<i4", "I64": "<i8"}
_BIAS = ".mlp.moe_statics.e_score_correction_bias"


@dataclass(frozen=True)
class _Tensor:
    name: str
    """In the GGUF file"""
    kind: str
    shape: tuple[int, ...]
    """In bytes along the last dimension, unless float32"""
    make: Callable[[], Array]


def write_codes(
    checkpoint: Path, path: Path, architecture: str, keys: list[tuple[str, Any]], layers: int
) -> None:
    """Writes the file.  Raises `NotOffered` for a tensor that has no place."""
    import gguf

    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(arch, layers)

    def place(source: str) -> str:
        usual = source.replace(_BIAS, ".mlp.moe_statics.e_score_correction.bias")
        found = names.get_name(usual, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise NotOffered(f"no place for {source}")
        return str(found)

    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, architecture)
    for method, value in keys:
        getattr(writer, method)(value)
    tensors = list(_tensors(_mapped(checkpoint), place))
    for tensor in tensors:
        is_plain = tensor.kind == "F32"
        dtype = np.dtype(np.float32 if is_plain else np.uint8)
        size = int(np.prod(tensor.shape)) * dtype.itemsize
        kind = gguf.GGMLQuantizationType[tensor.kind]
        writer.add_tensor_info(tensor.name, tensor.shape, dtype, size, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        writer.write_tensor_data(tensor.make())
    writer.close()
    partial.rename(path)


def mixture_keys(config: dict[str, Any]) -> list[tuple[str, Any]]:
    """As `gguf_files.description`, of ERNIE's experts; none of a dense model."""
    if "moe_num_experts" not in config:
        return []
    shared, size = config["moe_num_shared_experts"], config["moe_intermediate_size"]
    return [
        ("add_expert_count", config["moe_num_experts"]),
        ("add_expert_used_count", config["moe_k"]),
        ("add_expert_feed_forward_length", size),
        ("add_expert_shared_count", shared),
        ("add_expert_shared_feed_forward_length", shared * size),
        ("add_interleave_moe_layer_step", config["moe_layer_interval"]),
        ("add_leading_dense_block_count", config["moe_layer_start_index"]),
    ]


def _mapped(checkpoint: Path) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        data = np.memmap(path, dtype=np.uint8, mode="r")
        begin = 8 + int(data[:8].view("<u8")[0])
        for name, about in json.loads(bytes(data[8:begin])).items():
            if name != "__metadata__":
                first, last = (begin + offset for offset in about["data_offsets"])
                found[name] = data[first:last].view(_TYPES[about["dtype"]]).reshape(about["shape"])
    return found


def _tensors(sources: dict[str, Array], place: Callable[[str], str]) -> Iterator[_Tensor]:
    experts: dict[str, int] = {}
    for name in sources:
        if (module := name.removesuffix(".weight_packed")) != name:
            match = _EXPERT.match(module)
            if match is None:
                yield _codes(place(f"{module}.weight"), sources, [module])
            else:
                stack = f"{match[1]}.{{}}.{match[3]}"
                experts[stack] = max(experts.get(stack, 0), int(match[2]) + 1)
        elif not name.endswith(("_scale", "_shape")):
            yield _rest(place(name), sources[name])
    for stack, count in experts.items():
        whole = place(stack.replace(".{}", "") + ".weight")
        yield _codes(whole, sources, [stack.format(number) for number in range(count)])


def _codes(name: str, sources: dict[str, Array], modules: list[str]) -> _Tensor:
    """One module, or the experts of a layer."""
    outputs, words = sources[f"{modules[0]}.weight_packed"].shape
    shape = (outputs, words * 8 // 32 * 18)

    def make() -> Array:
        parts = [
            q4_0(sources[f"{module}.weight_packed"], sources[f"{module}.weight_scale"]) for module in modules
        ]
        return parts[0] if len(parts) == 1 else np.stack(parts)

    return _Tensor(name, "Q4_0", shape if len(modules) == 1 else (len(modules), *shape), make)


def _rest(name: str, source: Array) -> _Tensor:
    if source.ndim == 2 and source.dtype == np.uint16:
        if source.shape[1] % 256:
            raise NotOffered(f"{name} has rows of {source.shape[1]} numbers, no multiple of 256")
        return _Tensor(name, "Q6_K", (source.shape[0], source.shape[1] // 256 * 210), lambda: q6_k(source))
    plain = source.squeeze(0) if source.shape[0] == 1 else source
    return _Tensor(name, "F32", plain.shape, lambda: floats(plain))


def floats(bits: Array) -> Array:
    """bfloat16's bits, or float32 → float32"""
    if bits.dtype == np.uint16:
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(bits, np.float32)


def q4_0(packed: Array, scales: Array) -> Array:
    """int32 [out, in / 8], the first code in the lowest bits, and bfloat16's bits [out, groups] → blocks
    [out, in / 32 * 18]"""
    both = np.ascontiguousarray(packed).view(np.uint8).reshape(len(packed), -1, 16)
    codes = np.stack((both & 15, both >> 4), axis=3).reshape(*both.shape[:2], 32)
    blocks = np.empty((*both.shape[:2], 18), np.uint8)
    repeated = np.repeat(floats(scales), both.shape[1] // scales.shape[1], axis=1)
    blocks[:, :, :2] = repeated.astype("<f2")[:, :, None].view(np.uint8)
    blocks[:, :, 2:] = codes[:, :, :16] | codes[:, :, 16:] << 4
    return blocks.reshape(len(packed), -1)


def q6_k(bits: Array) -> Array:
    """bfloat16's bits [n, k] → blocks [n, k / 256 * 210]; rounded to the nearest"""
    parts = [_q6_k(floats(bits[first : first + 4096])) for first in range(0, len(bits), 4096)]
    return np.concatenate(parts)


def _q6_k(exact: Array) -> Array:
    small = exact.reshape(-1, 16, 16)
    steps = np.abs(small).max(axis=2) / 31
    whole = (steps.max(axis=1, keepdims=True) / 127).astype("<f2")
    factors = np.rint(steps / np.maximum(whole, 1e-7)).clip(1, 127)
    step = (factors * whole.astype(np.float32))[:, :, None]
    codes = (np.rint(small / np.maximum(step, 1e-30)).clip(-32, 31) + 32).astype(np.uint8)
    q = codes.reshape(-1, 2, 4, 32)
    low, high = q & 15, q >> 4
    blocks = np.empty((len(small), 210), np.uint8)
    blocks[:, :128] = np.concatenate(
        (low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4), axis=2
    ).reshape(-1, 128)
    blocks[:, 128:192] = (
        high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    ).reshape(-1, 64)
    blocks[:, 192:208] = factors.astype(np.int8).view(np.uint8)
    blocks[:, 208:] = whole.view(np.uint8)
    return blocks.reshape(len(exact), -1)
