"""Every family beside transformers, in float32: log-probabilities of a prompt, and greedy tokens.

    python benchmarks/family_parity.py [--only NAME ...] [--out FILE] [--markdown]

Tiny random checkpoints of each family, two shapes or more, one of odd sizes (those of the tests,
and `MORE_SHAPES` beside them).
Of each: a prompt of 300 tokens and 48 greedy ones,

* alone: in one step, then token by token;
* in a batch: beside six others that begin and end at other times;
* chunked: 11 tokens of a prompt in a step, the six others too;
* prefix hit: 288 of its tokens are in another request's blocks;
* TP 2: on two ranks, which are processes;
* handed over: one instance computes the prompt, its pages travel through the shared-memory transport into the
  pool of another one, which goes on.

A cell is the largest difference of the log-probabilities of the whole vocabulary from those of transformers,
at every position that is computed (all of the prompt where none is reused, and all of the answer), or what is
wrong.  The tokens must be those that transformers finds the most likely, all 48.  Two ranks share columns and
heads, so where a shape has odd numbers of them they compute one with the next even numbers.  Exits with 1 if
any cell is above 1e-4.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from tests.executor.driver import Driver, Request
from tests.executor.handing import handed_over
from tests.executor.test_torch_parity import ALL, BLOCK, config_for, prompt_of, vector
from tests.model.checkpoints import MORE_SHAPES, VARIANTS, make_checkpoint, reference_logprobs

from _common import Table, machine, print_machine, write_json
from baton.executor.torch_executor import TorchExecutor
from baton.model.checkpoint.config import ModelConfig, UnsupportedModel

PROMPT, ANSWER, CHUNK = 300, 48, 11
LIMIT = 1e-4
COLUMNS = ("intermediate_size", "moe_intermediate_size", "shared_intermediate_size")
SHAPES = VARIANTS | MORE_SHAPES
MODES = ("alone", "in a batch", "chunked", "prefix hit", "TP 2", "handed over")
DEADLINE_S = 60.0


def found_by(request: Request) -> dict[str, Any]:
    """What a request got, for `compare`; position → log-probabilities of what follows."""
    first = request.prompt[1:]
    known = len(first) - len(request.prompt_logprobs)
    positions = {known + number: vector(one) for number, one in enumerate(request.prompt_logprobs)}
    positions |= {len(first) + number: vector(one) for number, one in enumerate(request.logprobs)}
    return {"tokens": request.tokens, "positions": positions}


def compare(found: dict[str, Any], expected: torch.Tensor) -> float | str:
    """The largest difference, or what is wrong."""
    wanted = expected[PROMPT - 1 : -1].argmax(dim=-1).tolist()
    if found["tokens"] != wanted:
        same = next(i for i, (a, b) in enumerate(zip(found["tokens"], wanted, strict=False)) if a != b)
        return f"token {same} differs"
    return max(float((row - expected[at]).abs().max()) for at, row in found["positions"].items())


def company(driver: Driver) -> None:
    for number, length in enumerate((1, 5, BLOCK, 40, 77, 130)):
        driver.add(prompt_of(length, seed=number + 1), 20 + 5 * number)


def alone(executor: TorchExecutor) -> Request:
    driver = Driver(executor)
    request = driver.add(prompt_of(PROMPT), ANSWER, ALL)
    driver.run()
    return request


def crowded(executor: TorchExecutor, chunk: int) -> Request:
    driver = Driver(executor, chunk=chunk)
    driver.add(prompt_of(30, seed=9), 60)
    driver.step()
    request = driver.add(prompt_of(PROMPT), ANSWER, ALL)
    company(driver)
    driver.run()
    return request


def after_a_hit(executor: TorchExecutor) -> Request:
    driver = Driver(executor)
    first = driver.add(prompt_of(PROMPT), 2)
    driver.run()
    request = driver.add(prompt_of(PROMPT), ANSWER, ALL, prefix_of=first)
    assert request.computed == (PROMPT - 1) // BLOCK * BLOCK
    driver.run()
    return request


def rank_main(rank: int, directories: list[str]) -> None:
    """One of two ranks, for one checkpoint after the other; the first writes what it found."""
    torch.set_num_threads(1)
    for directory in directories:
        path = Path(directory)
        config = config_for(path, tensor_parallel_size=2, step_timeout_s=DEADLINE_S)
        executor = TorchExecutor.from_config(config, rank, str(path / "meet"))
        found = found_by(alone(executor))
        executor.close()
        if rank == 0:
            torch.save(found, path / "two-ranks.pt")
        print(json.dumps(path.name), flush=True)


def on_two_ranks(directories: list[Path]) -> None:
    """Each checkpoint gets a file `two-ranks.pt`, if the ranks came so far."""
    command = [sys.executable, __file__, "--rank"]
    ranks = [
        subprocess.Popen([*command, str(rank), *map(str, directories)], stdout=subprocess.DEVNULL)
        for rank in range(2)
    ]
    try:
        for process in ranks:
            process.wait()
    finally:
        for process in ranks:
            process.kill()


def measure(variant: str, directory: Path) -> dict[str, Any]:
    """All columns but TP 2."""
    model = make_checkpoint(directory, variant)
    executor = TorchExecutor.from_config(config_for(directory), 0, "")
    requests: dict[str, Request] = {"alone": alone(executor)}
    expected = reference_logprobs(model, requests["alone"].all_tokens)
    requests["in a batch"] = crowded(executor, 1 << 20)
    requests["chunked"] = crowded(executor, CHUNK)
    requests["prefix hit"] = after_a_hit(executor)
    peer = config_for(directory, peer_endpoint="ipc://unused", transfer="shared_memory")
    requests["handed over"] = handed_over(executor, peer, prompt_of(PROMPT), ANSWER, ALL)
    executor.close()
    cells: dict[str, Any] = {mode: compare(found_by(one), expected) for mode, one in requests.items()}
    return {"variant": variant, "family": SHAPES[variant][0], **cells}


def for_two_ranks(variant: str, directory: Path) -> tuple[Path, Any]:
    """The checkpoint, or one like it that two ranks can share, and the model."""
    try:
        ModelConfig.from_directory(directory).check_tensor_parallel(2)
        return directory, make_checkpoint(directory, variant)
    except UnsupportedModel:
        even = directory.with_name(f"{variant}-of-two")
        settings = SHAPES[variant][1]
        sizes = {name: size + 1 for name, size in settings.items() if name in COLUMNS and size % 2}
        heads = {"num_key_value_heads": 2} if settings.get("num_key_value_heads", 2) % 2 else {}
        return even, make_checkpoint(even, variant, **sizes, **heads)


def shown(cell: float | str) -> str:
    return cell if isinstance(cell, str) else f"{cell:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=[], help="these shapes, or all with this in their names")
    parser.add_argument("--out", help="a file for the figures, as JSON")
    parser.add_argument("--markdown", action="store_true", help="also as a table of Markdown")
    parser.add_argument("--rank", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(int(options.rank[0]), options.rank[1:])
        return
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    facts = machine()
    print_machine(facts)
    began = time.monotonic()
    parts = [part for part in options.only if part not in SHAPES]
    chosen = [
        name
        for name in SHAPES
        if not options.only or name in options.only or any(part in name for part in parts)
    ]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="baton-parity-") as place:
        directories = [Path(place) / name for name in chosen]
        rows = [measure(name, path) for name, path in zip(chosen, directories, strict=True)]
        shared = [for_two_ranks(name, path) for name, path in zip(chosen, directories, strict=True)]
        on_two_ranks([path for path, _ in shared])
        for row, (path, model) in zip(rows, shared, strict=True):
            file = path / "two-ranks.pt"
            row["TP 2"] = "no answer"
            if file.exists():
                found = torch.load(file)
                tokens = [*prompt_of(PROMPT), *found["tokens"]]
                row["TP 2"] = compare(found, reference_logprobs(model, tokens))
    table = Table(f"largest difference of log-probabilities, {PROMPT} + {ANSWER} tokens", ["", *MODES])
    for row in rows:
        table.row(f"{row['family']}: {row['variant']}", *(shown(row[mode]) for mode in MODES))
    table.print()
    if options.markdown:
        print(markdown(rows))
    cells = [row[mode] for row in rows for mode in MODES]
    wrong = sum(isinstance(cell, str) or not cell <= LIMIT for cell in cells)
    seconds = time.monotonic() - began
    print(f"{len(rows)} checkpoints, {len(cells)} cells, {wrong} above {LIMIT:g} or wrong, {seconds:.0f} s")
    write_json(options.out, {"machine": facts, "limit": LIMIT, "rows": rows, "seconds": seconds})
    sys.exit(1 if wrong else 0)


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = ["| family | shape | " + " | ".join(MODES) + " |", "| --- " * (len(MODES) + 2) + "|"]
    lines += [
        f"| {row['family']} | {row['variant']} | " + " | ".join(shown(row[mode]) for mode in MODES) + " |"
        for row in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
