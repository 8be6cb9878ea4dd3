"""Baton, through its Python API."""

from __future__ import annotations

from answering import Complete, Settings, answer

import baton
from baton import LLM, SamplingParams


def load(settings: Settings) -> tuple[str, Complete]:
    options = {} if settings.quantization is None else {"quantization": settings.quantization}
    llm = LLM(
        settings.model,
        dtype=settings.dtype,
        num_threads=settings.threads,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=settings.max_model_len,
        kv_cache_memory_bytes=settings.kv_cache_bytes,
        enable_prefix_caching=False,
        **options,
    )

    def complete(prompts: list[list[int]], output_len: int) -> int:
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        results = llm.generate(prompts, params, use_tqdm=False)
        return sum(len(result.outputs[0].token_ids) for result in results)

    return baton.__version__, complete


if __name__ == "__main__":
    answer(load)
