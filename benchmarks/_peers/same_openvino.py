"""OpenVINO GenAI's answers (`run_openvino.py` says what to install).

Its prefix cache cannot be emptied, so a fresh start is a new pipeline of the model that is compiled already
(its cache directory).  It computes in float32 or, told so, in bfloat16.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from run_openvino import convert
from same_answering import Answer, Engine, Settings, serve


def load(settings: Settings) -> Engine:
    import numpy as np
    import openvino
    import openvino_genai

    directory = convert(
        SimpleNamespace(
            model=settings.model,
            converted=settings.converted,
            dtype="bfloat16",
            quantization=None,
            quantization_group_size=None,
        )
    )
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = max(1, settings.kv_cache_bytes >> 30)
    scheduler.max_num_seqs = settings.max_num_seqs
    scheduler.max_num_batched_tokens = settings.max_num_batched_tokens
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = True
    exact = settings.dtype == "float32"
    properties = {
        "INFERENCE_NUM_THREADS": settings.threads,
        "INFERENCE_PRECISION_HINT": "f32" if exact else "bf16",
        "KV_CACHE_PRECISION": "f32" if exact else "bf16",
        "CACHE_DIR": str(Path(settings.converted) / "compiled"),
    }
    pipeline: Any = None

    def forget() -> None:
        nonlocal pipeline
        pipeline = None
        pipeline = openvino_genai.ContinuousBatchingPipeline(str(directory), scheduler, "CPU", properties)

    def complete(prompts: list[list[int]], output_len: int) -> list[Answer]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = output_len
        config.ignore_eos = True
        config.do_sample = False
        config.logprobs = 1
        handles = [
            pipeline.add_request(number, openvino.Tensor(np.array([ids], dtype=np.int64)), config)
            for number, ids in enumerate(prompts)
        ]
        while pipeline.has_non_finished_requests():
            pipeline.step()
        answers = []
        for handle in handles:
            output = handle.read_all()[0]
            answers.append((list(output.generated_ids), list(output.generated_log_probs), None))
        return answers

    forget()
    return Engine(openvino_genai.__version__, complete, forget)


if __name__ == "__main__":
    serve(load)
