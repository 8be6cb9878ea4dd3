"""A random checkpoint of a real shape: `python tools/make_checkpoint.py --shape ernie-0.3b --out DIR`.

Theory. How fast a model is computed depends on its shapes, not on what it has learnt; so a checkpoint
of random weights measures an engine as well as a trained one, needs no network, and is the same everywhere.

*Weights.* Normal, with the standard deviation 0.02 that `transformers` initialises with; norms are one. A
number is a table of 65,536 quantiles of the distribution, looked up at 16 random bits; the bits come from
Philox, a counter-based generator whose stream is fixed by (seed, name of the tensor). So a checkpoint is the
same, byte for byte, in whatever order it is written, and no float copy of a tensor is ever made. Files hold
1 GiB at most, or one tensor: the memory needed is twice that, the time a few nanoseconds a number.

*Formats.* bfloat16, or with `--format int4` compressed-tensors' pack-quantized, in groups of 64 or 128 inputs
without zero points: codes are drawn evenly, and scales make weights as large as those of the other format,
but they are not the same weights. Embeddings, output head, routers and norms stay as they are.

*Mixtures of experts.* An expert is three tensors, as on the hub. Routers are random too, so experts get about
as many tokens each; `ernie-21b-a3b` takes 43 GB in bfloat16, 12 GB in int4.

*MTP.* `--mtp` adds the layer that guesses the token after the next one, dense as ERNIE's first layer, to a
mixture of ERNIE. What it says is as random as the model.

*Outliers.* What quantization costs does depend on what was learnt: trained models have a few channels whose
activations are many times as large as the others. `--outliers N` makes N of them, 10 to 30 times as large:
the same N channels of all norms, and as many rows of each `up_proj`, so the inputs of `down_proj`.

*Tokenizer.* The embedded model's byte-level BPE, with more merges of two of its own tokens until the
vocabulary is full: every text can be encoded, every id decodes to some letters, no id is missing.

Prints the directory and its sizes. Loads in Baton, in `transformers` and in whatever reads its format.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file

from baton.model.checkpoint.files import INDEX
from baton.model.checkpoint.hub import resolve_model

STANDARD_DEVIATION = 0.02
_SCALE = STANDARD_DEVIATION / (21.5 * 13 / 12) ** 0.5
"""Of codes from -8 to 7, whose mean square is 21.5, and of factors from 0.5 to 1.5."""
_FILE_BYTES = 1 << 30
"""In a file of weights at most, unless one tensor is larger."""

_COMMON: dict[str, Any] = {
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": STANDARD_DEVIATION,
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1_000_000.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151_936,
}
_QWEN3_MOE: dict[str, Any] = _QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
_ERNIE_MOE: dict[str, Any] = {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "model_type": "ernie4_5_moe",
    "moe_layer_interval": 1,
    "moe_layer_start_index": 1,
    "moe_norm_min": 1e-12,
    "moe_num_shared_experts": 2,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
    "use_bias": False,
}
SHAPES: dict[str, dict[str, Any]] = {
    "ernie-0.3b": {
        "architectures": ["Ernie4_5ForCausalLM"],
        "model_type": "ernie4_5",
        "head_dim": 128,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 131_072,
        "num_attention_heads": 16,
        "num_hidden_layers": 18,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
        "use_bias": False,
        "vocab_size": 103_424,
    },
    "qwen3-0.6b": _QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_window_layers": 28,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "tie_word_embeddings": True,
    },
    "qwen3-4b": _QWEN3
    | {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "max_window_layers": 36,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": _QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "max_window_layers": 36,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "tie_word_embeddings": False,
    },
    "ernie-21b-a3b": _ERNIE_MOE
    | {
        "head_dim": 128,
        "hidden_size": 2560,
        "intermediate_size": 12_288,
        "max_position_embeddings": 131_072,
        "moe_intermediate_size": 1536,
        "moe_k": 6,
        "moe_layer_end_index": 27,
        "moe_num_experts": 64,
        "num_attention_heads": 20,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "vocab_size": 103_424,
    },
    "qwen3-30b-a3b": _QWEN3_MOE
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_window_layers": 48,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
    },
    "tiny-moe": _QWEN3_MOE
    | {
        "head_dim": 64,
        "hidden_size": 256,
        "intermediate_size": 768,
        "max_position_embeddings": 4_096,
        "max_window_layers": 4,
        "moe_intermediate_size": 256,
        "num_attention_heads": 4,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "vocab_size": 2_048,
    },
    "tiny-ernie-moe": _ERNIE_MOE
    | {
        "head_dim": 64,
        "hidden_size": 256,
        "intermediate_size": 768,
        "max_position_embeddings": 4_096,
        "moe_intermediate_size": 128,
        "moe_k": 2,
        "moe_layer_end_index": 3,
        "moe_num_experts": 8,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "vocab_size": 2_048,
    },
    "tiny-llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "head_dim": 64,
        "hidden_size": 256,
        "intermediate_size": 768,
        "max_position_embeddings": 4_096,
        "mlp_bias": False,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "vocab_size": 2_048,
    },
}


class Stored(NamedTuple):
    """A tensor of a file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    of: tuple[int, ...] = ()
    """The weight's shape, of which this is the codes, scales or shape; (): it is the weight."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def make_checkpoint(
    shape: str,
    directory: Path,
    seed: int = 0,
    outliers: int = 0,
    group: int | None = None,
    layers: int | None = None,
    mtp: bool = False,
) -> int:
    """Writes a checkpoint to `directory`, which is made; returns the bytes of its weights.

    `group`: inputs that share a scale, in int4; None: in bfloat16.  `layers`: so many, not the shape's.
    `mtp`: with an MTP layer beside them; raises `ValueError` if models of that shape have none.
    """
    config = config_of(shape, layers, mtp)
    if group is not None:
        config["quantization_config"] = _compressed(group)
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", config)
    _write_json(
        directory / "generation_config.json",
        {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    write_tokenizer(directory, config["vocab_size"], config["max_position_embeddings"])
    quantiles = _normal_quantiles()
    files = list(_files(_stored(tensor_shapes(config), group)))
    index: dict[str, str] = {}
    size = 0
    for number, parts in enumerate(files, start=1):
        tensors = {part.name: _tensor(part, quantiles, seed) for part in parts}
        for name, tensor in tensors.items():
            _stretch(tensor, name, outliers, seed)
        part = f"-{number:05d}-of-{len(files):05d}" if len(files) > 1 else ""
        file = f"model{part}.safetensors"
        save_file(tensors, str(directory / file), metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, file))
        size += sum(tensor.nbytes for tensor in tensors.values())
    if len(files) > 1:
        _write_json(directory / INDEX, {"metadata": {"total_size": size}, "weight_map": index})
    return size


def config_of(shape: str, layers: int | None = None, mtp: bool = False) -> dict[str, Any]:
    """The config.json of a shape, or of one with so many layers, and with an MTP layer.

    Raises `ValueError` if models of that shape have no MTP layer."""
    config = {**_COMMON, **SHAPES[shape]}
    count = layers or config["num_hidden_layers"]
    config["num_hidden_layers"] = count
    if "moe_layer_end_index" in config:
        config["moe_layer_end_index"] = count - 1
    if mtp:
        if config["model_type"] != "ernie4_5_moe":
            raise ValueError(f"mtp: models of the shape {shape} have no such layer; give a mixture of ERNIE")
        config["num_nextn_predict_layers"] = 1
    return config


def _compressed(group: int) -> dict[str, Any]:
    """As llm-compressor writes it."""
    weights = {
        "actorder": None,
        "dynamic": False,
        "group_size": group,
        "num_bits": 4,
        "strategy": "group",
        "symmetric": True,
        "type": "int",
    }
    group_0 = {"input_activations": None, "output_activations": None, "targets": ["Linear"]}
    return {
        "config_groups": {"group_0": group_0 | {"weights": weights}},
        "format": "pack-quantized",
        "ignore": ["lm_head", "re:.*mlp.gate$", "re:.*mtp_linear_proj.*"],
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def _stored(shapes: Iterable[tuple[str, tuple[int, ...]]], group: int | None) -> Iterator[Stored]:
    """What files hold for tensors of these shapes."""
    for name, shape in shapes:
        if name.endswith(("mlp.gate.weight", "correction_bias")):
            yield Stored(name, shape, torch.float32)
        elif group is None or not name.endswith("_proj.weight"):
            yield Stored(name, shape)
        else:
            outputs, inputs = shape
            yield Stored(f"{name}_packed", (outputs, inputs // 8), torch.int32, shape)
            yield Stored(f"{name}_scale", (outputs, inputs // group), torch.bfloat16, shape)
            yield Stored(f"{name}_shape", (2,), torch.int64, shape)


def _files(tensors: Iterable[Stored]) -> Iterator[list[Stored]]:
    """The tensors of each file."""
    found: list[Stored] = []
    size = 0
    for tensor in tensors:
        if found and size + tensor.nbytes > _FILE_BYTES:
            yield found
            found, size = [], 0
        found.append(tensor)
        size += tensor.nbytes
    yield found


def tensor_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor of a decoder; products are [out, in]."""
    hidden = config["hidden_size"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        yield from _attention(config, f"model.layers.{index}")
        yield from _second_half(config, index)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)
    if config.get("num_nextn_predict_layers"):
        yield "model.mtp_emb_norm.0.weight", (hidden,)
        yield "model.mtp_hidden_norm.0.weight", (hidden,)
        yield "model.mtp_linear_proj.0.weight", (hidden, 2 * hidden)
        yield from _attention(config, "model.mtp_block.0")
        yield from _mlp("model.mtp_block.0.mlp", hidden, config["intermediate_size"])


def _attention(config: dict[str, Any], layer: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """With the norms before and behind it."""
    hidden, dim = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    yield f"{layer}.input_layernorm.weight", (hidden,)
    yield f"{layer}.self_attn.q_proj.weight", (queries, hidden)
    yield f"{layer}.self_attn.k_proj.weight", (keys, hidden)
    yield f"{layer}.self_attn.v_proj.weight", (keys, hidden)
    yield f"{layer}.self_attn.o_proj.weight", (hidden, queries)
    if config["model_type"].startswith("qwen3"):
        yield f"{layer}.self_attn.q_norm.weight", (dim,)
        yield f"{layer}.self_attn.k_norm.weight", (dim,)
    yield f"{layer}.post_attention_layernorm.weight", (hidden,)


def _second_half(config: dict[str, Any], index: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Of a layer: an MLP, or experts."""
    hidden, name = config["hidden_size"], f"model.layers.{index}.mlp"
    experts = config.get("moe_num_experts", config.get("num_experts", 0))
    if not experts or index < config.get("moe_layer_start_index", 0):
        yield from _mlp(name, hidden, config["intermediate_size"])
        return
    yield f"{name}.gate.weight", (experts, hidden)
    if config["model_type"] == "ernie4_5_moe":
        yield f"{name}.moe_statics.e_score_correction_bias", (1, experts)
    for expert in range(experts):
        yield from _mlp(f"{name}.experts.{expert}", hidden, config["moe_intermediate_size"])
    if shared := config.get("moe_num_shared_experts", 0):
        yield from _mlp(f"{name}.shared_experts", hidden, shared * config["moe_intermediate_size"])


def _mlp(name: str, hidden: int, size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.gate_proj.weight", (size, hidden)
    yield f"{name}.up_proj.weight", (size, hidden)
    yield f"{name}.down_proj.weight", (hidden, size)


def _normal_quantiles() -> np.ndarray[Any, np.dtype[np.int16]]:
    """[65536] bfloat16 numbers, as int16 bit patterns: equally likely values of a normal distribution."""
    normal = NormalDist(0.0, STANDARD_DEVIATION)
    values = torch.tensor([normal.inv_cdf((rank + 0.5) / 65_536) for rank in range(65_536)])
    quantiles: np.ndarray[Any, np.dtype[np.int16]] = values.to(torch.bfloat16).view(torch.int16).numpy()
    return quantiles


def _tensor(part: Stored, quantiles: np.ndarray[Any, np.dtype[np.int16]], seed: int) -> torch.Tensor:
    """Ones for a norm's weight, else random numbers that depend on the seed and the name."""
    if "norm" in part.name:
        return torch.ones(part.shape, dtype=part.dtype)
    if part.name.endswith("_shape"):
        return torch.tensor(part.of)
    if part.name.endswith("correction_bias"):
        return torch.zeros(part.shape, dtype=part.dtype)
    count = math.prod(part.shape)
    key = hashlib.blake2b(f"{seed}/{part.name}".encode(), digest_size=16).digest()
    words = -(-count * part.dtype.itemsize // 8) if part.dtype == torch.int32 else -(-count // 4)
    bits = np.random.Philox(key=np.frombuffer(key, "<u8")).random_raw(words).astype("<u8", copy=False)
    if part.dtype == torch.int32:
        return torch.from_numpy(bits.view("<i4")[:count]).reshape(part.shape)
    shares = bits.view("<u2")[:count]
    if part.name.endswith("_scale"):
        factors = torch.from_numpy(shares.astype(np.float32)).div_(65_536).add_(0.5)
        return (factors * _SCALE).to(part.dtype).reshape(part.shape)
    found = torch.from_numpy(quantiles.take(shares)).view(torch.bfloat16)
    return found.to(part.dtype).reshape(part.shape)


def _stretch(tensor: torch.Tensor, name: str, outliers: int, seed: int) -> None:
    """Makes so many channels of a norm that products follow, or of an `up_proj`, 10 to 30 times as large."""
    kind = "norm" if name.endswith(("layernorm.weight", "model.norm.weight")) else name.split(".")[-2]
    if kind in ("norm", "up_proj") and tensor.is_floating_point():
        factors = Random(f"{seed}/{name}")
        for channel in Random(f"{seed}/{kind}").sample(range(len(tensor)), outliers):
            tensor[channel] *= factors.randint(10, 30)


def write_tokenizer(directory: Path, vocab_size: int, max_length: int) -> None:
    """The embedded model's tokenizer and chat template, extended to `vocab_size` ids."""
    embedded = resolve_model(None)
    shutil.copyfile(embedded / "chat_template.jinja", directory / "chat_template.jinja")
    config = json.loads((embedded / "tokenizer_config.json").read_text(encoding="utf-8"))
    _write_json(directory / "tokenizer_config.json", config | {"model_max_length": max_length})
    tokenizer = json.loads((embedded / "tokenizer.json").read_text(encoding="utf-8"))
    _extend(tokenizer["model"]["vocab"], tokenizer["model"]["merges"], vocab_size)
    _write_json(directory / "tokenizer.json", tokenizer, indent=None)


def _extend(vocab: dict[str, int], merges: list[list[str]], size: int) -> None:
    """Adds merges of two tokens of the given vocabulary, each of ASCII letters, until it has `size` ids.

    They come after the merges that are there, so a text is cut as before first and then merged further.
    """
    pieces = [token for token in vocab if token.isascii() and token.isalpha()]
    begins = pieces + [token for token in vocab if token.startswith("Ġ") and token[1:].isascii()]
    rng = Random("more merges")
    while len(vocab) < size:
        pair = [rng.choice(begins), rng.choice(pieces)]
        token = "".join(pair)
        if token not in vocab:
            vocab[token] = len(vocab)
            merges.append(pair)


def _write_json(path: Path, content: dict[str, Any], indent: int | None = 2) -> None:
    path.write_text(json.dumps(content, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=tuple(SHAPES), required=True)
    parser.add_argument("--out", type=Path, required=True, help="the directory to write")
    parser.add_argument("--format", choices=("bf16", "int4"), default="bf16")
    parser.add_argument("--group-size", type=int, choices=(64, 128), default=64, help="of int4")
    parser.add_argument("--layers", type=int, metavar="N", help="so many; else as many as the model has")
    parser.add_argument("--mtp", action="store_true", help="a mixture of ERNIE with its MTP layer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--outliers", type=int, default=0, metavar="N", help="channels that stand out")
    options = parser.parse_args()
    group = options.group_size if options.format == "int4" else None
    shape, layers, mtp = options.shape, options.layers, options.mtp
    try:
        config = config_of(shape, layers, mtp)
    except ValueError as error:
        parser.error(f"--{error}")
    size = make_checkpoint(shape, options.out, options.seed, options.outliers, group, layers, mtp)
    count = sum(math.prod(shape) for _, shape in tensor_shapes(config))
    told = f"{count / 1e6:,.1f} M parameters, {size / 2**20:,.0f} MiB {options.format}"
    print(f"{options.out}: {options.shape}, {told}")


if __name__ == "__main__":
    main()
