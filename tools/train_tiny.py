"""Train `baton-tiny`, the model inside the package: `python tools/train_tiny.py --out
src/baton/assets/baton-tiny`.

Theory. What costs is the forming of induction heads: until they exist the loss on recalled values stays
flat, then it falls within a few hundred steps. They form soonest on short rows that are dense in copies, so
the curriculum starts with 256 tokens a row (some rows are only random tokens, repeated) and stretches to
2,048 when copying works; RoPE with a large base makes that stretch easy. Matrices learn by Muon (momentum,
orthogonalised by Newton-Schulz: every direction of the matrix moves equally, which finds such circuits in
fewer steps), the rest by Adam.

Everything random is a function of (seed, step, row), so a run with the same `--steps` and `--seed` sees the
same data, and one resumed from `--state` goes on where it stopped. `--minutes` is a budget: when time runs
ahead of steps, the schedule is driven by time, so that the run still ends with its decay (and is then not
reproducible to the bit).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from tiny_calls import MARKERS
from tiny_corpus import END, SAY, TEXT_END, document
from tiny_model import TinyConfig, TinyModel
from tiny_rows import Phase, Rows, token_id
from tiny_tokenizer import save_tokenizer, train_tokenizer, with_markers

TALK = (
    Phase(0.52, 256, 32, 0.4, 0.10),
    Phase(0.74, 1024, 8, 0.6, 0.05),
    Phase(1.00, 2048, 4, 0.75, 0.0),
)
CALLS = (
    Phase(0.80, 512, 12, 0.4, 0.0, 0.80),
    Phase(1.00, 2048, 3, 0.6, 0.0, 0.65),
)


@dataclass(frozen=True)
class Stage:
    """What the run learns, and how fast."""

    curriculum: tuple[Phase, ...]
    steps: int
    muon_rate: float
    adam_rate: float


STAGES = {"talk": Stage(TALK, 2100, 0.02, 0.003), "calls": Stage(CALLS, 2000, 0.01, 0.0015)}


# --- learning ----------------------------------------------------------------------------------------------


def orthogonalised(matrices: Tensor) -> Tensor:
    """The nearest (semi-)orthogonal matrices, about: five Newton-Schulz steps of Muon, on a stack."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)).bfloat16()
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    made: Tensor = (x.mT if tall else x).float()
    return made


class Learner:
    """Muon for the matrices inside the blocks, Adam for the embedding and the norms."""

    def __init__(self, model: TinyModel, muon_rate: float, adam_rate: float) -> None:
        self.muon_rate = muon_rate
        inner = [p for p in model.blocks.parameters() if p.dim() == 2]
        self.stacks = [
            [p for p in inner if p.shape == shape] for shape in dict.fromkeys(p.shape for p in inner)
        ]
        self.momenta = [torch.zeros(len(stack), *stack[0].shape) for stack in self.stacks]
        rest = [p for p in model.parameters() if not any(p is q for q in inner)]
        self.adam = torch.optim.AdamW(rest, lr=adam_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
        self.adam_rate = adam_rate

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Apply the gradients, the rates scaled by `factor`, and clear them."""
        for stack, momentum in zip(self.stacks, self.momenta, strict=True):
            gradient = torch.stack([p.grad for p in stack if p.grad is not None])
            momentum.lerp_(gradient, 0.05)
            update = orthogonalised(gradient.lerp(momentum, 0.95))
            rate = factor * self.muon_rate * max(1.0, update.shape[1] / update.shape[2]) ** 0.5
            for parameter, change in zip(stack, update, strict=True):
                parameter.mul_(1 - 0.02 * factor * self.muon_rate).sub_(change, alpha=rate)
        for group in self.adam.param_groups:
            group["lr"] = factor * self.adam_rate
        self.adam.step()
        for stack in self.stacks:
            for parameter in stack:
                parameter.grad = None
        self.adam.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {"momenta": self.momenta, "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a kept state."""
        self.momenta = state["momenta"]
        self.adam.load_state_dict(state["adam"])


class Loss(nn.Module):
    """Cross-entropy: its weighted mean, and its mean over what the assistant says."""

    def __init__(self, model: TinyModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.model(ids[:, :-1])
        logits = F.linear(hidden, self.model.embed.weight.bfloat16()).float()
        losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        weights = weights[:, 1:].flatten()
        said = (weights == SAY).float()
        mean = (losses * weights).sum() / weights.sum()
        return mean, (losses.detach() * said).sum() / said.sum().clamp(min=1)


@torch.no_grad()
def spans_right(model: TinyModel, ids: Tensor, weights: Tensor) -> float:
    """The share of assistant answers whose every token is the most likely one."""
    right = total = 0
    for row, weight in zip(ids, weights, strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            best = F.linear(model(row[None, :-1]), model.embed.weight)[0].argmax(-1)
        fits = (best == row[1:]) | (weight[1:] != SAY)
        said = weight[1:] == SAY
        starts = said & ~torch.cat((torch.tensor([False]), said[:-1]))
        span = starts.cumsum(0) * said
        for number in range(1, int(starts.sum()) + 1):
            total += 1
            right += bool(fits[span == number].all())
    return right / max(total, 1)


def rate_factor(progress: float) -> float:
    """Warm-up over 2 %, then flat, then linear decay over the last 45 %."""
    return min(1.0, progress / 0.02 + 0.01, max(0.02, (1 - progress) / 0.45))


# --- the run -----------------------------------------------------------------------------------------------


def save(model: TinyModel, tokenizer: Tokenizer, directory: Path) -> None:
    """Write the checkpoint as `transformers` reads it: into a temporary place first, then file by file."""
    config = model.config
    text_end, end = token_id(tokenizer, TEXT_END), token_id(tokenizer, END)
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as name:
        place = Path(name)
        save_tokenizer(tokenizer, place, config.max_position_embeddings)
        save_file(model.hf_state_dict(), place / "model.safetensors", metadata={"format": "pt"})
        plan = {
            "config.json": config.hf_config([end, text_end], text_end, text_end),
            "generation_config.json": {
                "bos_token_id": text_end,
                "do_sample": False,
                "eos_token_id": [end, text_end],
                "pad_token_id": text_end,
            },
        }
        for file, content in plan.items():
            (place / file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        for path in place.iterdir():
            path.chmod(0o644)
            shutil.move(path, directory / path.name)


def cpu_seconds() -> float:
    """CPU time of this process and its finished children (the compiler)."""
    return sum(
        u.ru_utime + u.ru_stime
        for u in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def tokenizer_of(seed: int, vocab_size: int) -> Tokenizer:
    """The tokenizer of the first stage, learned from its documents."""
    bytes_only = Rows(train_tokenizer((), 260), seed)
    sample = (
        "".join(text for text, _ in document(Random(f"bpe/{index}"), 150, bytes_only.count, 0.15))
        for index in range(12_000)
    )
    return train_tokenizer(sample, vocab_size)


class Run:
    """A training run: what it keeps between steps, and its clocks."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.wall, self.cpu = -time.monotonic(), -cpu_seconds()  # plus now: the time spent
        torch.manual_seed(options.seed)
        self.curriculum = STAGES[options.stage].curriculum
        self.model = TinyModel(TinyConfig())
        if options.stage == "talk":
            self.tokenizer = tokenizer_of(options.seed, self.model.config.vocab_size)
        else:
            self.tokenizer = with_markers(
                Tokenizer.from_file(str(options.source / "tokenizer.json")), MARKERS
            )
            self.model.load_hf(load_file(options.source / "model.safetensors"))
            with torch.no_grad():
                mean = self.model.embed.weight.mean(0)
                for index, marker in enumerate(MARKERS):
                    noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(index))
                    self.model.embed.weight[token_id(self.tokenizer, marker)] = mean + 0.02 * noise
        self.rows = Rows(self.tokenizer, options.seed)
        self.learner = Learner(self.model, options.muon_rate, options.adam_rate)
        loss = Loss(self.model)
        self.loss: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = loss
        if options.compile:
            self.loss = torch.compile(loss, dynamic=False)
        self.step, self.tokens, self.said = 0, 0, 0.0
        if options.state and options.state.exists():
            self.resume()

    def resume(self) -> None:
        """Go on where the kept state stopped."""
        kept = torch.load(self.options.state, weights_only=True)
        self.step, self.tokens, self.said = kept["step"], kept["tokens"], kept["said"]
        self.wall += kept["wall"]
        self.cpu += kept["cpu"]
        self.model.load_state_dict(kept["model"])
        self.learner.load_state_dict(kept["learner"])
        print(f"resumed at step {self.step}", flush=True)

    def keep(self) -> None:
        """Write the checkpoint and, if asked for, the state of the run."""
        save(self.model, self.tokenizer, self.options.out)
        if self.options.state:
            kept: dict[str, Any] = {"step": self.step, "tokens": self.tokens, "said": self.said}
            kept |= {"wall": self.wall + time.monotonic(), "cpu": self.cpu + cpu_seconds()}
            kept |= {"model": self.model.state_dict(), "learner": self.learner.state_dict()}
            torch.save(kept, self.options.state)

    def progress(self) -> float:
        """How much of the run is over: by steps, or by time if that is ahead."""
        share: float = self.step / self.options.steps
        if self.options.minutes:
            share = max(share, (self.wall + time.monotonic()) / 60 / self.options.minutes)
        return min(share, 1.0)

    def report(self, progress: float, phase: Phase) -> None:
        """One line of the log."""
        right = spans_right(self.model, *self.rows.probe(phase.length, 20))
        calls = ""
        if phase.calls:
            calls = f"  calls {spans_right(self.model, *self.rows.probe(512, 40, calls=True)):.2f}"
        wall, cpu = self.wall + time.monotonic(), self.cpu + cpu_seconds()
        print(
            f"step {self.step:5d}  {progress:4.0%}  length {phase.length:4d}  said {self.said:.3f}  "
            f"recall {right:.2f}{calls}  tokens {self.tokens / 1e6:.2f}M  wall {wall:.0f}s  cpu {cpu:.0f}s",
            flush=True,
        )

    def advance(self, progress: float, phase: Phase) -> None:
        """One step of learning."""
        ids, weights = self.rows.batch(self.step, phase)
        with torch.autocast("cpu", torch.bfloat16):
            loss, said = self.loss(ids, weights)
        torch.autograd.backward(loss)
        self.learner.step(rate_factor(progress))
        self.said += (said.item() - self.said) * (0.05 if self.said else 1.0)
        self.step += 1
        self.tokens += phase.rows * phase.length

    def go(self) -> None:
        """Run to the end."""
        log_every = self.options.log_every
        print(
            f"{sum(p.numel() for p in self.model.parameters()):,} parameters, "
            f"vocabulary {self.rows.vocab}, {torch.get_num_threads()} threads of {os.cpu_count()} cores",
            flush=True,
        )
        while (progress := self.progress()) < 1:
            phase = next(phase for phase in self.curriculum if progress < phase.until)
            self.advance(progress, phase)
            if self.step % log_every == 0:
                self.report(progress, phase)
            if self.step % (4 * log_every) == 0:
                self.keep()
        self.report(1.0, self.curriculum[-1])
        self.keep()


def main() -> None:
    """Parse the arguments and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the directory for the checkpoint")
    parser.add_argument("--stage", choices=tuple(STAGES), default="talk")
    parser.add_argument(
        "--from",
        type=Path,
        dest="source",
        metavar="DIR",
        help="the checkpoint that the stage `calls` goes on from",
    )
    parser.add_argument("--steps", type=int, help="of learning (default: the stage's)")
    parser.add_argument("--minutes", type=float, default=0.0, help="a budget of wall time (0: none)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--state", type=Path, help="keep the state of the run here, and resume from it")
    parser.add_argument("--muon-rate", type=float, help="(default: the stage's)")
    parser.add_argument("--adam-rate", type=float, help="(default: the stage's)")
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    if (options.stage == "calls") != (options.source is not None):
        parser.error("--stage calls needs --from DIR, and no other stage takes it")
    stage = STAGES[options.stage]
    options.steps = options.steps or stage.steps
    options.muon_rate = options.muon_rate or stage.muon_rate
    options.adam_rate = options.adam_rate or stage.adam_rate
    Run(options).go()


if __name__ == "__main__":
    main()
