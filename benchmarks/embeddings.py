"""Vectors of texts: Baton beside sentence-transformers and llama.cpp, same checkpoint, alternating rounds.

    python benchmarks/embeddings.py MODEL [--texts 1000] [--tokens 128] [--rounds 3] [--quantization int8]
        [--peer sentence-transformers=VENV] [--peer llama.cpp=VENV] [--converted DIR] [--out FILE]

Each engine is a process of its own (`_peers/embed_*.py`, with the Python of its virtual environment) that
gets the same random token ids and gives a normalized vector of the last token of each text.  One that does
not compute is stopped.  The first vectors are compared: an engine whose vectors point elsewhere is an error.
What counts is the median over rounds of the ratio of texts a second to the best of the others.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import peers
from _common import Table, machine, print_machine, write_json
from _engines import SCRIPTS, Engine
from baton.bench.workload import random_requests, vocabulary_of

ADAPTERS = {
    "baton": "embed_baton.py",
    "sentence-transformers": "embed_sentence_transformers.py",
    "llama.cpp": "embed_llama_cpp.py",
}
_PAUSE_S = 1.0
"""Between two runs: the engine that was stopped has to come to rest first."""
_LEAST_COSINE = {None: 0.99, "int8": 0.97, "int4": 0.8}


def main() -> None:
    SCRIPTS.update(ADAPTERS)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", help="directory of a checkpoint")
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=128, help="of each text")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", help="of all engines that know it: int8 or int4")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--peer", type=peers.parse_peer, action="append", default=[], metavar="NAME=VENV")
    parser.add_argument("--converted", help="directory for converted checkpoints, kept")
    parser.add_argument("--out", help="write the result as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        result = measure(options, Path(options.converted or temporary))
    write_json(options.out, result)


def measure(options: argparse.Namespace, converted: Path) -> dict[str, Any]:
    converted.mkdir(parents=True, exist_ok=True)
    settings = {
        "model": str(Path(options.model).absolute()),
        "dtype": options.dtype,
        "quantization": options.quantization,
        "quantization_group_size": None,
        "quantize_head": None,
        "threads": options.threads,
        "max_num_seqs": 256,
        "max_model_len": max(options.tokens, 16),
        "kv_cache_bytes": 2 << 30,
        "converted": str(converted.absolute()),
    }
    ours = peers.parse_peer(f"baton={Path(sys.executable).parent.parent}")
    engines = [
        Engine(peer.name, peer.python, settings | peer.settings, converted / f"{peer.name}.log")
        for peer in (ours, *options.peer)
    ]
    try:
        for engine in engines[1:]:
            engine.stop()
        seconds = take_turns(engines, options, vocabulary_of(Path(options.model)))
        compare(converted, [engine.name for engine in engines], _LEAST_COSINE[options.quantization])
        return show(options, seconds, {engine.name: engine.version for engine in engines})
    finally:
        for engine in engines:
            engine.close()


def take_turns(
    engines: Sequence[Engine], options: argparse.Namespace, vocab_size: int
) -> dict[str, list[float]]:
    """Name → seconds of each round, after a small one that does not count.  The order turns."""
    seconds: dict[str, list[float]] = {engine.name: [] for engine in engines}
    for turn in range(-1, options.rounds):
        count = options.texts if turn >= 0 else max(1, options.texts // 8)
        requests = random_requests(count, options.tokens, 1, vocab_size, seed=turn + 1)
        first = max(turn, 0) % len(engines)
        for engine in [*engines[first:], *engines[:first]]:
            engine.stop(False)
            time.sleep(_PAUSE_S)
            elapsed = engine.run([request.prompt for request in requests], 1)
            engine.stop()
            print(f"  {engine.name}: {elapsed:.2f} s{'' if turn >= 0 else ' (warm-up)'}", file=sys.stderr)
            if turn >= 0:
                seconds[engine.name].append(elapsed)
    return seconds


def compare(place: Path, names: list[str], least: float) -> None:
    """Raises `SystemExit` if the engines do not compute the same."""
    first, *others = (np.array(json.loads((place / f"vectors-{name}.json").read_text())) for name in names)
    for name, vectors in zip(names[1:], others, strict=True):
        cosine = float((first * vectors).sum(axis=1).min())
        print(f"vectors of {name}: cosine {cosine:.5f}, at least")
        if cosine < least:
            raise SystemExit(f"error: {name} computes other vectors")


def show(
    options: argparse.Namespace, seconds: dict[str, list[float]], versions: dict[str, str]
) -> dict[str, Any]:
    print_machine(machine())
    table = Table(f"{options.texts} texts of {options.tokens} tokens", ("engine", "texts/s", "Baton is"))
    for name, each in seconds.items():
        ratio = statistics.median(theirs / own for theirs, own in zip(each, seconds["baton"], strict=True))
        table.row(
            f"{name} {versions[name]}", f"{options.texts / statistics.median(each):.1f}", f"{ratio:.2f} x"
        )
    table.print()
    return {"texts": options.texts, "tokens": options.tokens, "seconds": seconds, "versions": versions}


if __name__ == "__main__":
    main()
