"""What speculation gains, and what it costs where it gains nothing: tokens per second against
`--speculation off`.

    python benchmarks/speculation.py DIRECTORY [--quantization int8|int4] [--rounds 5] [CASE …]

DIRECTORY: a checkpoint, e.g. of `tools/make_checkpoint.py --shape ernie-0.3b`; what is trained
(quoting, JSON) is measured with the embedded model, whatever DIRECTORY is. The executor and the
worker's slots run alone, without an engine. Each case is run with and without drafts in turn,
`--rounds` times; the table has medians of the rounds and the ratio of each pair. Answers are compared:
a difference is an error.

*Planted* guesses know the answer, from a run without drafts, and err on purpose, each draft by itself
with the same chance; how many of them are computed `auto` decides, as of any guess. `never right` errs
always; `nothing found` draws tokens at random, so that neither the request's own text nor others' answers
say what follows.

*Again*: an earlier request of the same cache salt was answered the same, or to the same form with other
numbers; in all other cases each run has a salt of its own.

`--draft-model DIRECTORY` adds the cases with a draft model: its steps are computed, so they cost what they
cost, and what they say is replaced by the answer, or with the case's chance by something else. So these
cases show what a draft model of that size gains where so many of its drafts are right; how many are, only
models can tell that were trained. A checkpoint with an MTP layer (`tools/make_checkpoint.py --shape
ernie-21b-a3b --mtp`) has the same cases of that layer.

`--cpu-time` counts CPU time of the calling thread instead of the wall clock: with `--threads 1` it says
what the work takes even while others use the machine (how many drafts there are, the wall clock decides
all the same).

`--peer NAME=VENV` measures that instead: n-gram drafts of Baton and of other engines (`_beside.py`).

After the table: the cost of a step by its tokens, as `auto` has measured it.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from _beside import compare, parse_beside, quoting_checkpoint
from _common import Table, machine, print_machine, write_json
from _planted import Answers, Planted, PlantedModel, PlantedMtp
from baton.drafting.cost import StepCost
from baton.drafting.drafter import ChoosingDrafter
from baton.drafting.models.model_drafter import ModelDrafter
from baton.drafting.models.mtp_drafter import MtpDrafter
from baton.executor.torch_executor import TorchExecutor
from baton.gateway.text.tokenizer import Tokenizer
from baton.gateway.text.vocabulary import vocabulary_of
from baton.grammar.checking import Checker
from baton.grammar.description import Json, Structure
from baton.launch.planning.instance_config import instance_config
from baton.model.checkpoint.config import ModelConfig
from baton.model.checkpoint.hub import resolve_model
from baton.protocol.codec import pack_int32
from baton.protocol.config import Speculation
from baton.protocol.messages.commands import Admit
from baton.protocol.params.sampling import Constraint, Sampling, Stopping
from baton.protocol.rules.prefix_keys import root_key
from baton.worker.slots.outcome import Admitted
from baton.worker.slots.slots import Slots

BLOCK = 64
MOST_DRAFTS = Speculation(method="auto").num_speculative_tokens
BENCHES = {"quoting": "embedded", "json": "embedded"}
"""What measures cases of a kind, if it is not called so."""
SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 4,
    "maxItems": 4,
    "items": {
        "type": "object",
        "properties": {
            "identifier": {"type": "integer", "minimum": 100, "maximum": 999},
            "is_available": {"type": "boolean"},
            "delivery_address": {
                "type": "object",
                "properties": {
                    "street_number": {"type": "integer", "minimum": 1, "maximum": 99},
                    "postal_code": {"type": "integer", "minimum": 10000, "maximum": 99999},
                },
                "required": ["street_number", "postal_code"],
                "additionalProperties": False,
            },
        },
        "required": ["identifier", "is_available", "delivery_address"],
        "additionalProperties": False,
    },
}


@dataclass(frozen=True)
class Case:
    """`source`: the chance that a planted draft is right, or None: the product's own drafter."""

    name: str
    rows: int
    tokens: int
    goal: float
    source: float | None = None
    temperature: float = 0.0
    kind: str = "random"
    again: bool = False


CASES = {
    case.name: case
    for case in (
        Case("planted 90 %", 1, 160, 2.5, 0.9),
        Case("planted 60 %", 1, 160, 1.6, 0.6),
        Case("quotes its prompt", 1, 192, 1.8, kind="quoting"),
        Case("never right", 1, 160, 0.98, 0.0),
        Case("nothing found", 1, 160, 0.98, temperature=1.0),
        Case("64 rows, never right", 64, 48, 0.99, 0.0),
        Case("64 rows, nothing found", 64, 48, 0.99, temperature=1.0),
        Case("64 rows, planted 90 %", 64, 48, 1.0, 0.9),
        Case("JSON of a schema", 1, 400, 1.5, kind="json"),
        Case("the same answer again", 1, 160, 1.8, temperature=1.0, again=True),
        Case("JSON again, other numbers", 1, 400, 1.5, temperature=1.0, kind="json", again=True),
        Case("draft model, 80 % right", 1, 160, 1.0, 0.8, kind="draft"),
        Case("draft model, never right", 1, 160, 0.97, 0.0, kind="draft"),
        Case("64 rows, draft model, 80 % right", 64, 48, 0.98, 0.8, kind="draft"),
        Case("MTP, 80 % right", 1, 160, 1.0, 0.8, kind="mtp"),
        Case("MTP, never right", 1, 160, 0.97, 0.0, kind="mtp"),
        Case("64 rows, MTP, 80 % right", 64, 48, 0.98, 0.8, kind="mtp"),
    )
}


class Bench:
    """One loaded model."""

    def __init__(
        self,
        directory: Path,
        given: argparse.Namespace,
        rows: int,
        longest: int,
        speculation: Speculation | None = None,
    ) -> None:
        """`speculation` None: `auto`."""
        self.tokenizer = Tokenizer.from_directory(directory)
        self.vocab = ModelConfig.from_directory(str(directory)).vocab_size
        self._folder = tempfile.TemporaryDirectory()
        vocabulary = Path(self._folder.name) / "vocabulary"
        vocabulary.write_bytes(vocabulary_of(self.tokenizer).encode())
        self.longest = longest
        self.blocks = -(-longest // BLOCK)
        self.config = instance_config(
            model=str(directory.absolute()),
            max_model_len=longest,
            dtype=given.dtype,
            quantization=given.quantization,
            block_size=BLOCK,
            num_blocks=rows * self.blocks + 1,
            max_num_seqs=rows,
            num_threads=given.threads,
            vocabulary=str(vocabulary),
            speculation=speculation
            or Speculation(method="auto", suffix_decoding_max_cached_requests=given.kept),
        )
        self.executor = TorchExecutor.from_config(self.config, 0, "")
        self._speculator = self.executor.speculator
        assert self._speculator is not None
        self._own = self._speculator.drafter
        self.planted: Answers | None = None
        if isinstance(self._own, ModelDrafter | MtpDrafter):
            self.planted = Answers(self.blocks, self.vocab)
        if isinstance(self._own, ModelDrafter):
            self._own._model = PlantedModel(self._own._model, self.planted)
        elif isinstance(self._own, MtpDrafter):
            self._own._model = PlantedMtp(self._own._model, self.planted)
        self._clock = time.thread_time if given.cpu_time else time.perf_counter
        self.cost = StepCost(rows * (1 + MOST_DRAFTS))
        """What planted drafters have measured."""
        self._runs = 0

    def use(self, drafter: Any) -> None:
        """None: as with `--speculation off`."""
        assert self._speculator is not None
        self.executor.speculator = self.executor._sampler.speculator = self._speculator
        self._speculator.drafter = self._own if drafter == "own" else drafter
        if drafter is None:
            self.executor.speculator = self.executor._sampler.speculator = None

    def run(
        self, prompts: list[list[int]], case: Case, constraint: Constraint | None, seed: int = 0
    ) -> tuple[list[list[int]], float, int, int]:
        """Answers; seconds of the steps after the prompts; their tokens; and how many steps."""
        self._runs += 1
        salt = case.name if case.again else f"run {self._runs}"
        slots = Slots(
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=4096,
            max_model_len=self.longest,
            block_size=BLOCK,
            num_blocks=self.config.num_blocks or 0,
        )
        stops = (self.tokenizer.eos_token_id,) if case.kind == "json" else ()
        stopping = Stopping(case.tokens, stop_token_ids=tuple(stops))
        for slot, prompt in enumerate(prompts):
            sampling = Sampling(slot + 1 + 1000 * seed, temperature=case.temperature, constraint=constraint)
            blocks = range(slot * self.blocks, (slot + 1) * self.blocks)
            what = pack_int32(prompt), len(prompt), 0, pack_int32(blocks), sampling, stopping
            effect = slots.apply(Admit(slot, 1, *what, salt=root_key(salt)))
            assert isinstance(effect, Admitted)
            self.executor.admit(*effect)
        answers: list[list[int]] = [[] for _ in prompts]
        seconds, tokens, steps = 0.0, 0, 0
        while (begin := self._clock()) and (batch := slots.compose(1)) is not None:
            outcome = slots.commit(batch, self.executor.execute(batch))
            for closed in outcome.closings:
                assert closed.reason.value in ("length", "stop"), closed
                self.executor.release(closed.slot)
            took = self._clock() - begin
            if batch.num_decodes or batch.drafts is not None:
                seconds, tokens, steps = seconds + took, tokens + len(outcome.tokens), steps + 1
            for slot, token in zip(outcome.slots.tolist(), outcome.tokens.tolist(), strict=True):
                answers[slot].append(token)
        return answers, seconds, tokens, steps


def prompts_of(case: Case, bench: Bench) -> tuple[list[list[int]], Constraint | None]:
    random = np.random.default_rng(5)
    if case.kind == "json":
        grammar = Checker(bench.tokenizer.special_names).check(Structure(Json(SCHEMA)))
        text = "List four orders as JSON. " + json.dumps(SCHEMA)
        return [bench.tokenizer.encode(text)], Constraint(grammar)
    if case.kind == "quoting":
        text = random.integers(300, bench.vocab - 50, case.tokens + 8).tolist()
        return [[*text, *text[:8]]], None
    return [random.integers(300, bench.vocab - 50, 64).tolist() for _ in range(case.rows)], None


def measure(case: Case, bench: Bench, rounds: int) -> dict[str, Any]:
    prompts, constraint = prompts_of(case, bench)
    bench.use(None)
    answers = bench.run(prompts, case, constraint)[0]
    drafter: Any = "own"
    if bench.planted is not None:
        bench.planted.texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        bench.planted.right = case.source or 0.0
    elif case.source is not None:
        planted = Planted(answers, case.source, bench.vocab, MOST_DRAFTS)
        drafter = ChoosingDrafter(planted, cost=bench.cost)
    bench.use(drafter)
    bench.run(prompts, case, constraint)  # costs are learnt
    found: dict[str, list[float]] = {"off": [], "on": []}
    steps = 0
    for number in range(rounds):
        seed = number + 1 if case.kind == "json" and case.again else 0
        given: dict[str, list[list[int]]] = {}
        for mode in ("off", "on") if number % 2 else ("on", "off"):
            bench.use(None if mode == "off" else drafter)
            given[mode], seconds, tokens, count = bench.run(prompts, case, constraint, seed)
            found[mode].append(tokens / seconds)
            if mode == "on":
                steps, total = count, tokens
        if given["on"] != given["off"] or (not seed and given["on"] != answers):
            raise SystemExit(f"{case.name}: answers with and without drafts differ")
    ratios = [on / off for on, off in zip(found["on"], found["off"], strict=True)]
    return {
        "case": case.name,
        "goal": case.goal,
        "off tokens/s": statistics.median(found["off"]),
        "on tokens/s": statistics.median(found["on"]),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "tokens a step and row": total / steps / case.rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory")
    parser.add_argument("cases", nargs="*", help=", ".join(CASES).replace("%", "%%"))
    parser.add_argument("--quantization", choices=["int8", "int4"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--draft-model", metavar="DIRECTORY")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kept", type=int, default=10000, help="answers kept for other requests")
    parser.add_argument(
        "--peer",
        type=parse_beside,
        action="append",
        default=[],
        metavar="NAME=VENV[,METHOD]",
        help="beside vllm or llama-server; repeatable, also with several methods",
    )
    parser.add_argument("--out")
    given = parser.parse_intermixed_args()
    facts = machine()
    print_machine(facts)
    if given.peer:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the engines are closed
        place = Path(given.directory + "-converted")
        common = {"peers": given.peer, "rounds": given.rounds, "threads": given.threads}
        quoting = quoting_checkpoint(Path(given.directory), place / "quoting")
        beside = compare(quoting, kinds=("quoting", "editing"), converted=place, **common)
        embedded = Path(resolve_model(None))
        beside += compare(embedded, kinds=["looping"], converted=place / "embedded", **common)
        write_json(given.out, {"machine": facts, "beside": beside})
        return
    chosen = [CASES[name] for name in given.cases] if given.cases else list(CASES.values())
    kinds = {"random", "quoting", "json"} | ({"draft"} if given.draft_model else set())
    if ModelConfig.from_directory(given.directory).mtp is not None:
        kinds.add("mtp")
    chosen = [case for case in chosen if case.kind in kinds]
    table = Table(
        "With and without drafts", ["case", "off tok/s", "on tok/s", "ratio", "goal", "tokens a step"]
    )
    results, costs = [], {}
    make: dict[str, Callable[[], Bench]] = {
        "random": lambda: Bench(Path(given.directory), given, 64, 512),
        "embedded": lambda: Bench(Path(resolve_model(None)), given, 1, 1024),
        "draft": lambda: Bench(
            Path(given.directory),
            given,
            64,
            512,
            Speculation(method="draft", model=given.draft_model, num_speculative_tokens=7, by_cost=True),
        ),
        "mtp": lambda: Bench(
            Path(given.directory),
            given,
            64,
            512,
            Speculation(method="mtp", num_speculative_tokens=7, by_cost=True),
        ),
    }
    for name, maker in make.items():
        cases = [case for case in chosen if BENCHES.get(case.kind, case.kind) == name]
        bench = maker() if cases else None
        for case in cases:
            assert bench is not None
            one = measure(case, bench, given.rounds)
            results.append(one)
            numbers = (f"{one['off tokens/s']:.1f}", f"{one['on tokens/s']:.1f}", f"{one['ratio']:.3f}")
            table.row(case.name, *numbers, case.goal, f"{one['tokens a step and row']:.2f}")
            print(json.dumps(one))
        if bench is not None:
            costs[name] = bench.cost.measured()
            bench.executor.close()
    table.print()
    for name, measured in costs.items():
        if measured:
            line = ", ".join(f"{tokens}: {1000 * seconds:.2f}" for tokens, seconds in measured.items())
            print(f"ms of a step by its tokens ({name}): {line}")
    write_json(given.out, {"machine": facts, "results": results, "step_seconds": costs})


if __name__ == "__main__":
    main()
