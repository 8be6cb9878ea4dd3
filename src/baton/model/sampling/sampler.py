"""From logits to tokens: every sampling parameter, batched, and each row as if it were alone.

Theory.  A row's result is a function of its own logits, its request's parameters and tokens, and the
position of the new token; never of the other rows.  So each operation here works along a row, and where a
row takes a shortcut only its own values decide that.

Order, as `protocol.sampling` says: logit bias, `min_tokens` mask, repetition penalty (over prompt and
output), frequency and presence penalties (over the output), temperature, min-p, top-k, top-p; then one
uniform number u, keyed by (seed, position), and the first token in *vocabulary order* whose cumulative
weight exceeds u times the total.  Weights are exp((logit - max) / temperature) in float32; sums are in
float64.  Candidates are ranked by (logit descending, id ascending), so top-k keeps exactly k.

Truncation needs the ranked logits only down to the last one kept: `_truncated` ranks the first 64 or 1024
(by the row's own top_k) and repeats a row with the whole vocabulary if that was not enough.

Rows without special wishes cost nothing: a batch of greedy rows is one argmax.  Slots and their states live
on the host; logits may be on any device and are not changed.  On a CPU that has a kernel for it, that one
chooses (`cpu/sampling.py`), on a CUDA device Triton's (`cuda/slot_sampling.py`); what follows here is for
where there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.model.cpu.sampling import KernelSampling, SampleKernel, SlotParameters
from baton.model.sampling.counter_random import stream_starts, uniforms
from baton.model.sampling.edits import SlotEdits, edit_entries, edit_logits, leave_out
from baton.model.sampling.logprobs import token_logprobs
from baton.protocol.params.sampling import Sampling, Stopping, TokenLogprobs

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

_RANDOM = 1
_EDIT = 2
_LOGPROBS = 4
_MASKED = 8
_BANS = 16
"""Of edits: they make tokens impossible."""
_MIN_TEMPERATURE = 1e-5
"""Below it a distribution has one token anyway; treated as greedy."""
_SHORT = 64
_LONG = 1024


@dataclass
class _Drawing:
    """The parameters of the random rows of a step, each [n]."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor
    """float64"""

    def rows(self, chosen: Tensor) -> _Drawing:
        return _Drawing(
            self.temperature[chosen],
            self.top_k[chosen],
            self.top_p[chosen],
            self.min_p[chosen],
            self.uniform[chosen],
        )


class SlotSampling(Protocol):
    """What chooses tokens by the slots' parameters, masks included."""

    def takes(self, logits: Tensor) -> bool: ...

    def sample(self, logits: Tensor, slots: Int32Array, positions: Int32Array) -> Int32Array: ...


class DeviceSlotSampling(SlotSampling, Protocol):
    """On a device, which edits logits, too."""

    def edit(self, logits: Tensor, entries: Mapping[str, npt.NDArray[Any]]) -> None: ...


class Sampler:
    """The sampling state of all slots.  `kernel` chooses on a CPU; None: PyTorch's operations do."""

    def __init__(
        self,
        vocab_size: int,
        num_slots: int,
        kernel: SampleKernel | None,
        on_device: Callable[[SlotParameters, int], DeviceSlotSampling] | None = None,
    ) -> None:
        """`on_device`: makes what chooses where logits are on a device, of the slots' parameters and the size
        of the vocabulary."""
        self.vocab_size = vocab_size
        self._flags = np.zeros(num_slots, dtype=np.uint8)
        self._special: set[int] = set()
        """Slots whose requests ask for more than a token of the logits as they are."""
        self._have = SlotParameters.of_greedy(num_slots, vocab_size)
        self._kernel: SlotSampling | None = None
        self.on_device: DeviceSlotSampling | None = None
        """What `on_device` made."""
        if on_device is not None:
            self._kernel = self.on_device = on_device(self._have, vocab_size)
        elif kernel is not None:
            self._kernel = KernelSampling(kernel, self._have, vocab_size)
        self._edits: dict[int, SlotEdits] = {}
        self._logprobs: dict[int, tuple[int, bytes]] = {}
        """Slot → how many of the most likely tokens, or which ones."""
        self.dead: list[int] = []
        """Of the last call of `sample`: slots of which no token was possible; what was drawn is none."""
        self._prompt_logprobs: dict[int, int] = {}

    def admit(
        self, slot: int, tokens: Int32Array, num_prompt: int, sampling: Sampling, stopping: Stopping
    ) -> None:
        """A request takes `slot`; `tokens` is its prompt and what it generated before a preemption."""
        self.release(slot)
        flags = 0
        if sampling.temperature >= _MIN_TEMPERATURE:
            flags |= _RANDOM
            have = self._have
            have.temperature[slot] = sampling.temperature
            top_k = sampling.top_k
            have.top_k[slot] = top_k if 0 < top_k < self.vocab_size else self.vocab_size
            have.top_p[slot] = sampling.top_p
            have.min_p[slot] = sampling.min_p
            seed = np.array([sampling.seed & 0xFFFF_FFFF_FFFF_FFFF], dtype=np.uint64)
            have.streams[slot] = stream_starts(seed)[0]
        edits = SlotEdits.of(tokens, num_prompt, sampling, stopping, self.vocab_size)
        if edits is not None:
            flags |= _EDIT | (_BANS if edits.bans else 0)
            self._edits[slot] = edits
        if sampling.constraint is not None:
            flags |= _MASKED
        if sampling.logprobs is not None:
            flags |= _LOGPROBS
            self._logprobs[slot] = sampling.logprobs, sampling.logprob_ids
        if sampling.prompt_logprobs is not None:
            self._prompt_logprobs[slot] = sampling.prompt_logprobs
        self._flags[slot] = flags
        if flags & (_EDIT | _LOGPROBS | _MASKED):
            self._special.add(slot)

    def release(self, slot: int) -> None:
        self._flags[slot] = 0
        self._special.discard(slot)
        self._have.temperature[slot] = 0.0
        self._edits.pop(slot, None)
        self._logprobs.pop(slot, None)
        self._prompt_logprobs.pop(slot, None)

    @property
    def masked(self) -> npt.NDArray[np.uint8]:
        """[num_slots]: see `SlotParameters`."""
        return self._have.masked

    @property
    def masks(self) -> npt.NDArray[np.uint32]:
        """[num_slots, words]: see `SlotParameters`."""
        return self._have.masks

    def special(self, slots: Int32Array) -> bool:
        """Whether one of these slots' requests asks for more than a token of the logits as they are."""
        wishes = _EDIT | _LOGPROBS | _MASKED
        return bool(self._special) and bool((self._flags[slots] & wishes).any())

    def remembers(self, slots: Int32Array) -> bool:
        """Whether what is sampled for one of these slots depends on the tokens before, beside the logits."""
        return bool(self._special) and bool((self._flags[slots] & (_EDIT | _MASKED)).any())

    def masks_together(self, slots: Int32Array) -> bool:
        """Whether `sample` takes masks of single rows of these slots: on a CPU that has the kernel, if no
        request has edits."""
        return isinstance(self._kernel, KernelSampling) and not (self._flags[slots] & _EDIT).any()

    def prompt_logprobs_of(self, slot: int) -> int:
        """How many alternatives the slot's request wants for each prompt token."""
        return self._prompt_logprobs.get(slot, 0)

    def sample(
        self,
        logits: Tensor,
        slots: Int32Array,
        positions: Int32Array,
        masks: npt.NDArray[np.uint32] | None = None,
    ) -> tuple[Int32Array, dict[int, TokenLogprobs]]:
        """Logits [n, vocab] of these slots, of any float type → tokens [n], log-probabilities.  What is
        in the `masks` of slots whose requests are constrained has been filled.

        `positions`: [n] of the new tokens, that is, how many tokens each request has so far.
        `masks`: [n or more, words] of each row in place of its slot's; see `masks_together`.
        The dictionary has the indices, 0 to n-1, of the rows that asked.
        """
        self.dead = []
        if not self._special:
            return self._choose(logits, slots, positions), {}
        flags = self._flags[slots]
        wishes = int(np.bitwise_or.reduce(flags)) if len(flags) else 0
        reported = bool(wishes & _LOGPROBS) and bool(
            (flags & (_MASKED | _LOGPROBS) == _MASKED | _LOGPROBS).any()
        )
        masked = logits
        if masks is not None:
            assert isinstance(self._kernel, KernelSampling)
            if not self._kernel.takes(logits):
                masked = logits = logits.float().contiguous()
            if reported:
                masked = self._masked(logits, flags, masks, np.arange(len(slots)))
            tokens = self._kernel.sample_each(logits, slots, positions, masks)
            return tokens, self._report(masked, slots, tokens, flags) if wishes & _LOGPROBS else {}
        if wishes & _MASKED:
            applies = self._kernel is not None and self._kernel.takes(logits)  # the masks, by itself
            if wishes & _BANS:
                applies = applies and not (flags & (_MASKED | _BANS) == _MASKED | _BANS).any()
            if not applies or reported:
                masked = self._masked(logits, flags, self.masks, slots)
            if not applies:
                logits = masked
        if wishes & _EDIT:
            tokens = self._choose_edited(logits, slots, positions, flags)
        else:
            tokens = self._choose(logits, slots, positions)
        return tokens, self._report(masked, slots, tokens, flags) if wishes & _LOGPROBS else {}

    def _choose_edited(
        self, logits: Tensor, slots: Int32Array, positions: Int32Array, flags: npt.NDArray[np.uint8]
    ) -> Int32Array:
        """As `_choose` where some rows are edited: they are sampled from a copy."""
        tokens = np.empty(len(slots), np.int32)
        plain, edited = np.flatnonzero((flags & _EDIT) == 0), np.flatnonzero(flags & _EDIT)
        if len(plain):
            others = torch.from_numpy(plain).to(logits.device)
            tokens[plain] = self._choose(logits[others], slots[plain], positions[plain])
        copy = logits[torch.from_numpy(edited).to(logits.device)].float()
        each = [self._edits[slot] for slot in slots[edited].tolist()]
        rows = list(zip(range(len(edited)), positions[edited].tolist(), each, strict=True))
        if self.on_device is not None and self.on_device.takes(copy):
            leave_out(copy, rows)
            self.on_device.edit(copy, edit_entries(rows))
        else:
            edit_logits(copy, rows)
        banned = np.flatnonzero(flags[edited] & _BANS)
        if len(banned):
            dead = banned[torch.isneginf(copy[torch.from_numpy(banned)].amax(dim=1)).cpu().numpy()]
            self.dead = slots[edited[dead]].tolist()
            copy[torch.from_numpy(dead)] = 0.0
        tokens[edited] = self._choose(copy, slots[edited], positions[edited])
        for edits, token in zip(each, tokens[edited].tolist(), strict=True):
            edits.append(token)
        return tokens

    def _masked(
        self,
        logits: Tensor,
        flags: npt.NDArray[np.uint8],
        masks: npt.NDArray[np.uint32],
        which: npt.NDArray[np.integer],
    ) -> Tensor:
        """The logits, with -inf for what `masks[which[row]]` leaves out, of rows that are masked."""
        rows = np.flatnonzero(flags & _MASKED)
        bits = masks[which[rows]].astype("<u4", copy=False).view(np.uint8)
        allowed = np.unpackbits(bits, axis=1, count=self.vocab_size, bitorder="little").view(np.bool_)
        out = torch.from_numpy(~allowed).to(logits.device)
        if len(rows) == len(flags):
            return logits.masked_fill(out, float("-inf"))
        changed = logits.clone()
        chosen = torch.from_numpy(rows).to(logits.device)
        changed[chosen] = logits[chosen].masked_fill(out, float("-inf"))
        return changed

    def _choose(self, logits: Tensor, slots: Int32Array, positions: Int32Array) -> Int32Array:
        """Logits [n, vocab] as they are to be sampled from → tokens [n]."""
        if self._kernel is not None and self._kernel.takes(logits):
            return self._kernel.sample(logits, slots, positions)
        random = np.flatnonzero(self._flags[slots] & _RANDOM)
        if len(random) == len(slots):
            tokens = self._draw(logits.float(), slots, positions)
        else:
            tokens = logits.argmax(dim=-1)
            if len(random):
                chosen = torch.from_numpy(random).to(logits.device)
                tokens[chosen] = self._draw(logits[chosen].float(), slots[random], positions[random])
        result: Int32Array = tokens.cpu().numpy().astype(np.int32)
        return result

    def _report(
        self, logits: Tensor, slots: Int32Array, tokens: Int32Array, flags: npt.NDArray[np.uint8]
    ) -> dict[int, TokenLogprobs]:
        chosen = torch.from_numpy(tokens.astype(np.int64)).to(logits.device)
        found: dict[int, TokenLogprobs] = {}
        by_count: dict[tuple[int, bytes], list[int]] = {}
        for row in np.flatnonzero(flags & _LOGPROBS):
            by_count.setdefault(self._logprobs[int(slots[row])], []).append(int(row))
        for (count, data), rows in by_count.items():
            these = torch.from_numpy(np.frombuffer(data, np.int32).astype(np.int64)) if data else None
            reports = token_logprobs(logits[rows], chosen[rows], count, these)
            found.update(zip(rows, reports, strict=True))
        return found

    def _draw(self, logits: Tensor, slots: Int32Array, positions: Int32Array) -> Tensor:
        device, have = logits.device, self._have
        uniform = uniforms(have.streams[slots], positions.astype(np.uint64))
        top_k, top_p, min_p = have.top_k[slots], have.top_p[slots], have.min_p[slots]
        drawing = _Drawing(
            torch.from_numpy(have.temperature[slots]).to(device),
            torch.from_numpy(top_k).to(device),
            torch.from_numpy(top_p).to(device),
            torch.from_numpy(min_p).to(device),
            torch.from_numpy(uniform).to(device),
        )
        truncated = (top_k < self.vocab_size) | (top_p < 1) | (min_p > 0)
        weights = logits - logits.amax(dim=-1, keepdim=True)
        weights = weights.div_(drawing.temperature.unsqueeze(1)).exp_()
        if not truncated.any():
            return _inverse_cdf(weights, drawing.uniform)
        tokens = torch.empty(len(slots), dtype=torch.int64, device=device)
        short = truncated & (top_k < _SHORT)
        for mask, depth in ((short, _SHORT), (truncated & ~short, _LONG), (~truncated, 0)):
            if mask.any():
                rows = torch.from_numpy(np.flatnonzero(mask)).to(device)
                part = drawing.rows(rows)
                tokens[rows] = (
                    _truncated(logits[rows], weights[rows], part, depth)
                    if depth
                    else _inverse_cdf(weights[rows], part.uniform)
                )
        return tokens


def _inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """[n, m] weights >= 0 → [n] index of the first whose cumulative weight exceeds uniform * total."""
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    found = torch.searchsorted(cumulative, uniform.unsqueeze(1) * total, right=True).squeeze(1)
    # Rounding may put u * total at the total itself: then it is the last one of positive weight.
    last = torch.searchsorted(cumulative, total.contiguous()).squeeze(1)
    return torch.minimum(found, last).clamp_(max=weights.shape[1] - 1)


def _truncated(logits: Tensor, weights: Tensor, drawing: _Drawing, depth: int) -> Tensor:
    """Draws from what min-p, top-k and top-p leave, looking at the `depth` best; [n] token ids."""
    vocab = logits.shape[1]
    depth = min(depth, vocab)
    if depth < vocab:
        ranked, ids = logits.topk(depth, dim=-1)
    else:
        ranked, ids = logits.sort(dim=-1, descending=True)
    ranked_weights = weights.gather(1, ids)
    least = drawing.min_p.unsqueeze(1)  # of the largest weight, which is exactly 1
    kept = ranked_weights >= least
    kept &= torch.arange(depth, device=logits.device) < drawing.top_k.unsqueeze(1)
    mass = torch.where(kept, ranked_weights, 0.0).double()
    cumulative = mass.cumsum(dim=-1)
    total = cumulative[:, -1]
    nucleus = drawing.top_p < 1
    if depth < vocab and bool((nucleus & kept[:, -1]).any()):
        # More may be kept below the depth: their mass counts in the total too.
        whole = torch.where(weights >= least, weights, 0.0).cumsum(dim=-1, dtype=torch.float64)[:, -1]
        total = torch.where(kept[:, -1] & (drawing.top_k > depth), whole, total)
    limit = torch.where(nucleus, drawing.top_p * total, torch.inf)
    kept &= cumulative - mass < limit.unsqueeze(1)
    count = kept.sum(dim=-1, keepdim=True).clamp_(min=1)
    threshold = ranked.gather(1, count - 1)
    tokens = _draw_kept(ranked, ids, ranked_weights, threshold, count, drawing.uniform)
    if depth < vocab:
        # Everything kept, equals of the last one included, must lie within the depth.
        unresolved = (threshold.squeeze(1) <= ranked[:, -1]).nonzero().squeeze(1)
        if len(unresolved):
            tokens[unresolved] = _truncated(
                logits[unresolved], weights[unresolved], drawing.rows(unresolved), vocab
            )
    return tokens


def _draw_kept(
    ranked: Tensor, ids: Tensor, weights: Tensor, threshold: Tensor, count: Tensor, uniform: Tensor
) -> Tensor:
    """Draws in vocabulary order from the `count` best; among equals of the last, the smallest ids."""
    equals_kept = count - (ranked > threshold).sum(dim=-1, keepdim=True)
    ids, order = ids.sort(dim=-1)
    ranked = ranked.gather(1, order)
    equal = ranked == threshold
    keep = (ranked > threshold) | (equal & (equal.cumsum(dim=-1) <= equals_kept))
    kept_weights = torch.where(keep, weights.gather(1, order), 0.0)
    return ids.gather(1, _inverse_cdf(kept_weights, uniform).unsqueeze(1)).squeeze(1)
