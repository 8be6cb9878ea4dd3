"""Vectors from llama.cpp, through its Python build (see `run_llama_cpp.py`): last token, normalized here."""

from __future__ import annotations

from answering import Loaded, Settings, answer
from gguf_files import weight_bytes
from run_llama_cpp import BATCH, open_model
from vectors import keep


def load(settings: Settings) -> Loaded:
    lib, model, path = open_model(settings)
    import numpy as np

    size = lib.llama_model_n_embd(model)
    params = lib.llama_context_default_params()
    params.n_seq_max = min(BATCH // 16, lib.llama_max_parallel_sequences())
    params.n_ctx = params.n_batch = params.n_ubatch = BATCH
    params.kv_unified = True
    params.embeddings = True
    params.pooling_type = lib.LLAMA_POOLING_TYPE_LAST
    params.n_threads = params.n_threads_batch = settings.threads
    context = lib.llama_init_from_model(model, params)
    batch = lib.llama_batch_init(BATCH, 0, 1)

    def compute(prompts: list[list[int]]) -> list[list[float]]:
        place = 0
        for sequence, prompt in enumerate(prompts):
            for position, token in enumerate(prompt):
                batch.token[place] = token
                batch.pos[place] = position
                batch.n_seq_id[place] = 1
                batch.seq_id[place][0] = sequence
                batch.logits[place] = True
                place += 1
        batch.n_tokens = place
        lib.llama_memory_clear(lib.llama_get_memory(context), False)
        if lib.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        found = []
        for sequence in range(len(prompts)):
            vector = np.ctypeslib.as_array(lib.llama_get_embeddings_seq(context, sequence), (size,))
            found.append((vector / np.linalg.norm(vector)).tolist())
        return found

    def complete(prompts: list[list[int]], _: int) -> int:
        found: list[list[float]] = []
        together = max(1, min(BATCH // max(map(len, prompts)), params.n_seq_max))
        for first in range(0, len(prompts), together):
            found += compute(prompts[first : first + together])
        keep(settings, "llama.cpp", found[:4])
        return len(found)

    return Loaded(lib.__version__, complete, weight_bytes(path))


if __name__ == "__main__":
    answer(load)
