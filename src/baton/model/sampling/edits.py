"""What changes logits before they are a distribution: bias, masks, penalties.

Only slots whose request asks for one of these have a `SlotEdits`.  Each is sparse: a bias and a mask name
a few tokens, and penalties concern the tokens that a request has seen.  All rows of a step are edited
together, through one flat index into the logits.

* logit bias: added;
* min_tokens: stop tokens are impossible (-inf) until so many tokens have been generated;
* allowed tokens: all others are impossible; bad words: so is the last token of a sequence whose others are
  the last ones that were generated;
* repetition penalty r, tokens of prompt and output: a positive logit is divided by r, another multiplied;
* frequency f, presence p, tokens of the output only: logit - f * (how often) - p.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.protocol.params.sampling import Sampling, Stopping

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]


class SlotEdits:
    """The edits of one request."""

    def __init__(
        self,
        tokens: npt.NDArray[np.int32],
        num_prompt: int,
        sampling: Sampling,
        stopping: Stopping,
        vocab_size: int,
    ) -> None:
        self.bias_ids, self.bias = _bias_of(sampling, vocab_size)
        stops = [token for token in set(stopping.stop_token_ids) if 0 <= token < vocab_size]
        self.stop_ids: Int64Array = np.array(stops, np.int64)
        self.first_stop = num_prompt + stopping.min_tokens
        """Position from which a stop token may be."""
        self.repetition = sampling.repetition_penalty
        self.frequency = sampling.frequency_penalty
        self.presence = sampling.presence_penalty
        self.penalizes = self.repetition != 1.0 or self.frequency != 0.0 or self.presence != 0.0
        self.seen: _Seen | None = _Seen(tokens, num_prompt) if self.penalizes else None
        self.left_out = _left_out(sampling, vocab_size)
        self.bad: _BadWords | None = None
        if sampling.bad_words:
            self.bad = _BadWords(sampling.bad_words, tokens[num_prompt:].tolist(), vocab_size)
        self.bans = self.left_out is not None or self.bad is not None
        """It makes tokens impossible that no grammar knows of."""

    @classmethod
    def of(
        cls,
        tokens: npt.NDArray[np.int32],
        num_prompt: int,
        sampling: Sampling,
        stopping: Stopping,
        vocab_size: int,
    ) -> SlotEdits | None:
        """The request's edits, or None if it asks for none."""
        edits = cls(tokens, num_prompt, sampling, stopping, vocab_size)
        masks = len(edits.stop_ids) > 0 and edits.first_stop > len(tokens)
        return edits if masks or len(edits.bias_ids) or edits.penalizes or edits.bans else None

    def append(self, token: int) -> None:
        """`token` was generated."""
        if self.seen is not None:
            self.seen.append(token)
        if self.bad is not None:
            self.bad.append(token)


class _BadWords:
    """Sequences of which the last token must not follow the others."""

    def __init__(self, words: Iterable[bytes], generated: list[int], vocab_size: int) -> None:
        self._single: set[int] = set()
        self._longer: dict[int, list[tuple[list[int], int]]] = {}
        """The token before the last one → (those before the last one, the last one)."""
        self._reach = 0
        """Tokens that matter of what was generated."""
        for data in words:
            *before, last = np.frombuffer(data, np.int32).tolist()
            if not 0 <= last < vocab_size:
                continue
            if before:
                self._longer.setdefault(before[-1], []).append((before, last))
                self._reach = max(self._reach, len(before))
            else:
                self._single.add(last)
        self._tail = generated[-self._reach :] if self._reach else []

    def append(self, token: int) -> None:
        if self._reach:
            self._tail.append(token)
            if len(self._tail) > 2 * self._reach:
                del self._tail[: -self._reach]

    def now(self) -> Int64Array:
        """Tokens that must not come next."""
        found, tail = set(self._single), self._tail
        for before, last in self._longer.get(tail[-1], ()) if tail else ():
            if tail[-len(before) :] == before:
                found.add(last)
        return np.array(sorted(found), np.int64)


class _Seen:
    """The distinct tokens of a request and how often each was generated."""

    def __init__(self, tokens: npt.NDArray[np.int32], num_prompt: int) -> None:
        distinct = np.unique(tokens)
        self.size = len(distinct)
        self._ids = np.zeros(self.size + 64, np.int64)
        self._ids[: self.size] = distinct
        self._counts = np.zeros(self.size + 64, np.float32)
        self._index = {int(token): index for index, token in enumerate(distinct)}
        np.add.at(self._counts, np.searchsorted(distinct, tokens[num_prompt:]), 1)

    @property
    def ids(self) -> Int64Array:
        return self._ids[: self.size]

    @property
    def counts(self) -> Float32Array:
        return self._counts[: self.size]

    def append(self, token: int) -> None:
        index = self._index.get(token)
        if index is None:
            index = self.size
            if index == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros(index, np.int64)))
                self._counts = np.concatenate((self._counts, np.zeros(index, np.float32)))
            self._ids[index] = token
            self._index[token] = index
            self.size += 1
        self._counts[index] += 1


def edit_logits(logits: Tensor, rows: list[tuple[int, int, SlotEdits]]) -> None:
    """Edits contiguous logits [n, vocab] in place; `rows`: (row, position of the new token, edits)."""
    vocab = logits.shape[1]
    flat = logits.view(-1)
    biased = [(row * vocab, edits) for row, _, edits in rows if len(edits.bias_ids)]
    if biased:
        index = _tensor(np.concatenate([base + edits.bias_ids for base, edits in biased]), logits)
        flat.index_add_(0, index, _tensor(np.concatenate([edits.bias for _, edits in biased]), logits))
    masked = [row * vocab + edits.stop_ids for row, position, edits in rows if position < edits.first_stop]
    masked += [row * vocab + edits.bad.now() for row, _, edits in rows if edits.bad is not None]
    leave_out(logits, rows)
    if masked:
        flat.index_fill_(0, _tensor(np.concatenate(masked), logits), float("-inf"))
    penalized = [(row * vocab, edits, edits.seen) for row, _, edits in rows if edits.seen is not None]
    if penalized:
        index = _tensor(np.concatenate([base + seen.ids for base, _, seen in penalized]), logits)
        sizes = [seen.size for _, _, seen in penalized]

        def spread(values: list[float]) -> Tensor:
            return _tensor(np.repeat(np.array(values, np.float32), sizes), logits)

        repetition = spread([edits.repetition for _, edits, _ in penalized])
        frequency = spread([edits.frequency for _, edits, _ in penalized])
        presence = spread([edits.presence for _, edits, _ in penalized])
        counts = _tensor(np.concatenate([seen.counts for _, _, seen in penalized]), logits)
        values = flat.index_select(0, index)
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= frequency * counts + presence * (counts > 0)
        flat.index_copy_(0, index, values)


def edit_entries(rows: list[tuple[int, int, SlotEdits]]) -> dict[str, npt.NDArray[Any]]:
    """The same edits of `rows` 0, 1, …, but for allowed tokens, as entries for a device's kernel
    (`cuda.sampling.Edits`): each token of a row that is changed is named once."""
    ids, of, biases, banned, seen, counts = [], [], [], [], [], []
    for row, position, edits in rows:
        never = [edits.stop_ids] if position < edits.first_stop else []
        never += [] if edits.bad is None else [edits.bad.now()]
        impossible = np.concatenate(never) if never else np.zeros(0, np.int64)
        before = np.zeros(0, np.int64) if edits.seen is None else edits.seen.ids
        named = before
        if len(impossible) or len(edits.bias_ids):
            named = np.unique(np.concatenate((before, impossible, edits.bias_ids)))
        added, out, known, often = (np.zeros(len(named), kind) for kind in ("f4", "u1", "u1", "f4"))
        if named is before:
            known[:] = 1
            often[:] = 0 if edits.seen is None else edits.seen.counts
        else:
            np.add.at(added, np.searchsorted(named, edits.bias_ids), edits.bias)
            out[np.searchsorted(named, impossible)] = 1
            places = np.searchsorted(named, before)
            known[places] = 1
            often[places] = 0 if edits.seen is None else edits.seen.counts
        of.append(np.full(len(named), row, np.int32))
        ids.append(named.astype(np.int32))
        biases.append(added)
        banned.append(out)
        seen.append(known)
        counts.append(often)
    found = {"rows": of, "ids": ids, "biases": biases, "banned": banned, "seen": seen, "counts": counts}
    each = [edits for _, _, edits in rows]
    return {name: np.concatenate(parts) for name, parts in found.items()} | {
        "repetitions": np.array([edits.repetition for edits in each], np.float32),
        "frequencies": np.array([edits.frequency for edits in each], np.float32),
        "presences": np.array([edits.presence for edits in each], np.float32),
    }


def leave_out(logits: Tensor, rows: list[tuple[int, int, SlotEdits]]) -> None:
    """Makes all but the allowed tokens impossible, in place."""
    for row, _, edits in rows:
        if edits.left_out is not None:
            logits[row].masked_fill_(edits.left_out.to(logits.device), float("-inf"))


def _bias_of(sampling: Sampling, vocab_size: int) -> tuple[Int64Array, Float32Array]:
    bias = sampling.logit_bias
    if bias is None:
        return np.zeros(0, np.int64), np.zeros(0, np.float32)
    ids, values = np.frombuffer(bias.ids, np.int32), np.frombuffer(bias.values, np.float32)
    known = (ids >= 0) & (ids < vocab_size)
    return ids[known].astype(np.int64), values[known]


def _left_out(sampling: Sampling, vocab_size: int) -> Tensor | None:
    """[vocab]: whether a token is not allowed; None: all are."""
    if not sampling.allowed:
        return None
    ids = np.frombuffer(sampling.allowed, np.int32)
    out = torch.ones(vocab_size, dtype=torch.bool)
    out[torch.from_numpy(ids[(ids >= 0) & (ids < vocab_size)].astype(np.int64))] = False
    return out


def _tensor(array: npt.NDArray[np.generic], like: Tensor) -> Tensor:
    return torch.from_numpy(array).to(like.device)
