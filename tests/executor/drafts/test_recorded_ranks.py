"""Two ranks in real processes whose steps are replayed, collectives and all: drafts, penalties, grammars and
log-probabilities give the answers of one rank that computes eagerly; and a rank that cannot record."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.executor.devices.recorder import NotRecorded
from baton.executor.torch_late import LateTorchExecutor
from baton.grammar.vocabulary import Vocabulary
from baton.protocol.config import Speculation
from baton.protocol.params.sampling import Sampling, Stopping
from tests.executor.delayed import DelayedQueue, on_a_delayed_device
from tests.executor.drafts.test_drafts import LONGEST, SPECIAL, wishes
from tests.executor.driver import Driver
from tests.executor.rank_processes import told_by_ranks
from tests.executor.serving import Serving, plant
from tests.model.checkpoints import VOCAB, make_checkpoint

RANKS, DRAFTS = 2, 4
SEEDS = {0: (3, 16), 5: (6, 64)}
"""Of requests, some of which are drawn, penalized, bound to a grammar, or want log-probabilities: slots and
tokens of a step."""


def executor_of(patch: pytest.MonkeyPatch, directory: Path, rank: int, size: int) -> LateTorchExecutor:
    return on_a_delayed_device(
        patch, directory, DelayedQueue(eager=1.0), graphs=True, mirrored=False, rank=rank,
        max_model_len=LONGEST, max_num_seqs=6, block_size=16, num_blocks=120,
        vocabulary=str(directory / "vocabulary"), tensor_parallel_size=size, step_timeout_s=60,
        speculation=Speculation(method="planted", num_speculative_tokens=DRAFTS),
    )  # fmt: skip


def answers(executor: LateTorchExecutor, seed: int, known: list[tuple] | None) -> tuple[list[tuple], Serving]:
    """With drafts if the answers are `known`."""
    requests = wishes(random.Random(seed), False)
    slots, budget = SEEDS[seed]
    serving = Serving(executor, slots=slots, budget=budget, longest=LONGEST, seed=seed)
    assert executor.speculator is not None
    executor.speculator.drafter = None
    if known is not None and executor._parallel.rank == 0:
        executor.speculator.drafter = plant(serving, requests, known, DRAFTS, VOCAB, 0.8)
    return serving.run(requests), serving


def told_of(found: list[tuple]) -> list[list[Any]]:
    """Tokens and reasons, which all ranks have."""
    return [[tokens, reason] for tokens, _, reason, _, _ in found]


def main(directory: Path, rank: int) -> None:
    """One rank: eager steps without drafts, replayed ones with and without, and a step that rank 1 cannot
    record."""
    with pytest.MonkeyPatch.context() as patch:
        executor = executor_of(patch, directory, rank, RANKS)
        graphs, told = executor._graphs, []
        assert graphs is not None
        for seed in SEEDS:
            executor._graphs = None
            eager, _ = answers(executor, seed, None)
            executor._graphs = graphs
            plain, _ = answers(executor, seed, None)
            drafted, serving = answers(executor, seed, eager)
            scored = [sum(map(len, (one[1] for one in found))) for found in (eager, plain, drafted)]
            told.append(
                [told_of(eager), told_of(plain), told_of(drafted), serving.drafts, serving.right, scored]
            )
        recorded = sorted(graphs._graphs)
        graphs.forget(executor._model)
        assert executor.speculator is not None
        executor.speculator.drafter = None
        if rank:
            patch.setattr(graphs._recorder, "record", unable(graphs._recorder.record))
        driver, failure = Driver(executor), ""
        driver.add([5, 6, 7], 4, Sampling(1, 0.0), Stopping(4))
        driver.step()
        try:
            driver.step()
        except NotRecorded as error:
            failure = str(error)
        print(json.dumps([told, recorded, failure]), flush=True)
        executor.close()


def unable(record: Any) -> Any:
    def fails(run: Any) -> Any:
        record(run)
        raise NotRecorded("a CUDA graph could not be recorded: no memory is left")

    return fails


def test_two_ranks_that_replay_give_the_answers_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make_checkpoint(tmp_path, "llama3", num_hidden_layers=2)
    (tmp_path / "vocabulary").write_bytes(Vocabulary([bytes([n]) for n in range(VOCAB)], SPECIAL).encode())
    module = "tests.executor.drafts.test_recorded_ranks"
    found = told_by_ranks(module, [[str(tmp_path), str(rank)] for rank in range(RANKS)], 250)
    alone = executor_of(monkeypatch, tmp_path, 0, 1)
    alone._graphs = None
    for seed, *of_ranks in zip(SEEDS, *(told for told, _, _ in found), strict=True):
        expected = told_of(answers(alone, seed, None)[0])
        for rank, (eager, plain, drafted, drafts, right, scored) in enumerate(of_ranks):
            assert eager == plain == drafted == expected, f"rank {rank}"
            assert 0 < right < drafts
            assert scored[0] == scored[1] == scored[2]
            assert bool(scored[0]) == (rank == 0), "rank 0 has the logits"
    alone.close()
    assert found[0][1] == found[1][1], "both have recorded the same steps"
    assert len(np.unique([rows for rows, _ in found[0][1]])) > 3, "of several sizes"
    assert found[1][2] == "a CUDA graph could not be recorded: no memory is left"
    assert found[0][2] == "another rank could not record this step as a CUDA graph; its log says why"


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
