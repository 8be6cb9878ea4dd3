"""A bfloat16 checkpoint as GGUF, in bfloat16 or quantized as llama.cpp's own tool does it.

    LLAMA_VENV/bin/python benchmarks/_peers/gguf_files.py CHECKPOINT DIRECTORY q4_0 q4_k_m q8_0

Needs `pip install llama-cpp-python gguf numpy`.  The tensors are written from the mapped checkpoint, and
`llama_model_quantize` holds one at a time, so a model need not fit into memory.  The types are the tool's
defaults: Q4_K_M mixes Q4_K and Q6_K, and a head that is the embedding has 6 bits in both formats of 4 bits.
The bfloat16 file is deleted once every format asked for is there, unless `bf16` is one of them.  A checkpoint
in 4 bits becomes Q4_0 as it is (`gguf_codes`).
Tokens come and go as ids, so a tokenizer is written only for `llama-server`, which does not start without
one: its ids and merges, no more.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from answering import NotOffered, split
from gguf_codes import mixture_keys, write_codes

FORMATS = {"bf16": 32, "q8_0": 7, "q4_0": 2, "q4_1": 3, "q4_k_m": 15, "q5_k_m": 17, "q6_k": 18}
"""Name → `llama_ftype` of llama.h."""
_ARCHITECTURES = {
    "ernie4_5": "ernie4_5",
    "ernie4_5_moe": "ernie4_5-moe",
    "qwen3": "qwen3",
    "llama": "llama",
}


def path_of(directory: Path, name: str) -> Path:
    """Where the file of one format lies."""
    return directory / f"model-{name}.gguf"


def convert(checkpoint: Path, directory: Path, names: Sequence[str]) -> list[Path]:
    """The GGUF files of these formats; those that are missing are made.

    Raises `NotOffered` for another architecture, dtype or format, `RuntimeError` if llama.cpp refuses.
    """
    unknown = [name for name in names if name not in FORMATS]
    if unknown:
        raise NotOffered(f"writes {', '.join(FORMATS)}, not {unknown[0]}")
    config = json.loads((checkpoint / "config.json").read_text())
    if "quantization_config" in config:
        return [_of_codes(checkpoint, directory, name, config) for name in names]
    plain = path_of(directory, "bf16")
    missing = [name for name in names if not path_of(directory, name).exists()]
    if missing and not plain.exists():
        write_plain(checkpoint, plain)
    for name in missing:
        if name != "bf16":
            quantize(plain, path_of(directory, name), FORMATS[name])
    if missing and "bf16" not in names:
        plain.unlink()
    return [path_of(directory, name) for name in names]


def write_plain(checkpoint: Path, path: Path, tokenizer: bool = False) -> None:
    """Writes bfloat16 weights and float32 norms, straight from the mapped checkpoint."""
    import gguf

    config = json.loads((checkpoint / "config.json").read_text())
    name = _architecture(config)
    architecture = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, name)
    told = description(config)
    if tokenizer:
        told = [*told[:-1], *_tokenizer(checkpoint, config)]
    for method, value in told:
        getattr(writer, method)(value)
    for source, tensor in _tensors(checkpoint):
        target = names.get_name(source, try_suffixes=(".weight",))
        if target is None:
            raise NotOffered(f"no place for {source}")
        _add(writer, target, in_order(source, tensor, config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(path)


def _architecture(config: dict[str, Any]) -> str:
    name = _ARCHITECTURES.get(config["model_type"])
    if name is None:
        raise NotOffered(f"this adapter converts {', '.join(_ARCHITECTURES)}, not {config['model_type']}")
    return name


def _of_codes(checkpoint: Path, directory: Path, name: str, config: dict[str, Any]) -> Path:
    if name != "q4_0":
        raise NotOffered(f"a checkpoint in 4 bits becomes q4_0, not {name}")
    path = path_of(directory, name)
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        keys = description(config) + mixture_keys(config)
        write_codes(checkpoint, path, _architecture(config), keys, config["num_hidden_layers"])
    return path


def description(config: dict[str, Any]) -> list[tuple[str, Any]]:
    """(method of `gguf.GGUFWriter`, its argument) of every key; `config` is that of the checkpoint."""
    return [
        ("add_context_length", config["max_position_embeddings"]),
        ("add_embedding_length", config["hidden_size"]),
        ("add_block_count", config["num_hidden_layers"]),
        ("add_feed_forward_length", config["intermediate_size"]),
        ("add_head_count", config["num_attention_heads"]),
        ("add_head_count_kv", config["num_key_value_heads"]),
        ("add_key_length", config["head_dim"]),
        ("add_value_length", config["head_dim"]),
        ("add_rope_dimension_count", config["head_dim"]),
        ("add_rope_freq_base", config["rope_theta"]),
        ("add_layer_norm_rms_eps", config["rms_norm_eps"]),
        ("add_vocab_size", config["vocab_size"]),
        ("add_tokenizer_model", "no_vocab"),
    ]


def _tokenizer(checkpoint: Path, config: dict[str, Any]) -> list[tuple[str, Any]]:
    """As `description`, of a byte-level BPE."""
    model = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    tokens = {index: token for token, index in model["vocab"].items()}
    size = config["vocab_size"]
    return [
        ("add_tokenizer_model", "gpt2"),
        ("add_tokenizer_pre", "default"),
        ("add_token_list", [tokens.get(index, f"[{index}]") for index in range(size)]),
        ("add_token_types", [1] * size),
        ("add_token_merges", [one if isinstance(one, str) else " ".join(one) for one in model["merges"]]),
        ("add_eos_token_id", config["eos_token_id"]),
        ("add_add_bos_token", False),
    ]


def quantize(source: Path, target: Path, ftype: int) -> None:
    """What llama.cpp's `llama-quantize` does, by the same function."""
    import llama_cpp as lib

    lib.llama_backend_init()
    params = lib.llama_model_quantize_default_params()
    params.ftype = ftype
    params.nthread = len(os.sched_getaffinity(0))
    partial = target.with_suffix(".partial")
    if lib.llama_model_quantize(str(source).encode(), str(partial).encode(), params):
        partial.unlink(missing_ok=True)
        raise RuntimeError(f"llama.cpp does not quantize {source} to ftype {ftype}; its messages say why")
    partial.rename(target)


def weight_bytes(path: Path) -> dict[str, int]:
    """Of a GGUF file."""
    import gguf

    reader = gguf.GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()

    def number(key: str) -> int:
        field = reader.fields.get(f"{architecture}.{key}")
        return int(field.contents()) if field is not None else 0

    experts = number("expert_count")
    chosen = number("expert_used_count") / experts if experts else 1.0
    return split(((tensor.name, int(tensor.n_bytes)) for tensor in reader.tensors), chosen)


def _tensors(directory: Path) -> Iterator[tuple[str, Any]]:
    """(name, uint16 array of bfloat16 bits) of every tensor; read by hand, for numpy has no such type."""
    import numpy as np

    for path in sorted(directory.glob("*.safetensors")):
        data = np.memmap(path, dtype=np.uint8, mode="r")
        begin = 8 + int(data[:8].view("<u8")[0])
        for name, about in json.loads(bytes(data[8:begin])).items():
            if name == "__metadata__":
                continue
            if about["dtype"] != "BF16":
                raise NotOffered(f"this adapter reads bfloat16 checkpoints; {name} is {about['dtype']}")
            first, last = (begin + offset for offset in about["data_offsets"])
            yield name, data[first:last].view("<u2").reshape(about["shape"])


def in_order(name: str, tensor: Any, config: dict[str, Any]) -> Any:
    """The library rotates neighbours where Llama's checkpoints have halves: rows of q and k change places."""
    if config["model_type"] != "llama" or not name.endswith(("q_proj.weight", "k_proj.weight")):
        return tensor
    half = config["head_dim"] // 2
    return tensor.reshape(-1, 2, half, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)


def _add(writer: Any, name: str, bits: Any) -> None:
    import gguf
    import numpy as np

    if bits.ndim == 1:
        writer.add_tensor(name, (bits.astype(np.uint32) << 16).view(np.float32))
    else:
        rows = np.ascontiguousarray(bits).view(np.uint8)
        writer.add_tensor(name, rows, raw_dtype=gguf.GGMLQuantizationType.BF16)


if __name__ == "__main__":
    for file in convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]):
        print(file, f"{file.stat().st_size / 1e6:,.1f} MB")
