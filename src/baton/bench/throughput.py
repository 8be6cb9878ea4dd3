"""Offline throughput: all requests are there at once, no server and no client in between.

The time is that of one `LLM.generate` call: from the first prompt handed over to the last token received,
scheduling and the messages between processes included, loading and warm-up not.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from baton.bench.workload import Request, random_requests
from baton.launch.planning.plan import ServerPlan
from baton.llm import LLM, SamplingParams

_WARM_UP_OUTPUT = 8


@dataclass(frozen=True, slots=True)
class Throughput:
    """One measurement.  Names as in the JSON of vLLM's command where it has them."""

    num_requests: int
    total_input_tokens: int
    total_output_tokens: int
    elapsed_time: float
    """Seconds of the call."""
    load_time: float
    """Seconds from the start of the processes until the instance serves."""

    @property
    def requests_per_second(self) -> float:
        return self.num_requests / self.elapsed_time

    @property
    def output_tokens_per_second(self) -> float:
        return self.total_output_tokens / self.elapsed_time

    @property
    def tokens_per_second(self) -> float:
        """Prompt and output tokens."""
        return (self.total_input_tokens + self.total_output_tokens) / self.elapsed_time

    def as_dict(self) -> dict[str, Any]:
        rates = ("requests_per_second", "tokens_per_second", "output_tokens_per_second")
        return asdict(self) | {name: getattr(self, name) for name in rates}

    def as_text(self) -> str:
        """The rates are the last line."""
        return (
            f"Load time: {self.load_time:.2f} s\n"
            f"Elapsed time: {self.elapsed_time:.3f} s for {self.num_requests} requests\n"
            f"Total num prompt tokens: {self.total_input_tokens}\n"
            f"Total num output tokens: {self.total_output_tokens}\n"
            f"Throughput: {self.requests_per_second:.2f} requests/s, {self.tokens_per_second:.2f} total "
            f"tokens/s, {self.output_tokens_per_second:.2f} output tokens/s"
        )


def measure_throughput(
    plan: ServerPlan,
    requests: list[Request],
    *,
    vocab_size: int,
    num_warmups: int,
    seed: int,
) -> Throughput:
    """Starts an instance as planned, completes `requests`, stops it.

    Before the clock starts, `num_warmups` other requests, with prompts as long as the first one's, are
    completed up to eight tokens.  Raises what `LLM` raises, and `RuntimeError` if an answer is too short.
    """
    began = time.perf_counter()
    with LLM.planned(plan) as llm:
        loaded = time.perf_counter()
        if num_warmups:
            size = len(requests[0].prompt)
            _complete(llm, random_requests(num_warmups, size, _WARM_UP_OUTPUT, vocab_size, seed + 1))
        elapsed = _complete(llm, requests)
    return Throughput(
        num_requests=len(requests),
        total_input_tokens=sum(len(request.prompt) for request in requests),
        total_output_tokens=sum(request.output_len for request in requests),
        elapsed_time=elapsed,
        load_time=loaded - began,
    )


def _complete(llm: LLM, requests: list[Request]) -> float:
    """Seconds that it took."""
    params = [
        SamplingParams(max_tokens=request.output_len, temperature=0.0, ignore_eos=True)
        for request in requests
    ]
    prompts = [request.prompt for request in requests]
    start = time.perf_counter()
    results = llm.generate(prompts, params, use_tqdm=False)
    elapsed = time.perf_counter() - start
    for request, result in zip(requests, results, strict=True):
        if (got := len(result.outputs[0].token_ids)) != request.output_len:
            raise RuntimeError(f"an answer has {got} tokens instead of {request.output_len}")
    return elapsed
