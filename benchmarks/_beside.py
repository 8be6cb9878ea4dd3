"""What n-gram drafts gain in Baton and in other engines: one request of the same checkpoint, greedily.

Each engine is two processes, one that drafts and one that does not (`_engines.py`), and all take turns, round
after round; those that wait are stopped.  A round has a prompt of its own.  Speeds are of the tokens behind
the first one, by the medians of the rounds: the same prompt is run for one token as well, and its time is
taken off; how much faster the whole request is, with its prompt, is told for each round.  *Right* are those
drafts that became tokens, of those that were computed.

*A model that quotes.*  Models of random weights do not, and the embedded one is too small to.  So the
checkpoint's attention and MLPs are computed and then multiplied by zero (the weights of their last products),
and the output head is the embedding in another order: what follows a token is the next one of its ring of
200.  A step costs what it costs, and its tokens do not hang on rounding.  *Quoting*: the prompt has a ring
once, and its beginning again; the answer is the ring.  *Editing*: every 16th token of the prompt is another
one, so the answer is the prompt with 12 corrections.  *Looping*: the embedded model after random tokens; it
soon says the same again and again.

Engines round differently, so their answers may part; each line says how many tokens are those of the same
engine without drafts until then, and how many those of Baton.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from _common import Table
from _engines import Engine
from baton.bench.workload import vocabulary_of
from baton.executor.base import Int64Array

DRAFTING = ("vllm", "llama-server")
"""Engines with n-gram drafts."""
_PAUSE_S = 0.5
"""Between two runs: the engine that was stopped has to come to rest first."""
PROMPT, OUTPUT = 208, 192
"""Tokens."""
RING = 200
"""Tokens of a text that is quoted; a prompt ends with its first ones again, and the answer with its last."""


@dataclass(frozen=True)
class Beside:
    """An engine, its Python, and how it drafts."""

    name: str
    python: Path
    how: str


@dataclass
class Rounds:
    """Of one engine in one mode."""

    whole: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    """Seconds of each round: of the request, and of the same prompt for one token."""
    tokens: list[list[int]] = field(default_factory=list)
    drafts: int = 0
    right: int = 0

    @property
    def speed(self) -> float:
        """Tokens a second behind the first one, by the medians."""
        return (OUTPUT - 1) / (statistics.median(self.whole) - statistics.median(self.first))


def rings(vocab: int) -> Int64Array:
    """[n, 200] ids that are neither bytes nor special tokens, each once."""
    ids = np.random.default_rng(7).permutation(np.arange(300, vocab - 50))
    return ids[: len(ids) // RING * RING].reshape(-1, RING)


def quoting_checkpoint(directory: Path, target: Path) -> Path:
    """The same model, but quoting; made the first time."""
    if (target / "config.json").exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    files = [load_file(path) for path in directory.glob("*.safetensors")]
    tensors = {name: tensor for file in files for name, tensor in file.items()}
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    embedding = tensors["model.embed_tokens.weight"]
    head = torch.zeros_like(embedding)
    ring = rings(len(embedding))
    head[np.roll(ring, -1, axis=1).ravel()] = embedding[ring.ravel()]
    save_file(tensors | {"lm_head.weight": head}, target / "model.safetensors", {"format": "pt"})
    for path in directory.glob("*token*"):
        shutil.copy(path, target)
    config = json.loads((directory / "config.json").read_text()) | {"tie_word_embeddings": False}
    (target / "config.json").write_text(json.dumps(config))
    return target


def prompt_of(kind: str, vocab: int, seed: int) -> list[int]:
    """`quoting`, `editing` or `looping`."""
    random = np.random.default_rng(seed)
    if kind == "looping":
        found: list[int] = random.integers(300, vocab - 50, PROMPT).tolist()
        return found
    ring = random.choice(rings(vocab))
    text = ring.copy()
    if kind == "editing":
        text[15::16] = random.integers(300, vocab - 50, len(text[15::16]))
    return [*text.tolist(), *ring[: PROMPT - RING].tolist()]


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens up to the first that differs."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other)))


def compare(
    directory: Path,
    peers: Sequence[Beside],
    kinds: Sequence[str],
    rounds: int,
    threads: int,
    converted: Path,
) -> list[dict[str, Any]]:
    """Prints the tables of a checkpoint and kinds of prompts, and returns what they say.

    `converted`: for logs, and what engines make of the checkpoint.
    """
    vocab = vocabulary_of(directory)
    converted.mkdir(parents=True, exist_ok=True)
    settings = {
        "model": str(directory.absolute()),
        "dtype": "bfloat16",
        "quantization": None,
        "quantization_group_size": None,
        "quantize_head": None,
        "threads": threads,
        "max_num_seqs": 1,
        "max_model_len": PROMPT + OUTPUT + 32,
        "kv_cache_bytes": 1 << 30,
        "converted": str(converted.absolute()),
    }
    peers = [Beside("baton", Path(sys.executable), how) for how in ("auto", "ngram")] + list(peers)
    with ExitStack() as stack:
        engines: dict[tuple[str, str], Engine] = {}
        for peer in peers:
            for mode in ("off", peer.how):
                if (peer.name, mode) in engines:
                    continue
                print(f"starting {peer.name}, {mode} …", file=sys.stderr)
                log = converted / f"{peer.name}-{mode}.log"
                engine = Engine(peer.name, peer.python, settings | {"speculation": mode}, log)
                stack.callback(engine.close)
                engine.stop()
                engines[peer.name, mode] = engine
        results = []
        for kind in kinds:
            found = _measure(engines, [prompt_of(kind, vocab, seed) for seed in range(rounds + 1)])
            results.append(_show(kind, peers, found, engines))
    return results


def _measure(
    engines: dict[tuple[str, str], Engine], prompts: list[list[int]]
) -> dict[tuple[str, str], Rounds]:
    found = {key: Rounds() for key in engines}
    keys = list(engines)
    for turn, prompt in enumerate(prompts):
        first = turn % len(keys)
        for key in [*keys[first:], *keys[:first]]:
            engine, its = engines[key], found[key]
            engine.stop(False)
            time.sleep(_PAUSE_S)
            alone = engine.run([prompt], 1)
            whole, told = engine.run_and_tell([prompt], OUTPUT)
            engine.stop()
            if turn:  # (the first one warms up)
                its.whole.append(whole)
                its.first.append(alone)
                its.tokens += told["tokens"]
                its.drafts += told["drafts"]
                its.right += told["right"]
            print(f"  {key[0]}, {key[1]}: {whole:.2f} s", file=sys.stderr)
    return found


def _show(
    kind: str,
    peers: Sequence[Beside],
    found: dict[tuple[str, str], Rounds],
    engines: dict[tuple[str, str], Engine],
) -> dict[str, Any]:
    columns = [
        "engine",
        "off tok/s",
        "on tok/s",
        "on / off",
        "whole request",
        "right",
        "tokens a step",
        "as off",
        "as Baton",
    ]
    table = Table(f"one request, {kind} prompt, {PROMPT} in / {OUTPUT} out", columns)
    ours = found["baton", "off"].tokens
    rows = []
    for name, how in ((peer.name, peer.how) for peer in peers):
        off, on = found[name, "off"], found[name, how]
        ratios = [slow / fast for fast, slow in zip(on.whole, off.whole, strict=True)]
        made = sum(map(len, on.tokens))
        row = {
            "engine": name,
            "version": engines[name, how].version,
            "speculation": how,
            "off tokens/s": off.speed,
            "on tokens/s": on.speed,
            "ratio": on.speed / off.speed,
            "off seconds": off.whole,
            "on seconds": on.whole,
            "off seconds, one token": off.first,
            "on seconds, one token": on.first,
            "right": on.right / on.drafts if on.drafts else None,
            "tokens a step": made / max(1, made - on.right),
            "as off": statistics.mean(map(shared, on.tokens, off.tokens)),
            "as Baton": statistics.mean(map(shared, off.tokens, ours)),
        }
        rows.append(row)
        table.row(
            f"{name} {row['version']}, {how}",
            f"{off.speed:,.1f}",
            f"{on.speed:,.1f}",
            f"{row['ratio']:.2f}",
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})",
            "" if row["right"] is None else f"{row['right']:.0%}",
            f"{row['tokens a step']:.2f}",
            f"{row['as off']:.0f}",
            f"{row['as Baton']:.0f}",
        )
    table.print()
    return {"prompts": kind, "in": PROMPT, "out": OUTPUT, "engines": rows}


def parse_beside(text: str) -> Beside:
    """'vllm=/opt/vllm' or 'llama-server=/opt/llama,ngram-mod'."""
    name, _, rest = text.partition("=")
    place, _, how = rest.partition(",")
    python = Path(place).absolute() / "bin" / "python"
    if name not in DRAFTING or not place or not python.exists():
        known = ", ".join(DRAFTING)
        raise argparse.ArgumentTypeError(f"{text!r}: give NAME=VENV or NAME=VENV,METHOD, of {known}")
    return Beside(name, python, how or "ngram")
