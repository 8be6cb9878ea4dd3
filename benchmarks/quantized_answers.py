"""Greedy answers of quantized models beside float32 models with the dequantized weights.

    python benchmarks/quantized_answers.py [MODEL …] [--prompts 16] [--prompt-len 32] [--tokens 64]

MODEL is a directory or a GGUF file (default: the embedded model); one in floating point is quantized to int4
in groups of 32, 64 and 128, one that is quantized is taken as it is.  The reference is a float32 model with
the dequantized weights.  The last columns are the error of the logits (root mean square), that of the same
reference with the activations of every product rounded to bytes (what 8-bit activations alone explain), and
the first of them over the standard deviation of the logits.

`--llama VENV` (which has llama-cpp-python, gguf, numpy) also gives the answers to GGUF files to llama.cpp,
token by token: how many answers are its own from first to last, where it has another most likely token, and
the errors of logits: ours from its, and of both from the dequantized weights in float32.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from _common import Table, machine, print_machine, write_json
from _llama_cpp import LlamaCpp
from baton import LLM, SamplingParams
from baton.bench.answers import AnswersCompared, compare_answers
from baton.executor.scoring import TextScorer
from baton.launch.arguments import choose_arguments
from baton.launch.planning.plan import ServerPlan, make_plan
from baton.model.checkpoint.config import ModelConfig
from baton.protocol.config import InstanceConfig

_FIRST_ID = 10
_CONTEXT = 512
_BESIDE = (
    "model",
    "answers equal",
    "positions differ",
    "largest margin",
    "error, from it",
    "ours",
    "its",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-len", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--llama", type=Path, metavar="VENV", help="compare with llama.cpp, too")
    parser.add_argument("--tokenizer", help="for GGUF files without one")
    parser.add_argument("--output-json", type=Path)
    arguments = parser.parse_args()
    print_machine(machine())
    columns = (
        "model",
        "positions",
        "differ",
        "first",
        "largest margin",
        "error",
        "of bytes alone",
        "relative",
    )
    table = Table("Greedy answers beside the dequantized weights in float32", columns)
    others = Table("The same answers beside llama.cpp", _BESIDE)
    results: list[dict[str, Any]] = []
    for model in arguments.models or [None]:
        for name, plan in _forms(model, arguments.tokenizer):
            answers = _answers(plan, arguments)
            found, bytes_alone = _compared(plan, answers)
            cells = (found.margin, found.error, bytes_alone.error)
            table.row(
                name,
                found.positions,
                found.different,
                found.first,
                *(f"{cell:.4f}" for cell in cells),
                f"{found.relative:.2%}",
            )
            result = {"model": name, **asdict(found), "error_of_bytes": bytes_alone.error}
            if arguments.llama is not None and plan.instance.model.endswith(".gguf"):
                ours, its_error = _beside_llama_cpp(plan, answers, arguments.llama)
                others.row(
                    name,
                    f"{ours.equal} of {ours.answers}",
                    f"{ours.different} of {ours.positions}",
                    *(f"{cell:.4f}" for cell in (ours.margin, ours.error, found.error, its_error)),
                )
                result |= {"llama.cpp": asdict(ours) | {"its_error": its_error}}
            results.append(result)
    table.print()
    if arguments.llama is not None:
        others.print()
    if arguments.output_json is not None:
        write_json(arguments.output_json, {"machine": machine(), "results": results})


def _forms(model: str | None, tokenizer: str | None) -> list[tuple[str, ServerPlan]]:
    """What is compared, by names."""
    name = "baton-tiny" if model is None else Path(model).name
    plan = _plan(model, tokenizer=tokenizer)
    if ModelConfig.from_directory(plan.instance.model).quantization is not None:
        return [(name, plan)]
    return [
        (
            f"{name}, int4 / {group}",
            _plan(model, tokenizer=tokenizer, quantization="int4", quantization_group_size=group),
        )
        for group in (32, 64, 128)
    ]


def _plan(model: str | None, **flags: Any) -> ServerPlan:
    given = {"model": model, "dtype": "float32", "max_model_len": _CONTEXT, "log_level": "warning", **flags}
    return make_plan(choose_arguments(given).options)


def _answers(plan: ServerPlan, arguments: argparse.Namespace) -> list[tuple[list[int], list[int]]]:
    params = SamplingParams(temperature=0.0, max_tokens=arguments.tokens, ignore_eos=True)
    shape = (arguments.prompts, arguments.prompt_len)
    ids = np.random.default_rng(0).integers(_FIRST_ID, plan.served.vocab_size, shape)
    prompts = [[int(token) for token in prompt] for prompt in ids]
    with LLM.planned(plan) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    return [
        (prompt, list(output.outputs[0].token_ids)) for prompt, output in zip(prompts, outputs, strict=True)
    ]


def _compared(
    plan: ServerPlan, answers: list[tuple[list[int], list[int]]]
) -> tuple[AnswersCompared, AnswersCompared]:
    """The model, and the reference with rounded activations, beside the reference."""
    config = _alone(plan)
    with ExitStack() as stack:
        model, bytes_alone, reference = (
            stack.enter_context(closing(TextScorer.from_config(config, 0, ""))) for _ in range(3)
        )
        bytes_alone.expand(rounded=True)
        reference.expand()
        return (
            compare_answers(answers, model, reference),
            compare_answers(answers, bytes_alone, reference),
        )


def _beside_llama_cpp(
    plan: ServerPlan, answers: list[tuple[list[int], list[int]]], environment: Path
) -> tuple[AnswersCompared, float]:
    """Our model beside llama.cpp, and llama.cpp's error from the dequantized weights."""
    with ExitStack() as stack:
        model, exact = (
            stack.enter_context(closing(TextScorer.from_config(_alone(plan), 0, ""))) for _ in range(2)
        )
        exact.expand()
        other = stack.enter_context(closing(LlamaCpp(environment, Path(plan.instance.model), _CONTEXT)))
        return compare_answers(answers, model, other), compare_answers(answers, other, exact).error


def _alone(plan: ServerPlan) -> InstanceConfig:
    """For one text at a time."""
    blocks = -(-_CONTEXT // plan.instance.block_size) + 1
    return msgspec.structs.replace(plan.instance, max_num_seqs=1, num_blocks=blocks)


if __name__ == "__main__":
    main()
