"""What is told of a step's experts: how evenly they were loaded, and to requests that asked
(`Sampling.routes_from`), which ones their tokens went to."""

from __future__ import annotations

import numpy as np

from baton.executor.base import Int32Array, StepBatch, StepResult
from baton.executor.drafts.runs import confirmed_counts
from baton.executor.results.expert_load import ExpertLoad
from baton.model.decoder.decoder import Decoder
from baton.model.loader import AnyDecoder
from baton.protocol.params.sampling import Sampling
from baton.protocol.routes import MAX_RUN_BYTES, Routes, id_width


class ExpertReports:
    """Rank 0 tells where tokens went, as all ranks choose the same experts.  While nobody asks, that costs
    nothing."""

    def __init__(self, rank: int) -> None:
        self.load = ExpertLoad()
        self._records = False
        self._reports = rank == 0
        self._from: dict[int, int] = {}
        """Slot → the first position of which rows are wanted."""

    def admit(self, slot: int, sampling: Sampling, model: AnyDecoder) -> None:
        """Raises `ValueError` for a model without a mixture whose router is Baton's."""
        if sampling.routes_from is None:
            return
        if not isinstance(model, Decoder) or not model.mixtures:
            raise ValueError("return_routed_experts: this model has no mixture of experts that Baton routes")
        self._from[slot] = sampling.routes_from

    def release(self, slot: int) -> None:
        self._from.pop(slot, None)

    def begin(self, batch: StepBatch, model: AnyDecoder) -> None:
        """Before a step, which `end` follows."""
        if not self._from or not self._reports:
            return
        self._records = self.asks(batch)
        assert isinstance(model, Decoder)  # (or nothing was admitted)
        model.record_chosen(self._records)

    def asks(self, batch: StepBatch) -> bool:
        """Whether a request wants to know where tokens of this batch go; the same on every rank."""
        return bool(self._from) and any(
            self._from.get(slot, stop) < stop
            for slot, stop in zip(batch.slots.tolist(), (batch.starts + batch.counts).tolist(), strict=True)
        )

    def end(self, batch: StepBatch, model: AnyDecoder, result: StepResult) -> None:
        """After the step."""
        result.expert_tokens = self.load.after_step(model, len(batch.tokens))
        if self._records:
            self._records = False
            self._add_routes(batch, model, result)

    def _add_routes(self, batch: StepBatch, model: AnyDecoder, result: StepResult) -> None:
        assert isinstance(model, Decoder)
        chosen = model.chosen()
        model.record_chosen(False)
        experts = model.mixtures[0].config.experts
        ends = np.cumsum(batch.counts).tolist()
        counts = confirmed_counts(batch, result)
        ends_of = zip(batch.slots.tolist(), batch.starts.tolist(), ends, strict=True)
        for row, (slot, start, end) in enumerate(ends_of):
            wanted = self._from.get(slot)
            count = int(counts[row])
            end -= int(batch.counts[row]) - count
            if wanted is None or start + count <= wanted:
                continue
            first = max(start, wanted)
            ids = chosen[:, end - (start + count - first) : end].transpose(1, 0, 2)
            result.routes[row] = runs_of(first, ids, experts)


def runs_of(first: int, found: Int32Array, experts: int) -> list[Routes]:
    """[rows, mixtures, chosen] ids, below `experts`, of positions from `first` on, in pieces of bounded
    size."""
    _, mixtures, chosen = found.shape
    width = id_width(experts)
    ids = np.ascontiguousarray(found, f"<u{width}")
    rows = max(1, MAX_RUN_BYTES // (mixtures * chosen * width))
    return [
        Routes(first + start, mixtures, chosen, width, ids[start : start + rows].tobytes())
        for start in range(0, len(ids), rows)
    ]
