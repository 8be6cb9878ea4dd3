"""The other end of `peers.py`: a process that holds one engine and completes batches on request.

Runs in the environment of the engine, so nothing of Baton is imported here.  Orders are lines of JSON on
standard input, answers lines on what was standard output; whatever the engine prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

Complete = Callable[[list[list[int]], int], int]
"""(prompts as token ids, output tokens of each) → output tokens in all."""


@dataclass(frozen=True)
class Settings:
    """What an engine is started with."""

    model: str
    """Directory of the checkpoint."""
    dtype: str
    quantization: str | None
    quantization_group_size: int | None
    """Weights that share a scale; None: what the engine or its tools choose."""
    quantize_head: int | None
    """Bits; None: what the engine or its tools choose."""
    threads: int
    max_num_seqs: int
    max_model_len: int
    kv_cache_bytes: int
    converted: str
    """Directory for what the engine makes of the checkpoint, if it cannot read it as it is."""
    works: Sequence[tuple[int, int]] = ()
    """Of each work, requests at once and tokens of each at most; for engines whose KV cache has a shape."""
    speculation: str | None = None
    """`off`, `ngram` or another form that the engine has; None: as it does by itself."""


@dataclass(frozen=True)
class Told:
    """Of the last batch."""

    tokens: list[list[int]]
    """Output of each request."""
    drafts: int
    """Computed."""
    right: int


LONGEST_DRAFT = 15
"""Tokens of a draft, at most, in every engine: Baton's own default."""


@dataclass(frozen=True)
class Loaded:
    """An engine that is ready."""

    version: str
    complete: Complete
    weight_bytes: dict[str, int] | None = None
    """Of the `layers` and of the `head`: what a step that makes a token reads.  None: nobody knows."""
    told: Callable[[], Told] | None = None


def split(tensors: Iterable[tuple[str, int]], chosen: float = 1.0) -> dict[str, int]:
    """(name, bytes) of all tensors, by Hugging Face's names or GGUF's → bytes of the layers and of the head.

    `chosen`: of a layer's experts, the share that a token goes to, and so what a step of one token reads.  A
    model without a head of its own has its embedding as head; otherwise the embedding counts nowhere, for a
    step reads a row of it.
    """
    found = {"layers": 0, "head": 0}
    embedding = 0
    for name, size in tensors:
        if ".experts." in name or "_exps." in name:
            size = int(size * chosen)
        if ".layers." in name or name.startswith("blk."):
            found["layers"] += size
        elif "lm_head" in name or name == "output.weight":
            found["head"] += size
        elif "embed_tokens" in name or name == "token_embd.weight":
            embedding += size
    return found if found["head"] else found | {"head": embedding}


def headers(checkpoint: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, its `dtype`, `shape`, `data_offsets`) of each tensor of safetensors files."""
    for path in sorted(checkpoint.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        yield from ((name, about) for name, about in header.items() if name != "__metadata__")


def weight_numbers(checkpoint: Path) -> dict[str, int]:
    """How many numbers layers and head of a checkpoint have, in floating point or in 4 bits; see `split`."""

    def counts() -> Iterator[tuple[str, int]]:
        for name, about in headers(checkpoint):
            if name.endswith("weight_packed"):
                yield name, 8 * prod(about["shape"])
            elif not name.endswith(("weight_scale", "weight_shape")):
                yield name, prod(about["shape"])

    return split(counts(), chosen_share(checkpoint))


def chosen_share(checkpoint: Path) -> float:
    """Of a layer's experts, how many a token goes to; 1 of a dense model."""
    file = checkpoint / "config.json"
    config = json.loads(file.read_text()) if file.exists() else {}
    experts = config.get("moe_num_experts", config.get("num_experts", config.get("num_local_experts")))
    chosen = config.get("moe_k", config.get("num_experts_per_tok"))
    return chosen / experts if experts else 1.0


class NotOffered(Exception):
    """The engine cannot do what the settings ask for; the message says what."""


def answer(load: Callable[[Settings], Loaded]) -> None:
    """Loads the engine, then answers until the input ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(**content: object) -> None:
        replies.write(json.dumps(content) + "\n")
        replies.flush()

    start = time.perf_counter()
    try:
        settings = Settings(**json.loads(sys.argv[1]))
        engine = load(settings)
    except NotOffered as error:
        reply(error=str(error))
        return
    reply(
        version=engine.version,
        load_s=time.perf_counter() - start,
        resident_bytes=resident_bytes(),
        weight_bytes=engine.weight_bytes,
        weight_numbers=weight_numbers(Path(settings.model)),
    )
    for line in sys.stdin:
        order = json.loads(line)
        before = time.perf_counter()
        tokens = engine.complete(order["prompts"], order["output_len"])
        elapsed = time.perf_counter() - before
        told = asdict(engine.told()) if order.get("tell") and engine.told is not None else None
        reply(elapsed_s=elapsed, output_tokens=tokens, resident_bytes=resident_bytes(), told=told)


def resident_bytes() -> int:
    """Memory of this process and its descendants; what several share counts once (PSS)."""
    rollups = _read_all("smaps_rollup")
    lines = [line for rollup in rollups for line in rollup.splitlines() if line.startswith("Pss:")]
    return sum(int(line.split()[1]) for line in lines) * 1024


def _read_all(name: str) -> list[str]:
    """The file /proc/PID/`name` of this process and of all its descendants."""
    found, pending = [], [os.getpid()]
    while pending:
        directory = Path(f"/proc/{pending.pop()}")
        try:
            for task in (directory / "task").iterdir():
                pending += [int(word) for word in (task / "children").read_text().split()]
            found.append((directory / name).read_text())
        except OSError:  # it has just ended
            continue
    return found
