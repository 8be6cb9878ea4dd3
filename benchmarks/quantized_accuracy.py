"""How far quantized models are from float32, Baton's formats beside llama.cpp's of the same checkpoint.

    python benchmarks/quantized_accuracy.py [MODEL …] [--llama VENV] [--text README.md] [--max-tokens 2048]

MODEL is the directory of a bfloat16 checkpoint (default: the embedded model).  The reference is the same
checkpoint in float32, computed by Baton; windows and figures are those of `baton bench perplexity`.  VENV has
llama-cpp-python, gguf and numpy; its `bf16` row says how well the two engines agree on the same weights, and
how exact this comparison is.  *Bits* are those of all weights as they are held, embedding, head and scales
included, divided by their number.  Of random weights compare the divergence, not the perplexity.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from _common import Table, machine, print_machine, write_json
from _llama_cpp import LlamaCpp
from baton.bench.perplexity import Ids, Perplexity, Predictor, Scorer, measure_perplexity
from baton.gateway.text.tokenizer import Tokenizer
from baton.launch.arguments import choose_arguments
from baton.launch.planning.plan import ServerPlan, make_plan

_ROWS = 64
_OURS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "KV int8": {"kv_cache_dtype": "int8"},
    "int8": {"quantization": "int8"},
    "int8, KV int8": {"quantization": "int8", "kv_cache_dtype": "int8"},
    **{
        f"int8 / {group}": {"quantization": "int8", "quantization_group_size": group}
        for group in (32, 64, 128)
    },
    **{
        f"int4 / {group}, head {head}": {
            "quantization": "int4",
            "quantization_group_size": group,
            "quantize_head": head,
        }
        for group in (32, 64, 128)
        for head in (8, 6, 4)
    },
}
_THEIRS = ("bf16", "q8_0", "q4_0", "q4_k_m")


@dataclass(frozen=True)
class Text:
    """What is predicted."""

    tokens: Ids
    context: int
    stride: int

    def measure(self, model: Predictor, reference: Predictor | None = None) -> Perplexity:
        return measure_perplexity(self.tokens, model, reference, context=self.context, stride=self.stride)


class Recorded:
    """Writes down what a model says of a text, and says it again, window by window, as often as is asked."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._rows = 0
        self._at = 0

    def record(self, model: Predictor, text: Text) -> None:
        with self._file.open("wb") as out:

            class Through:
                def log_probabilities(_, tokens: Ids, first: int) -> Iterator[torch.Tensor]:
                    for piece in model.log_probabilities(tokens, first):
                        self._vocab_size = piece.shape[1]
                        self._rows += len(piece)
                        piece.numpy().tofile(out)
                        yield piece

            text.measure(Through())

    def rewind(self) -> None:
        self._at = 0

    def log_probabilities(self, tokens: Ids, first: int) -> Iterator[torch.Tensor]:
        logs = np.memmap(self._file, np.float32, "r", shape=(self._rows, self._vocab_size))
        last = self._at + len(tokens) - first
        while self._at < last:
            rows = min(_ROWS, last - self._at)
            self._at += rows
            yield torch.from_numpy(np.array(logs[self._at - rows : self._at]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--llama", type=Path, metavar="VENV", help="also llama.cpp's formats")
    parser.add_argument("--converted", type=Path, help="where its files are kept; default: MODEL-converted")
    parser.add_argument("--text", type=Path, default=Path("README.md"))
    parser.add_argument("--max-tokens", type=int, default=2048)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--stride", type=int, default=256)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of ours")
    parser.add_argument("--only", default="", help="formats whose name has this")
    parser.add_argument("--out", help="write JSON here")
    arguments = parser.parse_args()
    print_machine(machine())
    results = [_of_model(model, arguments) for model in arguments.models or [None]]
    write_json(arguments.out, {"machine": machine(), "models": results})


def _of_model(model: str | None, arguments: argparse.Namespace) -> dict[str, Any]:
    plan = _plan(model, arguments, dtype="float32")
    directory = Path(plan.instance.model)
    ids = Tokenizer.from_directory(directory).encode(arguments.text.read_text(encoding="utf-8"))
    text = Text(np.array(ids[: arguments.max_tokens], np.int32), arguments.context, arguments.stride)
    parameters = sum(file.stat().st_size for file in directory.glob("*.safetensors")) / 2
    columns = ("format", "bits", "KL, mean", "KL, 99.9 %", "same first", "perplexity, ratio")
    table = Table(f"{directory.name}, {len(text.tokens) - 1} tokens, from float32", columns)
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory() as kept:
        reference = Recorded(Path(kept) / "reference")
        with closing(Scorer(plan.instance, text.context)) as exact:
            reference.record(exact, text)
        for name, bits, predictor in _models(model, directory, arguments, parameters):
            reference.rewind()
            found = text.measure(predictor, reference)
            compared = found.reference
            assert compared is not None
            cells = (f"{bits:.2f}", f"{compared.kl_mean:.6f}", f"{compared.kl_p999:.5f}")
            table.row(name, *cells, f"{compared.top1_agreement:.2%}", f"{compared.ratio:.4f}")
            print(name, *cells, f"{compared.top1_agreement:.2%}", f"{compared.ratio:.4f}", flush=True)
            rows.append({"format": name, "bits": bits, **found.as_dict()})
    table.print()
    return {"model": directory.name, "tokens": len(text.tokens) - 1, "rows": rows}


def _models(
    model: str | None, directory: Path, arguments: argparse.Namespace, parameters: float
) -> Iterator[tuple[str, float, Predictor]]:
    """Name, bits a weight; each is closed when the next is asked for."""
    for name, flags in _OURS.items():
        if arguments.only in f"baton {name}":
            plan = _plan(model, arguments, **{"dtype": arguments.dtype, **flags})
            with closing(Scorer(plan.instance, arguments.context)) as ours:
                yield f"baton {name}", 8 * ours.weight_bytes / parameters, ours
    converted = arguments.converted or directory.with_name(directory.name + "-converted")
    for form in _THEIRS if arguments.llama is not None else ():
        if arguments.only in f"llama.cpp {form}":
            converted.mkdir(parents=True, exist_ok=True)
            with closing(LlamaCpp(arguments.llama, directory, arguments.context, form, converted)) as theirs:
                yield f"llama.cpp {form}", 8 * theirs.weight_bytes / theirs.parameters, theirs


def _plan(model: str | None, arguments: argparse.Namespace, **flags: Any) -> ServerPlan:
    given = {"model": model, "max_model_len": arguments.context, "log_level": "warning", **flags}
    return make_plan(choose_arguments(given).options)


if __name__ == "__main__":
    main()
