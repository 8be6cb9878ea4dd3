"""llama.cpp through its Python build: `pip install llama-cpp-python gguf numpy`.

The checkpoint is written once as GGUF, bfloat16 or Q8_0 for int8.  Its Python class completes one prompt at a
time, so the loop over a batch is here, on the functions of the library: prompts in batches of 2,048 tokens,
then one token of every sequence a step, the largest logit taken with numpy.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from answering import Complete, NotOffered, Settings, answer

BATCH = 2048
_ARCHITECTURES = {"ernie4_5": "ernie4_5", "qwen3": "qwen3", "llama": "llama"}


def convert(settings: Settings) -> Path:
    """The GGUF file; made the first time."""
    kind = "q8_0" if settings.quantization == "int8" else "bf16"
    path = Path(settings.converted) / f"model-{kind}.gguf"
    if path.exists():
        return path
    import gguf

    config = json.loads((Path(settings.model) / "config.json").read_text())
    name = _ARCHITECTURES.get(config["model_type"])
    if name is None:
        raise NotOffered(f"this adapter converts {', '.join(_ARCHITECTURES)}, not {config['model_type']}")
    architecture = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, name)
    _describe(writer, config)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for source, tensor in _tensors(Path(settings.model)):
        target = names.get_name(source, try_suffixes=(".weight",))
        if target is None:
            raise NotOffered(f"no place for {source}")
        _add(writer, target, _in_order(source, tensor, config), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(path)
    return path


def _describe(writer: Any, config: dict[str, Any]) -> None:
    """No tokenizer: tokens come and go as ids."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")


def _tensors(directory: Path) -> Any:
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


def _in_order(name: str, tensor: Any, config: dict[str, Any]) -> Any:
    """The library rotates neighbours where Llama's checkpoints have halves: rows of q and k change places."""
    if config["model_type"] != "llama" or not name.endswith(("q_proj.weight", "k_proj.weight")):
        return tensor
    half = config["head_dim"] // 2
    return tensor.reshape(-1, 2, half, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)


def _add(writer: Any, name: str, bits: Any, kind: str) -> None:
    import gguf
    import numpy as np

    if bits.ndim == 1 or kind == "q8_0":
        values = (bits.astype(np.uint32) << 16).view(np.float32)
        if bits.ndim == 1:
            writer.add_tensor(name, values)
        else:
            q8 = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(values, q8), raw_dtype=q8)
    else:
        rows = np.ascontiguousarray(bits).view(np.uint8)
        writer.add_tensor(name, rows, raw_dtype=gguf.GGMLQuantizationType.BF16)


def load(settings: Settings) -> tuple[str, Complete]:
    if settings.quantization not in (None, "int8") or settings.dtype != "bfloat16":
        raise NotOffered(f"this adapter compares bfloat16 and int8, not {settings.dtype}")
    path = convert(settings)
    import llama_cpp as lib
    import numpy as np

    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
    vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    params = lib.llama_context_default_params()
    params.n_seq_max = min(settings.max_num_seqs, lib.llama_max_parallel_sequences())
    params.n_ctx = params.n_seq_max * settings.max_model_len
    params.n_batch = params.n_ubatch = BATCH
    params.n_threads = params.n_threads_batch = settings.threads
    context = lib.llama_init_from_model(model, params)
    batch = lib.llama_batch_init(BATCH, 0, 1)

    def decode(rows: list[tuple[int, int, int, bool]]) -> Any:
        """Computes (token, position, sequence, wanted) → [wanted rows] the likeliest next tokens."""
        for index, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = wanted
        batch.n_tokens = len(rows)
        if lib.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        count = sum(row[3] for row in rows)
        if not count:
            return []
        logits = ctypes.cast(lib.llama_get_logits(context), ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(logits, (count, vocab_size)).argmax(axis=1).tolist()

    def complete(prompts: list[list[int]], output_len: int) -> int:
        return sum(
            _wave(prompts[first : first + params.n_seq_max], output_len, decode, clear)
            for first in range(0, len(prompts), params.n_seq_max)
        )

    def clear() -> None:
        lib.llama_memory_clear(lib.llama_get_memory(context), False)

    return lib.__version__, complete


def _wave(
    prompts: list[list[int]],
    output_len: int,
    decode: Callable[[list[Any]], list[int]],
    clear: Callable[[], None],
) -> int:
    """Completes prompts that fit together; returns the tokens made."""
    clear()
    rows = [
        (token, position, sequence, position == len(prompt) - 1)
        for sequence, prompt in enumerate(prompts)
        for position, token in enumerate(prompt)
    ]
    tokens = [token for first in range(0, len(rows), BATCH) for token in decode(rows[first : first + BATCH])]
    made = len(tokens)
    for step in range(output_len - 1):
        tokens = decode(
            [(token, len(prompts[sequence]) + step, sequence, True) for sequence, token in enumerate(tokens)]
        )
        made += len(tokens)
    return made


if __name__ == "__main__":
    answer(load)
