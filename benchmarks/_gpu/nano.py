"""nano-vllm's benchmark, its seeds and lengths, through Baton's whole offline path: `LLM.generate`.

256 prompts of 100 to 1,024 random tokens, answers of 100 to 1,024, temperature 0.6 (bench.py of
GeeeekExplorer/nano-vllm).  A checkpoint of Qwen3-0.6B's shape with random numbers is written first, 1.2 GB,
because the instance is a process that reads one.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path

import torch

from _gpu.figures import Figures
from _gpu.measuring import Device
from _gpu.models import shape_of, write_checkpoint

GOAL = 20_000.0
"""Output tokens a second, on one H100."""


def workload(sequences: int, least: int, most: int, vocab: int) -> tuple[list[list[int]], list[int]]:
    """Prompts and lengths of answers, in the order in which that benchmark draws them."""
    numbers = random.Random(0)
    prompts = [
        [numbers.randint(0, vocab) for _ in range(numbers.randint(least, most))] for _ in range(sequences)
    ]
    return prompts, [numbers.randint(least, most) for _ in range(sequences)]


def measure_nano(device: Device, figures: Figures) -> None:
    from baton import LLM, SamplingParams

    tiny = device.tiny
    prompts, lengths = workload(*((3, 4, 9, 500) if tiny else (256, 100, 1024, 10_000)))
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        write_checkpoint(Path(folder), shape_of("qwen3-0.6b", tiny), device.device)
        if device.device.type == "cuda":
            torch.cuda.empty_cache()  # the instance, another process, takes its share of what is free
        figures.add("checkpoint written", seconds=time.perf_counter() - begin)
        begin = time.perf_counter()
        with LLM(
            folder,
            device=device.device.type,
            max_model_len=64 if tiny else 4096,
            max_num_seqs=4 if tiny else 256,
            num_gpu_blocks_override=32 if tiny else None,
            speculation="off",
        ) as llm:
            figures.add("instance started", seconds=time.perf_counter() - begin)
            params = [
                SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=length) for length in lengths
            ]
            # The first round compiles and records; the second is the figure.  Its prompts are others: nothing
            # of them is in the KV cache.
            others = [[token + 1 for token in prompt] for prompt in prompts]
            for asked in [prompts] if tiny else [others, prompts]:
                begin = time.perf_counter()
                answers = llm.generate(asked, params, use_tqdm=False)
                seconds = time.perf_counter() - begin
                told = sum(len(answer.outputs[0].token_ids) for answer in answers)
                assert told == sum(lengths), (told, sum(lengths))
                rate = told / seconds
                figures.add(
                    f"{len(prompts)} sequences, {told} output tokens",
                    seconds=seconds,
                    rate=rate,
                    unit="output tokens/s",
                    goal="" if tiny else f"≥ {GOAL:,.0f}",
                    reached=None if tiny else rate >= GOAL,
                )
