"""Sampling on a device: what requests ask for as tensors, and the launches.  `chunks` tells the theory.

Nothing here waits for the device: logits and parameters are on it, and so are the tokens that come back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from baton.model.cpu.sampling import SlotParameters
from baton.model.cuda.choosing import choose_kernel, edit_kernel
from baton.model.cuda.chunks import masses_kernel, maxima_kernel
from baton.model.cuda.launch import Launch, check, next_power

CHUNK: Final = 1024
_ENTRIES: Final = 256
"""Of a program."""


@dataclass(frozen=True, eq=False)
class Wishes:
    """What the request on each slot asks for, all [num_slots]: `SlotParameters` on a device."""

    temperature: Tensor
    """float32; 0: greedy"""
    top_k: Tensor
    """int64; the size of the vocabulary: all"""
    top_p: Tensor
    """float64"""
    min_p: Tensor
    """float32"""
    streams: Tensor
    """int64: the bits of `SlotParameters.streams`"""
    masked: Tensor
    """uint8; 1: only tokens of its mask may be chosen"""
    masks: Tensor
    """int32 [num_slots, words]: a bit for each token, the lowest of the first word is token 0"""

    @classmethod
    def of(cls, have: SlotParameters, device: torch.device) -> Wishes:
        """A copy."""
        columns = (
            have.temperature,
            have.top_k,
            have.top_p,
            have.min_p,
            have.streams.view(np.int64),
            have.masked,
            have.masks.view(np.int32),
        )
        return cls(*(torch.from_numpy(column.copy()).to(device) for column in columns))


@dataclass(frozen=True, eq=False)
class Edits:
    """Changes of logits, an entry for each token of a row that is changed; no two name the same."""

    rows: Tensor
    """[N] int32: of the logits"""
    ids: Tensor
    """[N] int32: of the vocabulary"""
    biases: Tensor
    """[N] float32, added first"""
    banned: Tensor
    """[N] uint8; 1: the token is impossible"""
    seen: Tensor
    """[N] uint8; 1: the prompt or the answer has the token, so penalties concern it"""
    counts: Tensor
    """[N] float32: how often the answer has it"""
    repetitions: Tensor
    """[rows] float32; 1: none"""
    frequencies: Tensor
    """[rows] float32; 0: none"""
    presences: Tensor
    """[rows] float32; 0: none"""


def sample(logits: Tensor, slots: Tensor, positions: Tensor, wishes: Wishes) -> Tensor:
    """Logits [n, vocab] float32 of these slots [n] int32, positions of the new tokens [n] int32 → tokens [n]
    int32."""
    tokens = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    for launch in sample_launches(logits, slots, positions, wishes, tokens):
        launch.run()
    return tokens


def sample_launches(
    logits: Tensor, slots: Tensor, positions: Tensor, wishes: Wishes, tokens: Tensor
) -> list[Launch]:
    """See `sample`."""
    check("logits", logits, (None, None), torch.float32)
    rows, vocab = logits.shape
    check("slots", slots, (rows,), torch.int32)
    check("positions", positions, (rows,), torch.int32)
    check("tokens", tokens, (rows,), torch.int32)
    if wishes.masks.shape[1] * 32 < vocab:
        raise ValueError(f"logits [{rows}, {vocab}]: masks have only {wishes.masks.shape[1] * 32} bits")
    chunks = -(-vocab // CHUNK)
    maxima = torch.empty((rows, chunks), dtype=torch.float32, device=logits.device)
    masses = torch.empty((rows, chunks), dtype=torch.float64, device=logits.device)
    row = dict(
        logits=logits,
        slots=slots,
        stride=logits.stride(0),
        words=wishes.masks.stride(0),
        vocab=vocab,
        chunks=chunks,
        CHUNK=CHUNK,
    )
    masks = dict(masked=wishes.masked, masks=wishes.masks)
    wide = next_power(chunks)
    weighing = dict(temperatures=wishes.temperature, min_ps=wishes.min_p, CHUNKS=wide)
    choosing = dict(
        positions=positions,
        tokens=tokens,
        top_ks=wishes.top_k,
        top_ps=wishes.top_p,
        streams=wishes.streams,
        all_masked=wishes.masked,
        all_masks=wishes.masks,
        all_maxima=maxima,
        all_masses=masses,
    )
    return [
        Launch(maxima_kernel, (rows, chunks), {**row, **masks, "maxima": maxima}, fused=False),
        Launch(
            masses_kernel,
            (rows, chunks),
            {**row, **masks, **weighing, "maxima": maxima, "masses": masses},
            fused=False,
        ),
        Launch(choose_kernel, (rows,), {**row, **weighing, **choosing}, warps=8, fused=False),
    ]


def edit(logits: Tensor, edits: Edits) -> None:
    """Edits logits [n, vocab], float32, in place, as `sampling.edits.edit_logits` does."""
    edit_launch(logits, edits).run()


def edit_launch(logits: Tensor, edits: Edits) -> Launch:
    check("logits", logits, (None, None), torch.float32)
    total, rows = len(edits.ids), len(logits)
    for name, dtype in (
        ("rows", torch.int32),
        ("ids", torch.int32),
        ("biases", torch.float32),
        ("banned", torch.uint8),
        ("seen", torch.uint8),
        ("counts", torch.float32),
    ):
        check(name, getattr(edits, name), (total,), dtype)
    for name in ("repetitions", "frequencies", "presences"):
        check(name, getattr(edits, name), (rows,), torch.float32)
    arguments = dict(
        logits=logits,
        rows=edits.rows,
        ids=edits.ids,
        biases=edits.biases,
        banned=edits.banned,
        seen=edits.seen,
        counts=edits.counts,
        repetitions=edits.repetitions,
        frequencies=edits.frequencies,
        presences=edits.presences,
        stride=logits.stride(0),
        total=total,
        WIDTH=_ENTRIES,
    )
    return Launch(edit_kernel, (-(-total // _ENTRIES),), arguments, fused=False)
