"""Two ranks in real processes, each on a device that delays as it likes: the tokens of one rank that waits,
and pages in both mirrors before rank 0 tells anybody of them.

Mirrors hold NaN where nothing was ever shown.  Rank 0 looks into rank 1's, whose copies take a while: it
would see that it tells of a step before rank 1 has made them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.executor.base import StepBatch
from baton.executor.devices.sizes import device_of
from baton.executor.torch_late import LateTorchExecutor
from baton.executor.weights.forms import ExecutorError
from baton.launch.planning.instance_config import instance_config
from baton.protocol.messages.reports import StepReport
from tests.executor.delayed import DelayedQueue, on_a_delayed_device
from tests.executor.rank_processes import told_by_ranks
from tests.model.checkpoints import make_checkpoint
from tests.worker.late_torch import (
    DRAWN,
    PENALIZED,
    PLAIN,
    PROMPTS,
    SCORED,
    SIZES,
    Engine,
    Waiting,
    positions_of,
)
from tests.worker.lateness import BLOCK

RANKS, COUNT = 2, 9
WISHES = [(4, PLAIN), (3, DRAWN), (2, PENALIZED), (1, SCORED)]
"""In the same steps, which wait for those that are penalized or scored."""
AHEAD = [(2, DRAWN), (1, PLAIN)]
"""All of whose steps are launched ahead."""
HANDED = PROMPTS[3]
SHOWS_S = 0.03
"""What rank 1 is late by."""


class RankEngine(Engine):
    """Each rank's process has one, and gives the same commands before the same rounds."""

    other: torch.Tensor | None = None
    """At rank 0: the mirror of rank 1."""
    looked = 0

    def look_at(self, report: Any) -> None:
        super().look_at(report)
        if isinstance(report, StepReport):
            columns = (report.prefill_slots, report.prefill_epochs, report.prefill_computed)
            for told in zip(*(array("i", packed) for packed in columns), strict=True):
                self.check_other(*told)

    def check_other(self, slot: int, epoch: int, computed: int) -> None:
        if self.other is not None:
            count = self.told_of(slot, epoch, computed)
            assert not positions_of(self.other, self.blocks[slot], count).isnan().any()
            self.looked += count > 0

    def told_of(self, slot: int, epoch: int, computed: int) -> int:
        """How many positions others may hear of."""
        prompt, _, _, _ = self.requests[slot, epoch]
        return computed if computed == len(prompt) else computed // BLOCK * BLOCK

    def check_pages(self, slot: int, epoch: int, computed: int) -> None:
        """What others may be told of is in the mirror."""
        count, pool = self.told_of(slot, epoch, computed), self.executor._pool
        here, there = (
            positions_of(one, self.blocks[slot], count) for one in (pool.mirror._here, pool.tensor)
        )
        assert torch.equal(here, there)

    def oracle(self, prompt: Any, sampling: Any, options: Any, count: int) -> list[int]:
        return []

    def scribble(self, blocks: Any) -> None:
        # (Not in the mirror: rank 0 may still look there when rank 1 has gone on.)
        self.executor._pool.tensor[blocks] = float("nan")


def mirror_of_rank_1(patch: pytest.MonkeyPatch, executor: LateTorchExecutor, directory: Path) -> Any:
    """Both ranks call it before the first step.  Gives rank 0 the mirror of rank 1, whose copies take a while
    from now on."""
    mirror, path, rank = executor._pool.mirror, directory / "mirror", executor._parallel.rank
    assert mirror is not None
    mirror._here.fill_(float("nan"))
    if rank == 1:
        path.write_text(f"/proc/{os.getpid()}/fd/{mirror.fd}")
        show = mirror.show

        def slowly(*which: Any) -> None:
            time.sleep(SHOWS_S)
            show(*which)

        patch.setattr(mirror, "show", slowly)
    executor._parallel.minimum(1, "cpu")  # (the other one is here, too)
    if rank == 1:
        return None
    words = np.memmap(path.read_text(), np.float32, "r+")
    return torch.from_numpy(words).view(mirror._here.shape)


def counted(patch: pytest.MonkeyPatch, executor: LateTorchExecutor, ahead: list[int]) -> None:
    """Notes the decode steps that are launched ahead."""
    launch = executor._ahead

    def noted(batch: StepBatch, on_layers: Any) -> Any:
        if batch.num_decodes == len(batch.slots):
            ahead.append(batch.step)
        return launch(batch, on_layers)

    patch.setattr(executor, "_ahead", noted)


def main(directory: Path, rank: int, graphs: bool) -> None:
    """One rank."""
    with pytest.MonkeyPatch.context() as patch:
        device = DelayedQueue(eager=1.0)
        executor = on_a_delayed_device(
            patch,
            directory,
            device,
            rank=rank,
            graphs=graphs,
            mirrored=True,
            tensor_parallel_size=RANKS,
            **SIZES,
        )
        assert executor.one_step_late
        for each in (device, *device.others):
            each.eager = 0.4 * rank
        engine = RankEngine(executor, budget=8)
        engine.other = mirror_of_rank_1(patch, executor, directory)
        ahead: list[int] = []
        counted(patch, executor, ahead)
        for wishes in (WISHES, AHEAD):
            ahead.clear()
            for slot, (number, sampling) in enumerate(wishes):
                engine.admit(slot, PROMPTS[number], sampling=sampling, more=1, max_tokens=COUNT)
                engine.round()
            engine.settle()
        assert len(ahead) >= COUNT - 1
        engine.admit(0, HANDED, handover=True, max_tokens=COUNT)
        engine.settle()
        assert (engine.looked > 0) == (rank == 0)
        assert (executor._graphs is not None and bool(executor._graphs._graphs)) == graphs
        print(json.dumps([[*key, *tokens] for key, tokens in sorted(engine.tokens.items())]), flush=True)
        executor.close()


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_two_ranks_that_overlap_give_the_tokens_of_one_that_waits(graphs: bool, tmp_path: Path):
    make_checkpoint(tmp_path, "llama3")
    module = "tests.executor.test_late_parallel"
    arguments = [[str(tmp_path), str(rank), "graphs" if graphs else ""] for rank in range(RANKS)]
    found = told_by_ranks(module, arguments, 250)
    waiting = Waiting(tmp_path)
    expected = {
        (slot, epoch): waiting.answer(tuple(PROMPTS[number]), sampling, 0, (), COUNT)
        for epoch, wishes in enumerate((WISHES, AHEAD), start=1)
        for slot, (number, sampling) in enumerate(wishes)
    }
    expected[0, 3] = waiting.answer(tuple(HANDED), PLAIN, 0, (), 1)
    assert found[0] == found[1] == [[*key, *tokens] for key, tokens in sorted(expected.items())]


def test_fewer_gpus_than_ranks_are_refused_by_every_rank(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = instance_config(model="", device="cuda", tensor_parallel_size=2, max_model_len=64)
    for rank in range(2):
        with pytest.raises(
            ExecutorError, match=r"tensor_parallel_size 2: .* 1 CUDA device.*; give at most 1"
        ):
            device_of(config, rank)
    assert device_of(instance_config(model="", device="cuda", max_model_len=64), 0).index == 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), bool(sys.argv[3]))
