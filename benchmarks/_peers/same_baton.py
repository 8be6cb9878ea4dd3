"""Baton's answers, through its Python API."""

from __future__ import annotations

from same_answering import Answer, Engine, Settings, serve

import baton
from baton import LLM, SamplingParams


def load(settings: Settings) -> Engine:
    llm = LLM(
        settings.model,
        dtype=settings.dtype,
        num_threads=settings.threads,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=settings.max_model_len,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        kv_cache_memory_bytes=settings.kv_cache_bytes,
        enable_prefix_caching=True,
    )

    def complete(prompts: list[list[int]], output_len: int) -> list[Answer]:
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, logprobs=0)
        answers = []
        for result in llm.generate(prompts, params, use_tqdm=False):
            output = result.outputs[0]
            logprobs = [step.logprob for step in output.logprobs]
            answers.append((list(output.token_ids), logprobs, result.num_cached_tokens))
        return answers

    def forget() -> None:
        background = llm._background
        background.call(background._client.query("reset_prefix_cache"))

    return Engine(baton.__version__, complete, forget)


if __name__ == "__main__":
    serve(load)
