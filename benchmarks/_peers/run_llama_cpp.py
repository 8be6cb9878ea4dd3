"""llama.cpp through its Python build: `CMAKE_ARGS=-DGGML_NATIVE=ON pip install llama-cpp-python gguf numpy`.

The checkpoint is written once as GGUF and quantized by the library (`gguf_files.py`): bfloat16, `q8_0`,
`q4_0`, `q4_k_m` and others; `int8` means Q8_0 and `int4` Q4_0.  The weights are read, not mapped, with the
library's extra buffers, so that its kernels for repacked weights are used (its log names them).  Its Python
class completes one prompt at a time, so the loop over a batch is here, on the functions of the library:
prompts in batches of 2,048 tokens, then one token of every sequence a step, the largest logit taken with
numpy.  Flash attention is left to the library's choice.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

from answering import Loaded, NotOffered, Settings, answer
from gguf_files import convert, weight_bytes

BATCH = 2048
_NAMES = {None: "bf16", "int8": "q8_0", "int4": "q4_0"}


def open_model(settings: Settings) -> tuple[Any, Any, Path]:
    """The library, the model in it, and its file, which is made the first time.  Raises `NotOffered`."""
    if settings.dtype != "bfloat16":
        raise NotOffered(f"this adapter converts bfloat16 checkpoints, not to {settings.dtype}")
    name = _NAMES.get(settings.quantization, settings.quantization)
    (path,) = convert(Path(settings.model), Path(settings.converted), [str(name)])
    import llama_cpp as lib

    lib.llama_backend_init()
    loading = lib.llama_model_default_params()
    loading.load_mode = lib.LLAMA_LOAD_MODE_NONE
    return lib, lib.llama_model_load_from_file(str(path).encode(), loading), path


def load(settings: Settings) -> Loaded:
    lib, model, path = open_model(settings)
    import numpy as np

    vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    shapes = settings.works or [(settings.max_num_seqs, settings.max_model_len)]
    context, shape = None, (0, 0)

    def use(count: int, length: int) -> None:
        """Makes the context of the smallest work that these prompts fit into, unless it is there."""
        nonlocal context, shape
        wanted = min(
            ((seqs, tokens) for seqs, tokens in shapes if seqs >= count and tokens >= length),
            key=lambda one: one[0] * one[1],
            default=(count, length),
        )
        if wanted == shape:
            return
        if context is not None:
            lib.llama_free(context)
        params = lib.llama_context_default_params()
        params.n_seq_max = wanted[0]
        params.n_ctx = wanted[0] * wanted[1]
        params.n_batch = params.n_ubatch = BATCH
        params.n_threads = params.n_threads_batch = settings.threads
        context, shape = lib.llama_init_from_model(model, params), wanted

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
        at_once = min(settings.max_num_seqs, lib.llama_max_parallel_sequences())
        made = 0
        for first in range(0, len(prompts), at_once):
            some = prompts[first : first + at_once]
            use(len(some), max(map(len, some)) + output_len)
            made += _wave(some, output_len, decode, clear)
        return made

    def clear() -> None:
        lib.llama_memory_clear(lib.llama_get_memory(context), False)

    return Loaded(lib.__version__, complete, weight_bytes(path))


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
