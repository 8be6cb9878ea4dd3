"""Rows of token ids with their loss weights: what a step of `train_tiny.py` learns from.

Everything random in a row is a function of (seed, step, row).
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tiny_calls import call_document
from tiny_corpus import END, SAY, TEXT_END, document, recall_document


@dataclass(frozen=True)
class Phase:
    """A stretch of the curriculum, up to `until` (a share of the run)."""

    until: float
    length: int
    rows: int
    recall: float  # share of recall documents
    repeats: float  # share of rows that are repeated random tokens
    calls: float = 0.0  # share of documents that call functions, or think


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that exists."""
    found = tokenizer.token_to_id(token)
    assert found is not None, token
    return found


class Rows:
    """Builds rows of token ids with their loss weights."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self.tokenizer, self.seed = tokenizer, seed
        self.text_end = token_id(tokenizer, TEXT_END)
        self.vocab = tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def count(self, text: str) -> int:
        """How many tokens `text` has."""
        return len(self.encode(text))

    def pieces(self, text: str) -> list[str]:
        """The tokens of `text`, as texts."""
        return [self.tokenizer.decode([one]) for one in self.encode(text)]

    def repeated(self, text: str, asked: str) -> list[int]:
        """The ids of an answer; what repeats the end of `asked` has its tokens but for the first space."""
        said = text.removesuffix(END)
        if not said or not asked.endswith(f" {said}{END}"):
            return self.encode(text)
        first, *rest = self.encode(f" {text}")
        word = self.tokenizer.decode([first])
        return self.encode(text) if "\ufffd" in word else [*self.encode(word.removeprefix(" ")), *rest]

    def row(self, rng: Random, length: int, phase: Phase) -> tuple[list[int], list[float]]:
        """Documents until the row is full; the first of a long row fills most of it."""
        ids: list[int] = []
        weights: list[float] = []
        while len(ids) < length:
            left = length - len(ids)
            size = left if rng.random() < 0.6 else rng.randint(left // 3, left)
            if phase.calls and rng.random() < phase.calls:
                segments = call_document(rng, min(size, 600), self.count, self.pieces)
            else:
                segments = document(rng, size, self.count, phase.recall)
            asked = ""
            for text, weight in segments:
                piece = self.repeated(text, asked) if phase.calls and weight == SAY else self.encode(text)
                ids += piece
                weights += [weight] * len(piece)
                asked = text if weight != SAY and text.endswith(END) else asked
            ids.append(self.text_end)
            weights.append(SAY)
        return ids[:length], weights[:length]

    def repeats(self, rng: Random, length: int) -> tuple[list[int], list[float]]:
        """Random tokens, again and again; from the second time on they can be known."""
        ids: list[int] = []
        weights: list[float] = []
        while len(ids) < length:
            part = [rng.randrange(3, self.vocab) for _ in range(rng.randint(8, 100))]
            ids += part * 2
            weights += [0.0] * (len(part) + 1) + [0.5] * (len(part) - 1)
        return ids[:length], weights[:length]

    def batch(self, step: int, phase: Phase) -> tuple[Tensor, Tensor]:
        """The batch of a step: ids and weights, [rows, length + 1]."""
        made = []
        for index in range(phase.rows):
            rng = Random(f"{self.seed}/{step}/{index}")
            if rng.random() < phase.repeats:
                made.append(self.repeats(rng, phase.length + 1))
            else:
                made.append(self.row(rng, phase.length + 1, phase))
        return torch.tensor([ids for ids, _ in made]), torch.tensor([weights for _, weights in made])

    def probe(self, length: int, rows: int, calls: bool = False) -> tuple[Tensor, Tensor]:
        """Fresh rows of one document of recall, or of calls (the same ones each time) for the log."""
        made = []
        for index in range(rows):
            ids: list[int] = []
            weights: list[float] = []
            rng = Random(f"probe/{self.seed}/{index}")
            for text, weight in (
                call_document(rng, length - 40, self.count, self.pieces)
                if calls
                else recall_document(rng, length - 40, self.count)
            ):
                piece = self.encode(text)
                ids += piece
                weights += [weight] * len(piece)
            pad = max(0, length + 1 - len(ids))
            made.append(((ids + [self.text_end] * pad)[: length + 1], (weights + [0.0] * pad)[: length + 1]))
        return torch.tensor([ids for ids, _ in made]), torch.tensor([weights for _, weights in made])
