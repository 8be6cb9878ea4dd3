"""Two ranks on two GPUs, without a server: graphs with NCCL's kernels in them beside eager steps, with
drafts, of rows that the host samples, and of ranks of which one cannot record.

`python -m tests.gpu.test_ranks DIRECTORY RANK CANNOT` is one rank; on a CPU it has the device that delays, so
that what is here can be tried where there is no GPU.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from baton.executor.devices import graphs
from baton.executor.devices.recorder import CudaRecorder, NotRecorded
from baton.executor.torch_executor import TorchExecutor
from baton.protocol.config import Speculation
from baton.protocol.params.sampling import Sampling, Stopping
from tests.executor.delayed import DelayedQueue, on_a_delayed_device
from tests.executor.rank_processes import told_by_ranks
from tests.executor.serving import Request, Serving, plant
from tests.gpu.test_steps import DRAWN, GREEDY, config_of, prompt_of
from tests.model.checkpoints import VOCAB, make_checkpoint
from tests.model.cuda.where import ON_CPU, ON_DEVICE

DRAFTS, ROWS, ENDS_S = 3, 5, 200.0
PENALIZED = Sampling(seed=3, temperature=0.8, repetition_penalty=1.4, frequency_penalty=0.3)


def executor_of(patch: pytest.MonkeyPatch, directory: Path, rank: int) -> TorchExecutor:
    given: dict[str, Any] = dict(
        tensor_parallel_size=2, speculation=Speculation(method="planted", num_speculative_tokens=DRAFTS)
    )
    if ON_CPU:
        sizes = dict(max_model_len=200, block_size=16, num_blocks=80, max_num_seqs=12)
        return on_a_delayed_device(
            patch, directory, DelayedQueue(1.0), graphs=True, mirrored=False, rank=rank, **sizes, **given
        )
    return TorchExecutor.from_config(config_of(directory, **given), rank, str(directory / "meet"))


def requests() -> list[Request]:
    wishes = (GREEDY, DRAWN, PENALIZED)
    return [
        Request(prompt_of(3 + 9 * n, n), structs.replace(wishes[n % 3], seed=n), Stopping(24))
        for n in range(ROWS)
    ]


def main(directory: Path, rank: int, cannot: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if cannot and rank == 1:
            patch.setattr(graphs, "CudaRecorder", Unable)
        executor = executor_of(patch, directory, rank)
        recorded, speculator, told = executor._graphs, executor.speculator, []
        assert speculator is not None
        answers: list[tuple] = []
        for replayed, drafting in ((False, False), (True, False), (True, True)):
            asked = requests()
            serving = Serving(executor, slots=ROWS, budget=64, longest=200, seed=1, preempts=0.0)
            executor._graphs = recorded if replayed else None
            speculator.drafter = None
            if drafting and rank == 0:
                speculator.drafter = plant(serving, asked, answers, DRAFTS, VOCAB, 0.8)
            answers = serving.run(asked)
            told.append([tokens for tokens, *_ in answers])
        sizes = [] if recorded is None else sorted(recorded._graphs)
        executor._graphs = recorded
        executor.close()  # (which does not wait for graphs that hold NCCL's kernels)
    print(json.dumps([told, serving.drafts, serving.right, sizes]), flush=True)


class Unable(CudaRecorder):
    def record(self, run: Any) -> Any:
        super().record(run)
        raise NotRecorded("as planted")


@ON_DEVICE
@pytest.mark.parametrize("cannot", [False, True], ids=["", "rank 1 cannot record"])
def test_replayed_steps_of_two_ranks_give_the_tokens_of_eager_ones(tmp_path: Path, cannot: bool):
    if torch.cuda.device_count() < 2:
        pytest.skip(f"there is {torch.cuda.device_count()} GPU, and two are needed")
    make_checkpoint(tmp_path, "qwen3")
    arguments = [[str(tmp_path), str(rank), "cannot" if cannot else ""] for rank in range(2)]
    found = told_by_ranks("tests.gpu.test_ranks", arguments, ENDS_S)
    assert found[0] == found[1]
    (eager, plain, drafted), drafts, right, sizes = found[0]
    assert eager == plain == drafted
    assert 0 < right < drafts
    assert bool(sizes) == (not cannot)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), bool(sys.argv[3]))
