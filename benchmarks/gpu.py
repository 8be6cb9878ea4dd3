"""What a GPU gives: rates of decoding and prompts, kernels, nano-vllm's benchmark, beside measured limits.

    python benchmarks/gpu.py --part device --part kernels --part qwen3-0.6b [--out FILE] [--device cuda]

Parts: `device` (bandwidth and peak, which the others read from FILE), `kernels`, a model's shape
(`qwen3-0.6b`, `qwen3-4b`, `llama-8b`), `nano`; without --part all of them, in this order.  Each part is a
process of its own, so that one that fails takes no other with it.  `make gpu` runs it.

`--tiny --device cpu` runs all of it on a CPU, the kernels in Triton's interpreter, with sizes that mean
nothing: so an error is found where there is no GPU.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PARTS = ("device", "qwen3-0.6b", "nano", "llama-8b", "qwen3-4b", "kernels")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", action="append", choices=PARTS, help="what to measure; all by default")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where (cuda)")
    parser.add_argument("--tiny", action="store_true", help="sizes that mean nothing, for a try")
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help="add each figure to FILE, a line of JSON each"
    )
    parser.add_argument("--deadline", type=float, default=120.0, help="seconds of a part at most (120)")
    asked = parser.parse_args()
    parts = asked.part or list(PARTS)
    if len(parts) == 1:
        _measure(parts[0], asked)
        return
    with tempfile.TemporaryDirectory() as folder:
        asked.out = asked.out or Path(folder, "figures")
        failed = [part for part in parts if not _in_its_own_process(part, asked)]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def _in_its_own_process(part: str, asked: argparse.Namespace) -> bool:
    command = [sys.executable, __file__, "--part", part, "--device", asked.device, "--out", str(asked.out)]
    try:
        return subprocess.run([*command, *["--tiny"] * asked.tiny], timeout=asked.deadline).returncode == 0
    except subprocess.TimeoutExpired:
        print(f"{part}: not done within {asked.deadline:.0f} s", flush=True)
        return False


def _measure(part: str, asked: argparse.Namespace) -> None:
    if asked.device == "cpu" and part != "nano":
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    import torch

    from _gpu.figures import HEAD, Figures
    from _gpu.measuring import known_device, measure_device

    if asked.device == "cuda" and not torch.cuda.is_available():
        sys.exit("there is no CUDA device: give --device cpu --tiny to try it on a CPU")
    if asked.device == "cpu" and not asked.tiny:
        sys.exit("--device cpu is for --tiny: CPUs have benchmarks of their own (docs/benchmarks.md)")
    device = known_device(
        torch.device("cuda", 0) if asked.device == "cuda" else torch.device("cpu"), asked.tiny, asked.out
    )
    figures = Figures(part, asked.out)
    print(HEAD, flush=True)
    begin = time.perf_counter()
    if part == "device":
        measure_device(device, figures)
    elif part == "nano":
        from _gpu.nano import measure_nano

        measure_nano(device, figures)
    else:
        if asked.device == "cpu":
            from _gpu.interpreted import interpret

            interpret()
        if part == "kernels":
            from _gpu.kernels import measure_kernels

            measure_kernels(device, figures)
        else:
            from _gpu.steps import measure_model

            measure_model(part, device, figures)
    figures.add("whole part", seconds=time.perf_counter() - begin)


if __name__ == "__main__":
    main()
