"""llama.cpp's answers, through its Python build (`run_llama_cpp.py` says what to install).

It has no scheduler in its library, so what its server does is done here: a step has one token of each request
that answers, and prompts in pieces of `max_num_batched_tokens`; a prompt whose beginning is in a sequence's
cache takes it over (`llama_memory_seq_cp`), but for the last token, which must be computed for its logits.
Weights are as in the checkpoint (BF16 or F32), keys and values in float32, or (BF16) in float16, its default.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from answering import NotOffered
from gguf_files import write_plain
from same_answering import Answer, Engine, Settings, serve

_KEPT = 2
"""Prompts whose cache is kept for later ones."""


class Library:
    """One model and one context of `llama.cpp`."""

    def __init__(self, settings: Settings) -> None:
        import llama_cpp as lib

        self._lib: Any = lib
        path = Path(settings.converted) / "same-bf16.gguf"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_plain(Path(settings.model), path)
        if settings.dtype == "float32":
            exact = path.with_name("same-f32.gguf")
            if not exact.exists():
                params = lib.llama_model_quantize_default_params()
                params.ftype = lib.LLAMA_FTYPE_ALL_F32
                if lib.llama_model_quantize(str(path).encode(), str(exact).encode(), ctypes.byref(params)):
                    raise NotOffered("does not write float32")
            path = exact
        lib.llama_backend_init()
        self._model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
        self._vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._piece = settings.max_num_batched_tokens
        self._size = max(self._piece, settings.max_num_seqs)
        params = lib.llama_context_default_params()
        params.n_seq_max = settings.max_num_seqs + _KEPT
        params.n_ctx = params.n_seq_max * settings.max_model_len
        params.n_batch = params.n_ubatch = self._size
        params.n_threads = params.n_threads_batch = settings.threads
        params.kv_unified = True
        if settings.dtype == "float32":
            params.type_k = params.type_v = lib.GGML_TYPE_F32
        self._context = lib.llama_init_from_model(self._model, params)
        if not self._context:
            raise NotOffered("has no such KV cache here")
        self._memory = lib.llama_get_memory(self._context)
        self._batch = lib.llama_batch_init(self._size, 0, 1)
        self._first_kept = settings.max_num_seqs
        self._kept: list[list[int]] = []

    @property
    def version(self) -> str:
        return str(self._lib.__version__)

    def forget(self) -> None:
        self._lib.llama_memory_clear(self._memory, True)
        self._kept = []

    def complete(self, prompts: list[list[int]], output_len: int) -> list[Answer]:
        lib = self._lib
        tokens: list[list[int]] = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        cached, rows = [], []
        for sequence, prompt in enumerate(prompts):
            lib.llama_memory_seq_rm(self._memory, sequence, -1, -1)
            begin = self._take_over(sequence, prompt)
            cached.append(begin)
            last = len(prompt) - 1
            rows += [(prompt[place], place, sequence, place == last) for place in range(begin, len(prompt))]
        for first in range(0, len(rows), self._piece):
            self._step(rows[first : first + self._piece], tokens, logprobs)
        for step in range(output_len - 1):
            places = [(made[-1], len(prompts[i]) + step, i, True) for i, made in enumerate(tokens)]
            self._step(places, tokens, logprobs)
        kept = self._first_kept + len(self._kept) % _KEPT
        lib.llama_memory_seq_rm(self._memory, kept, -1, -1)
        lib.llama_memory_seq_cp(self._memory, 0, kept, 0, len(prompts[0]))
        self._kept.append(prompts[0])
        for sequence in range(len(prompts)):
            lib.llama_memory_seq_rm(self._memory, sequence, -1, -1)
        return list(zip(tokens, logprobs, cached, strict=True))

    def _take_over(self, sequence: int, prompt: list[int]) -> int:
        """Gives the sequence the longest beginning of its prompt that is kept; returns its length."""
        best, source = 0, 0
        for number in range(max(0, len(self._kept) - _KEPT), len(self._kept)):
            common = 0
            for ours, theirs in zip(prompt[:-1], self._kept[number], strict=False):
                if ours != theirs:
                    break
                common += 1
            if common > best:
                best, source = common, self._first_kept + number % _KEPT
        if best:
            self._lib.llama_memory_seq_cp(self._memory, source, sequence, 0, best)
        return best

    def _step(
        self, rows: list[tuple[int, int, int, bool]], tokens: list[list[int]], logprobs: list[list[float]]
    ) -> None:
        """Computes rows of (token, position, sequence, whether its logits are asked for)."""
        import numpy as np

        lib, batch = self._lib, self._batch
        for index, (token, position, sequence, asked) in enumerate(rows):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = asked
        batch.n_tokens = len(rows)
        if lib.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed")
        for index, (_, _, sequence, asked) in enumerate(rows):
            if asked:
                pointer = lib.llama_get_logits_ith(self._context, index)
                logits = np.ctypeslib.as_array(pointer, (self._vocab_size,)).astype(np.float64)
                tokens[sequence].append(int(logits.argmax()))
                # The largest logit less the logarithm of the sum of all exponentials.
                logprobs[sequence].append(float(np.float32(-np.log(np.exp(logits - logits.max()).sum()))))


def load(settings: Settings) -> Engine:
    library = Library(settings)
    return Engine(library.version, library.complete, library.forget)


if __name__ == "__main__":
    serve(load)
