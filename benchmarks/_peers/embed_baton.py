"""Vectors from Baton, through its Python API."""

from __future__ import annotations

from answering import Loaded, Settings, answer
from vectors import keep

import baton
from baton import LLM


def load(settings: Settings) -> Loaded:
    llm = LLM(
        settings.model,
        runner="pooling",
        dtype=settings.dtype,
        quantization=settings.quantization,
        num_threads=settings.threads,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=settings.max_model_len,
        kv_cache_memory_bytes=settings.kv_cache_bytes,
        enable_prefix_caching=False,
    )

    def complete(prompts: list[list[int]], _: int) -> int:
        results = llm.embed(prompts, use_tqdm=False)
        keep(settings, "baton", [result.outputs.embedding for result in results[:4]])
        return len(results)

    return Loaded(baton.__version__, complete)


if __name__ == "__main__":
    answer(load)
