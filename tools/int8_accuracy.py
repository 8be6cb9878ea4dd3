"""What int8 costs in accuracy, against bf16 and float32: `python tools/int8_accuracy.py [DIRECTORY …]`.

* The embedded model: perplexity over fresh text of the kind that it was trained on, and how many of its
  greedy tokens differ from float32's when each is given the same beginning.
* Other checkpoints (random ones of `tools/make_checkpoint.py`, say): the error of logits over random tokens,
  as a part of the logits' own standard deviation.

Everything runs through the executor, as it does when it serves.
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import numpy as np
import torch

import baton
from baton.executor.torch_executor import TorchExecutor
from baton.launch.planning.instance_config import instance_config
from baton.model.attention import AttentionStep
from tiny_corpus import short_document

EMBEDDED = Path(baton.__file__).parent / "assets" / "baton-tiny"
FORMS = (("float32", None), ("bfloat16", None), ("bfloat16", "int8"))
LENGTH = 512
BLOCK = 64


@torch.inference_mode()
def logits_of(
    directory: Path, texts: list[list[int]], dtype: str, quantization: str | None
) -> list[torch.Tensor]:
    """[len(text), vocab] float32 of each text."""
    config = instance_config(
        model=str(directory),
        max_model_len=LENGTH,
        dtype=dtype,  # type: ignore[arg-type]
        quantization=quantization,  # type: ignore[arg-type]
        block_size=BLOCK,
        num_blocks=LENGTH // BLOCK,
        max_num_seqs=1,
    )
    executor = TorchExecutor.from_config(config, 0, "")
    found = []
    for text in texts:
        count = np.array([len(text)], np.int32)
        table = np.arange(LENGTH // BLOCK, dtype=np.int32)[None]
        step = AttentionStep(np.zeros(1, np.int32), count, table, 0)
        _, logits = executor._model(np.array(text, np.int32), step)
        assert logits is not None
        found.append(logits.float().clone())
    executor.close()
    return found


def embedded_model() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    texts = []
    for number in range(24):
        rng, text = Random(f"int8/{number}"), ""
        while len(tokenizer.encode(text).ids) < LENGTH:
            text += "".join(part if isinstance(part, str) else part[0] for part in short_document(rng)) + "\n"
        texts.append(tokenizer.encode(text).ids[:LENGTH])
    print(f"embedded model, {len(texts)} texts of {LENGTH} tokens:")
    best: list[torch.Tensor] = []
    for dtype, quantization in FORMS:
        logits = logits_of(EMBEDDED, texts, dtype, quantization)
        losses = [
            torch.nn.functional.cross_entropy(row[:-1], torch.tensor(text[1:]))
            for row, text in zip(logits, texts, strict=True)
        ]
        choices = [row.argmax(dim=-1) for row in logits]
        best = best or choices
        same = np.mean([(a == b).float().mean().item() for a, b in zip(choices, best, strict=True)])
        perplexity = torch.stack(losses).mean().exp().item()
        print(
            f"  {quantization or dtype:9} perplexity {perplexity:7.4f}, {1 - same:6.2%} other first choices"
        )


def checkpoint(directory: Path) -> None:
    texts = [np.random.default_rng(seed).integers(3, 1000, 128).tolist() for seed in range(2)]
    print(f"{directory}, {len(texts)} x 128 random tokens:")
    exact: list[torch.Tensor] = []
    for dtype, quantization in FORMS:
        logits = logits_of(directory, texts, dtype, quantization)
        exact = exact or logits
        errors = torch.cat([(a - b).flatten() for a, b in zip(logits, exact, strict=True)])
        spread = torch.cat([row.flatten() for row in exact]).std()
        rms = errors.square().mean().sqrt() / spread
        print(
            f"  {quantization or dtype:9} logits' error: {rms:.4f} rms, {errors.abs().max() / spread:.3f} max"
        )


if __name__ == "__main__":
    if len(sys.argv) == 1:
        embedded_model()
    for name in sys.argv[1:]:
        checkpoint(Path(name))
