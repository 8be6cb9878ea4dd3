"""Is an answer the same whatever happens around it?  Baton beside other engines, bit for bit.

    python tools/make_checkpoint.py --shape qwen3-0.6b --layers 8 --out /tmp/qwen
    python benchmarks/same_answer.py /tmp/qwen --peer vllm=VENV --peer openvino=VENV --peer llama.cpp=VENV

One prompt is answered greedily, alone, by an engine whose prefix cache is empty.  Then it is answered again
in each of these ways, and the tokens and log-probabilities are compared with those of the first answer:

  again           alone, with an empty cache once more
  among others    among other prompts that come at the same time (31, with the default of 32 requests)
  in chunks       alone, by the same engine started so that a step takes fewer tokens than the prompt has
  full hit        alone, when the whole prompt has just been answered
  part hit        alone, when a prompt that begins like its first half has just been answered

A cell says how many of the prompts were answered with the *same bits* (all tokens and all log-probabilities),
and how many with the same *tokens*; then the largest difference of a log-probability before the tokens part.
`cached` is how many tokens of a prompt came from the prefix cache in a full and in a part hit, as the engine
says.
Log-probabilities are compared as the engine gives them, in float32.  Nothing here is timed.

Each engine runs in the Python of its own virtual environment (`_peers/same_*.py` say what to install); one
that does not start is left out, with the reason.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from _common import Table, machine, print_machine, write_json
from _engines import engine_environment
from baton.bench.workload import vocabulary_of

SCRIPTS = {
    "baton": "same_baton.py",
    "vllm": "same_vllm.py",
    "openvino": "same_openvino.py",
    "llama.cpp": "same_llama_cpp.py",
}
WAYS = ("again", "among others", "in chunks", "full hit", "part hit")
_REPLY_S = 1800.0
"""What starting an engine, conversion included, or answering one order may take."""


@dataclass(frozen=True)
class Answer:
    """Tokens of one answer and the log-probability of each."""

    tokens: list[int]
    logprobs: list[float]
    cached: int | None = field(default=None, compare=False)
    """Tokens of the prompt that the engine took from its prefix cache; None: it does not say."""


@dataclass
class Compared:
    """One engine's answers in one way, beside those that it gave first."""

    prompts: int = 0
    same_bits: int = 0
    same_tokens: int = 0
    cached: int | None = None
    """Of the last prompt."""
    largest: float = 0.0
    """Difference of a log-probability of equal tokens, before the first token that differs."""

    def add(self, first: Answer, other: Answer) -> None:
        self.prompts += 1
        self.cached = other.cached
        self.same_tokens += first.tokens == other.tokens
        self.same_bits += first == other
        for ours, theirs, a, b in zip(
            first.tokens, other.tokens, first.logprobs, other.logprobs, strict=True
        ):
            if ours != theirs:
                break
            self.largest = max(self.largest, abs(a - b))

    @property
    def cell(self) -> str:
        if self.same_bits == self.prompts:
            return f"all {self.prompts}"
        return (
            f"{self.same_bits}/{self.prompts} (tokens {self.same_tokens}/{self.prompts}; {self.largest:.2g})"
        )


@dataclass
class Engine:
    """An engine in its process."""

    name: str
    version: str = ""
    process: subprocess.Popen[str] | None = field(default=None, repr=False)

    @classmethod
    def start(cls, name: str, python: Path, settings: dict[str, Any], log: Path) -> Engine:
        """Raises `RuntimeError` with one line if the engine does not start."""
        script = Path(__file__).parent / "_peers" / SCRIPTS[name]
        with log.open("w") as errors:
            process = subprocess.Popen(
                [str(python), str(script), json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=engine_environment(python),
            )
        engine = cls(name, process=process)
        try:
            engine.version = str(engine._read(log)["version"])
        except BaseException:
            engine.close()
            raise
        return engine

    def answer(self, prompts: list[list[int]], output_len: int, *, fresh: bool, log: Path) -> list[Answer]:
        assert self.process is not None
        assert self.process.stdin is not None
        order = {"prompts": prompts, "output_len": output_len, "fresh": fresh}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        reply = self._read(log)
        return [Answer(*each) for each in reply["answers"]]

    def _read(self, log: Path) -> dict[str, Any]:
        assert self.process is not None
        assert self.process.stdout is not None
        limit = threading.Timer(_REPLY_S, self.process.kill)
        limit.start()
        try:
            line = self.process.stdout.readline()
        finally:
            limit.cancel()
        if not line:
            raise RuntimeError(f"{self.name} ended; its messages are in {log}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise RuntimeError(f"{self.name} {reply['error']}")
        return reply

    def close(self) -> None:
        """Ends the process: gently, by the end of its input, and after a minute by force."""
        process = self.process
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@dataclass(frozen=True)
class Work:
    """The prompts that are compared, and those beside them."""

    prompts: list[list[int]]
    others: list[list[int]]
    beginnings: list[list[int]]
    """For each prompt one that has its first half, and goes on otherwise."""
    output_len: int


def make_work(vocabulary: int, arguments: argparse.Namespace) -> Work:
    random = np.random.default_rng(arguments.seed)

    def prompt(length: int) -> list[int]:
        ids: list[int] = random.integers(300, vocabulary - 50, length).tolist()
        return ids

    length = arguments.prompt_tokens
    prompts = [prompt(length) for _ in range(arguments.prompts)]
    others = [prompt(int(random.integers(length // 8, length))) for _ in range(arguments.requests - 1)]
    beginnings = [one[: length // 2] + prompt(length - length // 2) for one in prompts]
    return Work(prompts, others, beginnings, arguments.output_tokens)


def compare(
    name: str, python: Path, settings: dict[str, Any], chunk: int, work: Work, logs: Path
) -> tuple[str, dict[str, Compared]]:
    """(version of the engine, what became of each way).  Raises `RuntimeError` if it does not start."""
    results = {way: Compared() for way in WAYS}
    first: list[Answer] = []
    log = logs / f"{name}-{settings['dtype']}.log"
    engine = Engine.start(name, python, settings, log)
    try:

        def ask(*prompts: list[int], fresh: bool = False) -> list[Answer]:
            return engine.answer(list(prompts), work.output_len, fresh=fresh, log=log)

        ask(work.others[0], fresh=True)  # (what an engine does differently the first time is no finding)
        for prompt, beginning in zip(work.prompts, work.beginnings, strict=True):
            (alone,) = ask(prompt, fresh=True)
            first.append(alone)
            results["full hit"].add(alone, ask(prompt)[0])
            results["again"].add(alone, ask(prompt, fresh=True)[0])
            place = len(work.others) // 2
            together = ask(*work.others[:place], prompt, *work.others[place:], fresh=True)
            results["among others"].add(alone, together[place])
            ask(beginning, fresh=True)
            results["part hit"].add(alone, ask(prompt)[0])
        version = engine.version
    finally:
        engine.close()
    log = logs / f"{name}-{settings['dtype']}-chunks.log"
    engine = Engine.start(name, python, settings | {"max_num_batched_tokens": chunk}, log)
    try:
        ask(work.others[0], fresh=True)
        for prompt, alone in zip(work.prompts, first, strict=True):
            results["in chunks"].add(alone, ask(prompt, fresh=True)[0])
    finally:
        engine.close()
    return version, results


def peer(text: str) -> tuple[str, Path]:
    name, _, directory = text.partition("=")
    python = Path(directory) / "bin" / "python"
    if name not in SCRIPTS or not python.exists():
        raise argparse.ArgumentTypeError(f"{text!r}: give NAME=VENV; names are {', '.join(SCRIPTS)}")
    return name, python


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path, help="directory of a checkpoint")
    parser.add_argument("--peer", type=peer, action="append", default=[], metavar="NAME=VENV")
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--prompts", type=int, default=4, help="that are compared")
    parser.add_argument("--requests", type=int, default=32, help="at once, in `among others`")
    parser.add_argument("--prompt-tokens", type=int, default=384)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--chunk", type=int, default=80, help="tokens of a step at most, in `in chunks`")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help="where converted models and logs are kept")
    parser.add_argument("--out", help="file for the result as JSON")
    arguments = parser.parse_args()
    facts = machine()
    print_machine(facts)
    work = make_work(vocabulary_of(arguments.model), arguments)
    kept = arguments.work or Path(tempfile.mkdtemp(prefix="same-answer-"))
    kept.mkdir(parents=True, exist_ok=True)
    rows = []
    for name, python in [("baton", Path(sys.executable)), *arguments.peer]:
        for dtype in arguments.dtype:
            settings = {
                "model": str(arguments.model.resolve()),
                "dtype": dtype,
                "threads": arguments.threads,
                "max_num_seqs": arguments.requests,
                "max_model_len": arguments.prompt_tokens + arguments.output_tokens + 16,
                "max_num_batched_tokens": 2048,
                "kv_cache_bytes": 2 << 30,
                "converted": str(kept / name),
            }
            try:
                version, results = compare(name, python, settings, arguments.chunk, work, kept)
            except RuntimeError as error:
                print(f"left out: {name}, {dtype}: {error}")
                continue
            rows.append({"engine": name, "version": version, "dtype": dtype, "ways": results})
            print(f"{name} {version}, {dtype}: " + "; ".join(f"{way} {results[way].cell}" for way in WAYS))
    table = Table("Answers with the same bits as the prompt alone", ["engine", "dtype", *WAYS, "cached"])
    for row in rows:
        cells = [row["ways"][way].cell for way in WAYS]
        hits = [row["ways"][way].cached for way in ("full hit", "part hit")]
        cached = "not said" if None in hits else ", ".join(map(str, hits))
        table.row(f"{row['engine']} {row['version']}", row["dtype"], *cells, cached)
    table.print()
    plain = [row | {"ways": {way: vars(one) for way, one in row["ways"].items()}} for row in rows]
    write_json(arguments.out, {"machine": facts, "rows": plain})


if __name__ == "__main__":
    main()
