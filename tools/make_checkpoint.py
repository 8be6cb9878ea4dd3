"""A random checkpoint of a real shape: `python tools/make_checkpoint.py --shape ernie-0.3b --out DIR`.

Theory. How fast a dense model is computed depends on its shapes, not on what it has learnt; so a checkpoint
of random weights measures an engine as well as a trained one, needs no network, and is the same everywhere.

*Weights.* Normal, with the standard deviation 0.02 that `transformers` initialises with; norms are one. A
number is a table of 65,536 quantiles of the distribution, looked up at 16 random bits; the bits come from
Philox, a counter-based generator whose stream is fixed by (seed, name of the tensor). So a checkpoint is the
same, byte for byte, in whatever order it is written, and no float copy of a tensor is ever made. Files hold
1 GiB at most, or one tensor: the memory needed is twice that, the time a few nanoseconds a number.

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
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from baton.model.checkpoint.files import INDEX
from baton.model.checkpoint.hub import resolve_model

STANDARD_DEVIATION = 0.02
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


def make_checkpoint(shape: str, directory: Path, seed: int = 0, outliers: int = 0) -> int:
    """Writes a checkpoint to `directory`, which is made; returns the bytes of its weights."""
    config = {**_COMMON, **SHAPES[shape]}
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", config)
    _write_json(
        directory / "generation_config.json",
        {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    write_tokenizer(directory, config["vocab_size"], config["max_position_embeddings"])
    quantiles = _normal_quantiles()
    files = list(_files(tensor_shapes(config)))
    index: dict[str, str] = {}
    size = 0
    for number, shapes in enumerate(files, start=1):
        tensors = {name: _tensor(name, shape, quantiles, seed) for name, shape in shapes.items()}
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


def _files(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> Iterator[dict[str, tuple[int, ...]]]:
    """The tensors of each file."""
    found: dict[str, tuple[int, ...]] = {}
    size = 0
    for name, shape in shapes:
        more = 2 * math.prod(shape)
        if found and size + more > _FILE_BYTES:
            yield found
            found, size = {}, 0
        found[name] = shape
        size += more
    yield found


def tensor_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor of a dense decoder; products are [out, in]."""
    hidden, ffn, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.self_attn.q_proj.weight", (queries, hidden)
        yield f"{layer}.self_attn.k_proj.weight", (keys, hidden)
        yield f"{layer}.self_attn.v_proj.weight", (keys, hidden)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, queries)
        if config["model_type"] == "qwen3":
            yield f"{layer}.self_attn.q_norm.weight", (dim,)
            yield f"{layer}.self_attn.k_norm.weight", (dim,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        yield f"{layer}.mlp.gate_proj.weight", (ffn, hidden)
        yield f"{layer}.mlp.up_proj.weight", (ffn, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, ffn)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)


def _normal_quantiles() -> np.ndarray[Any, np.dtype[np.int16]]:
    """[65536] bfloat16 numbers, as int16 bit patterns: equally likely values of a normal distribution."""
    normal = NormalDist(0.0, STANDARD_DEVIATION)
    values = torch.tensor([normal.inv_cdf((rank + 0.5) / 65_536) for rank in range(65_536)])
    quantiles: np.ndarray[Any, np.dtype[np.int16]] = values.to(torch.bfloat16).view(torch.int16).numpy()
    return quantiles


def _tensor(
    name: str, shape: tuple[int, ...], quantiles: np.ndarray[Any, np.dtype[np.int16]], seed: int
) -> torch.Tensor:
    """bfloat16: ones for a norm's weight, else normal numbers that depend on the seed and the name."""
    if "norm" in name:
        return torch.ones(shape, dtype=torch.bfloat16)
    key = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest()
    generator = np.random.Philox(key=np.frombuffer(key, "<u8"))
    count = math.prod(shape)
    bits = generator.random_raw(-(-count // 4)).astype("<u8", copy=False).view("<u2")[:count]
    return torch.from_numpy(quantiles.take(bits)).view(torch.bfloat16).reshape(shape)


def _stretch(tensor: torch.Tensor, name: str, outliers: int, seed: int) -> None:
    """Makes so many channels of a norm that products follow, or of an `up_proj`, 10 to 30 times as large."""
    kind = "norm" if name.endswith(("layernorm.weight", "model.norm.weight")) else name.split(".")[-2]
    if kind in ("norm", "up_proj"):
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
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--outliers", type=int, default=0, metavar="N", help="channels that stand out")
    options = parser.parse_args()
    size = make_checkpoint(options.shape, options.out, options.seed, options.outliers)
    print(f"{options.out}: {options.shape}, {size / 2e6:,.1f} M parameters, {size / 2**20:,.0f} MiB bfloat16")


if __name__ == "__main__":
    main()
