"""How products are cut for this machine's caches: measured once on a machine, then read from a file.

Theory. `native/panels.h` cuts a product's rows into chunks that stay in the second-level cache, gives a
thread items of some tiles, and fetches weights some bytes ahead. Which sizes are best depends on caches and
memory that no table of CPUs tells (a virtual machine may have a part of them). No bit of a result depends on
them, so they may be measured, and two instances may have measured differently. **The instruction set is not
measured**: bits depend on it, and instances of one server must not differ by what they happened to measure;
`library.native` chooses it by what the CPU has.

The worker that packs weights measures, which takes some tenths of a second once; one that maps weights, as
after a kill, only reads the file. A machine that is busy measures noise: another cut than the default is
taken only if it was faster in nearly every round of alternating ones, and by more than `_LEAST_GAIN`. Without
a directory that can be written to, the default stays.
"""

from __future__ import annotations

import logging
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch

from baton.model.cpu.library import Native, made_of, native
from baton.model.cpu.linear import NativeProduct, serves
from baton.observe.logs import unless_shown

log = logging.getLogger(__name__)


class Blocking(msgspec.Struct, frozen=True):
    """`native/blocking.h` has its twin; bytes."""

    chunk: int = 384 << 10
    """Of activations that stay in the second-level cache."""
    item: int = 256 << 10
    """Of activations that one item of work multiplies."""
    ahead: int = 8 << 10
    """That weights are fetched before they are multiplied."""


DEFAULT = Blocking()
_CHUNKS = [
    Blocking(chunk=chunk << 10, item=item << 10)
    for chunk, item in ((384, 256), (192, 128), (384, 128), (768, 256), (1536, 512))
]
_AHEAD = (8 << 10, 4 << 10, 16 << 10)
_ROUNDS = 7
_LEAST_GAIN = 0.03
_SIDE = 2048
"""Inputs and outputs of the product that is measured."""
_PROMPT_ROWS = 512
_WEIGHTS = 12
"""As many products after each other, 8 MiB each in bf16, so that weights come from memory."""


class _Kept(msgspec.Struct, frozen=True):
    """What the file holds."""

    machine: str
    blocking: Blocking


def use(*, measure: bool, path: Path | None = None) -> Blocking:
    """Sets and returns the blocking of this machine: from the file at `path` (default: `kept_at()`), or
    measured if there is none for this machine, `measure` is true and the file can be written; else the
    default.

    To be called while no product is computed.
    """
    library, path = native(), path or kept_at()
    if library is None:
        return DEFAULT
    machine = machine_of(library)
    found = _read(path, machine)
    if found is None and measure and _writable(path.parent):
        begin = time.monotonic()
        found = measured(library)
        _write(path, _Kept(machine, found))
        took = time.monotonic() - begin
        log.log(unless_shown(logging.INFO), "products are cut as measured in %.2f s: %s", took, found)
    chosen = found or DEFAULT
    library.use_blocking(chosen.chunk, chosen.item, chosen.ahead)
    return chosen


def kept_at() -> Path:
    """`baton/blocking.json` in the user's directory for caches (XDG)."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "baton" / "blocking.json"


def machine_of(library: Native) -> str:
    """What the file is good for: CPU, threads, kernels."""
    name = platform.processor() or platform.machine()
    try:
        text = Path("/proc/cpuinfo").read_text()
        names = [line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")]
        name = f"{len(names)} x {names[0]}" if names else name
    except OSError:
        pass
    return f"{name}, {torch.get_num_threads()} threads, {library.instruction_set}, {made_of()}"


def measured(library: Native) -> Blocking:
    """The best on this machine now."""
    dtype = torch.bfloat16 if serves(library, torch.bfloat16) else torch.float32
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((_SIDE, _SIDE), generator=generator).to(dtype)
    products = [NativeProduct(library, weight, None) for _ in range(_WEIGHTS)]
    prompt = torch.randn((_PROMPT_ROWS, _SIDE), generator=generator).to(dtype)
    token = prompt[:1].clone()

    def prefill() -> None:
        products[0].multiply(prompt)

    def decode() -> None:
        for product in products:
            product.multiply(token)

    def seconds(blocking: Blocking, work: Callable[[], None]) -> float:
        library.use_blocking(blocking.chunk, blocking.item, blocking.ahead)
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    cut = choose(_CHUNKS, lambda one: seconds(one, prefill))
    return choose(
        [msgspec.structs.replace(cut, ahead=ahead) for ahead in _AHEAD], lambda one: seconds(one, decode)
    )


def choose(candidates: Sequence[Blocking], seconds: Callable[[Blocking], float]) -> Blocking:
    """The fastest, in alternating rounds after one that warms up; the first one unless another was faster in
    all rounds but one, and by more than `_LEAST_GAIN` in the median."""
    rounds = [[seconds(one) for one in candidates] for _ in range(_ROUNDS + 1)][1:]
    best, least = candidates[0], 1 - _LEAST_GAIN
    for number, one in enumerate(candidates):
        ratios = [times[number] / times[0] for times in rounds]
        if statistics.median(ratios) < least and sum(ratio < 1 for ratio in ratios) >= _ROUNDS - 1:
            best, least = one, statistics.median(ratios)
    return best


def _read(path: Path, machine: str) -> Blocking | None:
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=_Kept)
    except (OSError, msgspec.MsgspecError):
        return None
    sizes = msgspec.structs.astuple(kept.blocking)
    return (
        kept.blocking if kept.machine == machine and all(1024 <= size <= 1 << 30 for size in sizes) else None
    )


def _writable(directory: Path) -> bool:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(directory, os.W_OK)


def _write(path: Path, kept: _Kept) -> None:
    """All at once: other workers may read it meanwhile."""
    fresh = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        fresh.write_bytes(msgspec.json.encode(kept))
        fresh.replace(path)
    except OSError as error:
        log.warning("the blocking of products cannot be kept in %s: %s", path, error.strerror)
