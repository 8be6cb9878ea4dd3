"""Baton beside other engines: the same checkpoint, the same requests, alternating runs, ratio and spread.

    python tools/make_checkpoint.py --shape ernie-0.3b --out /tmp/ernie
    python benchmarks/peers.py /tmp/ernie --peer vllm=VENV --peer openvino=VENV --work 64x128x128

Theory.  A machine that others use too is faster in one minute than in the next, so only what ran within the
same minutes can be compared: every engine is started once, warmed up with prompts of the work and the first
eighth of its output, and then they take turns, round after round.  While one runs the others wait for input;
some spin meanwhile (vLLM takes up to half of a core), so the others are stopped (SIGSTOP).  A row gives the
median over the rounds, the slowest and the fastest, and the median over the rounds of *our speed / its speed
in that round*.

An engine is a process of its own, run by the Python of the virtual environment that it is installed in
(`_peers/run_*.py`; their first lines say what to install).  Work is NxIxO: N requests, all there at once, of
I prompt tokens and O greedy output tokens each.  An engine that does not start is left out.

Nobody drafts unless asked to (`--ours speculation=ngram`, `--peer vllm=VENV,speculation=ngram`): greedy
answers of random weights repeat themselves, and what is guessed of them says nothing about text.
`benchmarks/speculation.py` is for that.

Four bits are not the same everywhere: the last table says how many bits a weight takes in the layers and in
the head, with its share of scales and zero points, and the bytes that a step reads.  For the work of one
request the same prompt is run for one token as well, and the difference is what the other tokens took: their
speed, and how much of the measured bandwidth those bytes use.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from _common import Table, bandwidth, machine, print_machine, write_json
from _engines import SCRIPTS, Engine, Weights
from baton.bench.workload import random_requests, vocabulary_of

GIB = 1 << 30
_NUMBERS = ("threads", "quantization_group_size", "quantize_head")
_TEXTS = ("dtype", "quantization", "speculation")
"""Settings that a peer may have for itself."""
_PAUSE_S = 1.0
"""Between two runs: the engine that was stopped has to come to rest first."""


def parse_work(text: str) -> tuple[int, int, int]:
    """'64x128x128' → (requests, prompt tokens, output tokens)."""
    try:
        count, prompt, output = (int(part) for part in text.split("x"))
        if min(count, prompt, output) < 1:
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: give REQUESTSxPROMPTxOUTPUT, such as 64x128x128"
        ) from None
    return count, prompt, output


@dataclass(frozen=True)
class Peer:
    """What `--peer` names."""

    name: str
    python: Path
    settings: dict[str, Any]
    """Where its settings are others than everybody's."""


def parse_peer(text: str) -> Peer:
    """'baton@int8=/path/of/venv,quantization=int8' → name, its Python, its own settings."""
    name, _, rest = text.partition("=")
    place, *changes = rest.split(",")
    if name.partition("@")[0] not in SCRIPTS or not place:
        raise argparse.ArgumentTypeError(f"{text!r}: give NAME=VENV with one of {', '.join(SCRIPTS)}")
    python = Path(place).absolute() / "bin" / "python"
    if not python.exists():
        raise argparse.ArgumentTypeError(f"{text!r}: there is no {python}")
    return Peer(name, python, parse_settings(",".join(changes)))


def parse_settings(text: str) -> dict[str, Any]:
    """'quantization=int4,quantization_group_size=32' → those settings."""
    settings: dict[str, Any] = {}
    for change in filter(None, text.split(",")):
        key, _, value = change.partition("=")
        try:
            settings[key] = int(value) if key in _NUMBERS else value
        except ValueError:
            raise argparse.ArgumentTypeError(f"{change!r}: {key} is a number") from None
        if key not in (*_NUMBERS, *_TEXTS) or not value:
            known = ", ".join(f"{name}=" for name in (*_TEXTS, *_NUMBERS))
            raise argparse.ArgumentTypeError(f"{change!r} is none of {known}")
    return settings


@dataclass
class Times:
    """Seconds of an engine, a round each."""

    whole: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    """Of the same prompts for one token; only where one request is the work."""


def measure(
    engines: Sequence[Engine], work: tuple[int, int, int], rounds: int, vocab_size: int, short: bool
) -> dict[str, Times]:
    """By name.  The order turns, so that nobody always follows the same one.

    `short`: an eighth of the requests, or of a single one's prompt, is enough to warm up.
    """
    count, prompt, output = work
    running = list(engines)
    times = {engine.name: Times() for engine in engines}
    for turn in range(-1, rounds):
        sizes = (count, prompt, output) if turn >= 0 else warm_up(work, short)
        prompts = [one.prompt for one in random_requests(*sizes, vocab_size, seed=turn + 1)]
        first = max(turn, 0) % len(running)
        for engine in [*running[first:], *running[:first]]:
            try:
                engine.stop(False)
                time.sleep(_PAUSE_S)
                elapsed = engine.run(prompts, sizes[2])
                if turn >= 0 and count == 1 < output:
                    times[engine.name].first.append(engine.run(prompts, 1))
            except (RuntimeError, BrokenPipeError) as error:
                if engine is engines[0]:
                    raise SystemExit(f"error: {error}") from None
                print(f"left out: {error}", file=sys.stderr)
                running.remove(engine)
                del times[engine.name]
                continue
            engine.stop()
            if turn >= 0:
                times[engine.name].whole.append(elapsed)
            print(f"  {engine.name}: {elapsed:.2f} s{'' if turn >= 0 else ' (warm-up)'}", file=sys.stderr)
    return times


def warm_up(work: tuple[int, int, int], short: bool) -> tuple[int, int, int]:
    """The work that is done before that is measured: an eighth of the output, and if `short` of the input."""
    count, prompt, output = work
    made = min(output, max(2, output // 8))
    if not short:
        return count, prompt, made
    return (count // 8, prompt, made) if count >= 8 else (1, max(1, prompt // 8), made)


def show(
    work: tuple[int, int, int], times: dict[str, Times], weights: dict[str, Weights | None], reads: float
) -> dict[str, Any]:
    """Prints the table of one workload and returns what it says.  `reads`: bytes a second."""
    count, prompt, output = work
    made, total = count * output, count * (prompt + output)
    ours = next(iter(times))
    one = count == 1 < output
    columns = ["engine", "output tok/s", "total tok/s", "slowest to fastest", f"{ours} / it"]
    columns += ["later tok/s", "of bandwidth"] if one else []
    table = Table(f"{count} requests, {prompt} in / {output} out", columns)
    rows: dict[str, Any] = {}
    for name, its in times.items():
        speeds = [made / elapsed for elapsed in its.whole]
        ratios = [it / our for it, our in zip(its.whole, times[ours].whole, strict=True)]
        median = statistics.median(speeds)
        rows[name] = {"output_tok_s": speeds, "median_output_tok_s": median, "ratios": ratios}
        cells = [
            f"{median:,.0f}" if median >= 100 else f"{median:.1f}",
            f"{median * total / made:,.0f}",
            f"{min(speeds):,.1f} to {max(speeds):,.1f}",
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        ]
        if one:
            later = statistics.median(
                (output - 1) / (whole - first) for whole, first in zip(its.whole, its.first, strict=True)
            )
            held = weights[name]
            share = later * held.nbytes / reads if held else None
            rows[name] |= {"first_s": its.first, "later_tok_s": later, "bandwidth_share": share}
            cells += [f"{later:,.1f}", "" if share is None else f"{share:.0%}"]
        table.row(name, *cells)
    table.print()
    return {"requests": count, "prompt": prompt, "output": output, "engines": rows}


def show_engines(engines: Sequence[Engine]) -> dict[str, Any]:
    """Prints what they are and hold, and returns it."""
    columns = ["engine", "version", "ready after", "resident at most", "bits: layers, head", "a step reads"]
    table = Table("engines", columns)
    about: dict[str, Any] = {}
    for engine in engines:
        held = engine.weights
        table.row(
            engine.name,
            engine.version,
            f"{engine.ready_s:.1f} s",
            f"{engine.resident_bytes / GIB:.1f} GiB",
            f"{held.layer_bits:.2f}, {held.head_bits:.2f}" if held else "",
            f"{held.nbytes / 1e6:,.0f} MB" if held else "",
        )
        about[engine.name] = {
            "version": engine.version,
            "ready_s": engine.ready_s,
            "resident_bytes": engine.resident_bytes,
            "weights": asdict(held) if held else None,
        }
    table.print()
    return about


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="directory of a checkpoint")
    parser.add_argument(
        "--peer",
        type=parse_peer,
        action="append",
        default=[],
        metavar="NAME=VENV[,KEY=VALUE]",
        help=f"{', '.join(SCRIPTS)}; repeatable. NAME@LABEL tells two of a kind apart, settings of one's own "
        "follow the directory: baton@int8=.venv,quantization=int8",
    )
    parser.add_argument(
        "--work", type=parse_work, nargs="+", default=[(64, 128, 128)], metavar="NxIxO", help="64x128x128"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--quantization", choices=("int8", "int4"), help="of every engine that has no own")
    parser.add_argument(
        "--ours",
        type=parse_settings,
        default={},
        metavar="KEY=VALUE,…",
        help="settings of Baton's own row: quantization_group_size=32,quantize_head=16",
    )
    parser.add_argument(
        "--short-warm-up",
        action="store_true",
        help="with an eighth of the requests, or of a single one's prompt: for large models",
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--kv-cache-gib", type=int, default=2, help="of each engine")
    parser.add_argument("--converted", type=Path, help="where engines keep what they make of the checkpoint")
    parser.add_argument("--out", help="write JSON here")
    options = parser.parse_args()

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the engines are closed
    facts = machine()
    print_machine(facts)
    converted = (options.converted or options.model.with_name(options.model.name + "-converted")).absolute()
    converted.mkdir(parents=True, exist_ok=True)
    settings = {
        "model": str(options.model.absolute()),
        "dtype": options.dtype,
        "quantization": options.quantization,
        "quantization_group_size": None,
        "quantize_head": None,
        # Over random weights drafts are right by luck or never: neither is a speed of the model.
        "speculation": "off",
        "threads": options.threads,
        "max_num_seqs": max(count for count, _, _ in options.work),
        "max_model_len": max(prompt + output for _, prompt, output in options.work) + 16,
        "kv_cache_bytes": options.kv_cache_gib * GIB,
        "converted": str(converted),
        "works": [(count, prompt + output + 16) for count, prompt, output in options.work],
    }
    vocab_size = vocabulary_of(options.model)
    torch.set_num_threads(options.threads)
    reads = bandwidth()
    print(f"reading: {reads / 1e9:.1f} GB/s\n")
    with ExitStack() as stack:
        engines: list[Engine] = []
        for peer in [Peer("baton", Path(sys.executable), options.ours), *options.peer]:
            print(f"starting {peer.name} …", file=sys.stderr)
            log = converted / f"{peer.name}.log"
            try:
                engine = Engine(peer.name, peer.python, settings | peer.settings, log)
            except RuntimeError as error:
                if peer.name == "baton":
                    raise SystemExit(f"error: {error}") from None
                print(f"left out: {error}", file=sys.stderr)
                continue
            stack.callback(engine.close)
            engine.stop()
            engines.append(engine)
        weights = {engine.name: engine.weights for engine in engines}
        results = []
        for work in options.work:
            times = measure(engines, work, options.rounds, vocab_size, options.short_warm_up)
            results.append(show(work, times, weights, reads))
        about = show_engines(engines)
    result = {"machine": facts, "settings": settings, "rounds": options.rounds, "bandwidth": reads}
    result |= {"ours": options.ours, "engines": about}
    write_json(options.out, result | {"work": results})


if __name__ == "__main__":
    main()
