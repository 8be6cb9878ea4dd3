"""vLLM's CPU build with schemas, for `structured_outputs.py`: MODEL BACKEND THREADS, orders in JSON lines."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    model, backend, threads = sys.argv[1:]
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    cores = sorted(os.sched_getaffinity(0))[: int(threads)]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "2"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    import vllm
    from vllm.sampling_params import StructuredOutputsParams

    llm = vllm.LLM(
        model,
        dtype="bfloat16",
        max_num_seqs=64,
        max_model_len=512,
        enable_prefix_caching=False,
        structured_outputs_config={"backend": backend},
    )

    def reply(**content: Any) -> None:
        replies.write(json.dumps(content) + "\n")
        replies.flush()

    reply(version=vllm.__version__)
    for line in sys.stdin:
        order = json.loads(line)
        schema = order.pop("schema")
        params = vllm.SamplingParams(
            **order.pop("sampling"),
            ignore_eos=True,
            structured_outputs=None if schema is None else StructuredOutputsParams(json=schema),
        )
        began = time.perf_counter()
        answers = llm.generate(order["prompts"], params, use_tqdm=False)
        seconds = time.perf_counter() - began
        reply(seconds=seconds, tokens=sum(len(answer.outputs[0].token_ids) for answer in answers))


if __name__ == "__main__":
    main()
