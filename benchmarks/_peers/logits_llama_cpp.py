"""The other end of `_llama_cpp.py`: a process that computes texts with llama.cpp and writes all their logits.

Needs `pip install llama-cpp-python gguf numpy`, and what `gguf_files` needs.  The first argument is JSON:
`model`, a GGUF file, or a directory with `format` and `converted`, where the file is made; `threads`;
`context`, the most tokens of a text.  The KV cache is the library's default, float16.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

from answering import NotOffered
from gguf_files import convert

_PIECE = 256
"""Tokens computed together, so rows of logits that the library holds."""


class Model:
    """One file, loaded."""

    def __init__(self, path: Path, threads: int, context: int) -> None:
        import llama_cpp as lib

        self._lib: Any = lib
        lib.llama_backend_init()
        self._model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
        if not self._model:
            raise NotOffered(f"llama.cpp does not load {path}")
        self._vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max = context, 1
        params.n_batch = params.n_ubatch = _PIECE
        params.n_threads = params.n_threads_batch = threads
        self._context = lib.llama_init_from_model(self._model, params)
        self._batch = lib.llama_batch_init(_PIECE, 0, 1)

    def described(self) -> dict[str, Any]:
        lib = self._lib
        return {
            "version": lib.__version__,
            "vocab_size": self._vocab_size,
            "weight_bytes": lib.llama_model_size(self._model),
            "parameters": lib.llama_model_n_params(self._model),
        }

    def write_logits(self, tokens: list[int], first: int, path: Path) -> None:
        """Of each position from `first` on: [n, vocabulary] float32, as bytes."""
        import numpy as np

        lib, batch = self._lib, self._batch
        lib.llama_memory_clear(lib.llama_get_memory(self._context), False)
        with path.open("wb") as file:
            for begin in range(0, len(tokens), _PIECE):
                piece = tokens[begin : begin + _PIECE]
                for index, token in enumerate(piece):
                    batch.token[index] = token
                    batch.pos[index] = begin + index
                    batch.n_seq_id[index] = 1
                    batch.seq_id[index][0] = 0
                    batch.logits[index] = begin + index >= first
                batch.n_tokens = len(piece)
                if lib.llama_decode(self._context, batch):
                    raise RuntimeError("llama_decode failed")
                count = min(len(piece), max(0, begin + len(piece) - first))
                if count:
                    logits = ctypes.cast(lib.llama_get_logits(self._context), ctypes.POINTER(ctypes.c_float))
                    np.ctypeslib.as_array(logits, (count, self._vocab_size)).tofile(file)


def main() -> None:
    settings = json.loads(sys.argv[1])
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the library prints

    def reply(**content: object) -> None:
        replies.write(json.dumps(content) + "\n")
        replies.flush()

    try:
        path = Path(settings["model"])
        if path.is_dir():
            (path,) = convert(path, Path(settings["converted"]), [settings["format"]])
        model = Model(path, settings["threads"], settings["context"])
    except (NotOffered, RuntimeError) as error:
        reply(error=str(error))
        return
    reply(**model.described())
    for line in sys.stdin:
        order = json.loads(line)
        model.write_logits(order["tokens"], order["first"], Path(order["into"]))
        reply()


if __name__ == "__main__":
    main()
