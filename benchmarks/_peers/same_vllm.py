"""vLLM's answers, of its CPU build (`run_vllm.py` says what to install)."""

from __future__ import annotations

import os

from same_answering import Answer, Engine, Settings, serve


def load(settings: Settings) -> Engine:
    cores = sorted(os.sched_getaffinity(0))[: settings.threads]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, settings.kv_cache_bytes >> 30))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    import vllm

    llm = vllm.LLM(
        settings.model,
        dtype=settings.dtype,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=settings.max_model_len,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
    )

    def complete(prompts: list[list[int]], output_len: int) -> list[Answer]:
        params = vllm.SamplingParams(
            temperature=0.0, max_tokens=output_len, ignore_eos=True, logprobs=0, detokenize=False
        )
        answers = []
        for result in llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False):
            output = result.outputs[0]
            ids = list(output.token_ids)
            logprobs = [step[id].logprob for id, step in zip(ids, output.logprobs, strict=True)]
            answers.append((ids, logprobs, result.num_cached_tokens))
        return answers

    def forget() -> None:
        if not llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache")

    return Engine(vllm.__version__, complete, forget)


if __name__ == "__main__":
    serve(load)
