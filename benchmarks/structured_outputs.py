"""What a schema costs: throughput and the time to the first token, beside the same without one.

    python benchmarks/structured_outputs.py MODEL [--sequences 64] [--tokens 128] [--rounds 5] [--out FILE]
    python benchmarks/structured_outputs.py MODEL --peer vllm=VENV [--backend xgrammar] [--backend guidance]

One instance, both kinds in alternating rounds, all sequences at once, each of `--tokens` tokens (the end
is not chosen while the grammar goes on).  Prints tokens per second of both and the median of the rounds'
ratios; then what a request with one token takes, with a schema that the server knows and without.

`--peer vllm=VENV` does the same, in the same rounds, with vLLM's CPU build (`_peers/run_vllm.py` says how
it is installed), once for each backend; who does not run is stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from _engines import engine_environment
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
    parser.add_argument("--peer", metavar="vllm=VENV", help="an environment that has vLLM")
    parser.add_argument("--backend", action="append", help="of vLLM: xgrammar and guidance, if none is given")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    kinds = {"free": None, "schema": StructuredOutputs(json=SHORT)}
    with contextlib.ExitStack() as stack:
        peers = {}
        if arguments.peer:
            kind, _, place = arguments.peer.partition("=")
            if kind != "vllm" or not place or not arguments.model:
                parser.error("--peer: give vllm=VENV, and a model's directory")
            for backend in arguments.backend or ["xgrammar", "guidance"]:
                peer = stack.enter_context(contextlib.closing(Peer(Path(place), arguments.model, backend)))
                peers[f"vLLM {peer.version}, {backend}"] = peer
        llm = stack.enter_context(LLM(arguments.model, max_model_len=512, kv_cache_memory_bytes="2GiB"))
        found = measure(llm, kinds, arguments, peers)
    print(json.dumps(found, indent=2))
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=2) + "\n")


class Peer:
    """vLLM in a process of its own, stopped where nobody asks it."""

    def __init__(self, environment: Path, model: str, backend: str) -> None:
        python = environment / "bin" / "python"
        variables = dict(os.environ)
        variables.pop("PYTHONPATH", None)
        runtime = next(environment.glob("lib/libiomp5.so"), None) or next(
            environment.rglob("libiomp5.so"), None
        )
        if runtime is not None:
            variables["LD_PRELOAD"] = str(runtime.resolve())
        script = Path(__file__).parent / "_peers" / "structured_vllm.py"
        threads = str(len(os.sched_getaffinity(0)))
        self._process = subprocess.Popen(
            [str(python), str(script), str(Path(model).resolve()), backend, threads],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=engine_environment(python),
            text=True,
            start_new_session=True,
        )
        self.version = self._answer()["version"]

    def run(
        self, prompts: list[str], params: SamplingParams, schema: dict[str, Any] | None
    ) -> tuple[int, float]:
        """Tokens and seconds."""
        os.killpg(self._process.pid, signal.SIGCONT)
        names = ("temperature", "seed", "max_tokens")
        sampling = {name: getattr(params, name) for name in names}
        order = {"prompts": prompts, "sampling": sampling, "schema": schema}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        return answer["tokens"], answer["seconds"]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peer ended with {self._process.wait()}; what it said stands above")
        os.killpg(self._process.pid, signal.SIGSTOP)
        return dict(json.loads(line))

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def measure(
    llm: LLM, kinds: dict[str, Any], arguments: argparse.Namespace, peers: Mapping[str, Peer]
) -> dict[str, Any]:
    def baton(prompts: list[str], params: SamplingParams, schema: dict[str, Any] | None) -> tuple[int, float]:
        began = time.perf_counter()
        answers = llm.generate(prompts, params, use_tqdm=False)
        return sum(len(answer.outputs[0].token_ids) for answer in answers), time.perf_counter() - began

    engines = {"Baton": baton, **{name: peer.run for name, peer in peers.items()}}
    rates: dict[str, dict[str, list[float]]] = {name: {kind: [] for kind in kinds} for name in engines}
    firsts: dict[str, dict[str, list[float]]] = {name: {kind: [] for kind in kinds} for name in engines}
    prompts = [f"Write a record of person number {number}." for number in range(arguments.sequences)]
    for number in range(arguments.rounds + 1):  # (the first one warms up)
        for name, run in engines.items():
            for kind, wanted in kinds.items():
                params = SamplingParams(
                    temperature=arguments.temperature,
                    seed=number,
                    max_tokens=arguments.tokens,
                    ignore_eos=True,
                    structured_outputs=wanted,
                )
                schema = None if wanted is None else SHORT
                tokens, seconds = run(prompts, params, schema)
                _, first = run(prompts[:1], params.replace(max_tokens=1), schema)
                if number:
                    rates[name][kind].append(tokens / seconds)
                    firsts[name][kind].append(first)
    found: dict[str, Any] = {"sequences": arguments.sequences, "tokens": arguments.tokens}
    for name in engines:
        ratios = [a / b for a, b in zip(rates[name]["schema"], rates[name]["free"], strict=True)]
        later = [a - b for a, b in zip(firsts[name]["schema"], firsts[name]["free"], strict=True)]
        found[name] = {
            "tokens_per_second": {k: round(statistics.median(v), 1) for k, v in rates[name].items()},
            "ratio": round(statistics.median(ratios), 4),
            "ratios": [round(ratio, 4) for ratio in ratios],
            "one_token_ms": {k: round(1000 * statistics.median(v), 2) for k, v in firsts[name].items()},
            "later_ms": round(1000 * statistics.median(later), 2),
        }
        if name != "Baton":
            ahead = [a / b for a, b in zip(rates["Baton"]["schema"], rates[name]["schema"], strict=True)]
            found[name]["baton_is_faster"] = round(statistics.median(ahead), 2)
    return found


if __name__ == "__main__":
    main()
