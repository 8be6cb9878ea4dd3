"""What a schema costs: throughput and the time to the first token, beside the same without one.

    python benchmarks/structured_outputs.py MODEL [--sequences 64] [--tokens 128] [--rounds 5] [--out FILE]

One instance, both kinds in alternating rounds, all sequences at once, each of `--tokens` tokens (the end
is not chosen while the grammar goes on).  Prints tokens per second of both and the median of the rounds'
ratios; then what a request with one token takes, with a schema that the server knows and without.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from baton.llm import LLM, SamplingParams, StructuredOutputs

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "summary": {"type": "string"},
        "people": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 40},
                    "age": {"type": "integer", "minimum": 0, "maximum": 130},
                    "email": {"type": "string", "format": "email"},
                    "role": {"enum": ["admin", "editor", "reader"]},
                    "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 6},
                    "address": {
                        "type": "object",
                        "properties": {
                            "street": {"type": "string"},
                            "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
                            "country": {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]},
                        },
                        "required": ["street", "zip", "country"],
                        "additionalProperties": False,
                    },
                },
                "required": ["name", "age", "email", "role", "tags", "address"],
                "additionalProperties": False,
            },
            "minItems": 2,
            "maxItems": 20,
        },
        "score": {"type": "number", "minimum": 0, "maximum": 1},
        "created": {"type": "string", "format": "date-time"},
    },
    "required": ["summary", "people", "score", "created"],
    "additionalProperties": False,
}
SHORT = {**SCHEMA, "properties": {**SCHEMA["properties"], "summary": {"type": "string", "maxLength": 20}}}
"""So that an answer gets to the other properties soon."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    kinds = {"free": None, "schema": StructuredOutputs(json=SHORT)}
    with LLM(arguments.model, max_model_len=512, kv_cache_memory_bytes="2GiB") as llm:
        found = measure(llm, kinds, arguments)
    print(json.dumps(found, indent=2))
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=2) + "\n")


def measure(llm: LLM, kinds: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    rates: dict[str, list[float]] = {name: [] for name in kinds}
    firsts: dict[str, list[float]] = {name: [] for name in kinds}
    prompts = [f"Write a record of person number {number}." for number in range(arguments.sequences)]
    for number in range(arguments.rounds + 1):  # (the first one warms up)
        for name, wanted in kinds.items():
            params = SamplingParams(
                temperature=arguments.temperature,
                seed=number,
                max_tokens=arguments.tokens,
                ignore_eos=True,
                structured_outputs=wanted,
            )
            began = time.perf_counter()
            answers = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - began
            tokens = sum(len(answer.outputs[0].token_ids) for answer in answers)
            one = params.replace(max_tokens=1)
            began = time.perf_counter()
            llm.generate(prompts[number], one, use_tqdm=False)
            if number:
                rates[name].append(tokens / seconds)
                firsts[name].append(time.perf_counter() - began)
    ratios = [schema / free for schema, free in zip(rates["schema"], rates["free"], strict=True)]
    later = [schema - free for schema, free in zip(firsts["schema"], firsts["free"], strict=True)]
    return {
        "sequences": arguments.sequences,
        "tokens_per_second": {name: round(statistics.median(values), 1) for name, values in rates.items()},
        "ratio": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "one_token_ms": {name: round(1000 * statistics.median(each), 2) for name, each in firsts.items()},
        "later_ms": round(1000 * statistics.median(later), 2),
    }


if __name__ == "__main__":
    main()
