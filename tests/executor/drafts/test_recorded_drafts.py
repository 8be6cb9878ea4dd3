"""Steps with drafts over the buffers of graphs: the answers of steps without drafts that are no graphs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.executor.base import StepBatch
from baton.executor.devices.graphs import DecodeGraphs, as_decodes, sizes_of_rows
from baton.grammar.vocabulary import Vocabulary
from baton.protocol.config import Speculation
from tests.executor.delayed import DelayedQueue, on_a_delayed_device
from tests.executor.drafts.test_drafts import LONGEST, SPECIAL, wishes
from tests.executor.serving import Serving, ints, plant
from tests.model.checkpoints import VOCAB, make_checkpoint

DRAFTS = 6
TABLES = np.arange(12, dtype=np.int32).reshape(3, 4)


def batch(**changes: Any) -> StepBatch:
    """A row, one with two drafts, one with one."""
    given: dict[str, Any] = dict(
        step=7, slots=ints(4, 0, 2), starts=ints(9, 3, 0), counts=ints(1, 3, 2),
        tokens=ints(1, 2, 3, 4, 5, 6), samples=np.ones(3, np.bool_), block_tables=TABLES,
        num_decodes=1, drafts=ints(0, 2, 1),
    )  # fmt: skip
    return StepBatch(**{**given, **changes})


def test_each_token_is_a_row_of_its_request():
    found = as_decodes(batch())
    assert found is not None
    assert found.slots.tolist() == [4, 0, 0, 0, 2, 2]
    assert found.starts.tolist() == [9, 3, 4, 5, 0, 1]
    assert found.starts.dtype == np.int32
    assert found.counts.tolist() == [1] * 6
    assert found.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert found.samples.all()
    assert found.num_decodes == len(found.samples) == 6
    assert found.block_tables.tolist() == TABLES[[0, 1, 1, 1, 2, 2]].tolist()
    assert found.drafts is None


def test_what_else_is_in_a_step_keeps_it_eager():
    plain = batch(counts=ints(1, 1, 1), tokens=ints(1, 2, 3), num_decodes=3, drafts=None)
    assert as_decodes(plain) is plain
    for changes in (
        {"drafts": None},  # pieces of prompts
        {"drafts": ints(0, 2, 0)},  # one piece
        {"samples": np.array([True, True, False])},
    ):
        assert as_decodes(batch(**changes)) is None


def test_answers_are_those_without_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Requests are greedy, drawn, penalized, bound to a grammar, want log-probabilities or vectors; they are
    preempted and lack blocks."""
    make_checkpoint(tmp_path, "llama3", num_hidden_layers=2)
    (tmp_path / "vocabulary").write_bytes(Vocabulary([bytes([n]) for n in range(VOCAB)], SPECIAL).encode())
    executor = on_a_delayed_device(
        monkeypatch, tmp_path, DelayedQueue(eager=1.0), graphs=True, mirrored=False,
        max_model_len=LONGEST, max_num_seqs=6, block_size=16, num_blocks=120,
        vocabulary=str(tmp_path / "vocabulary"),
        speculation=Speculation(method="planted", num_speculative_tokens=DRAFTS),
    )  # fmt: skip
    graphs = executor._graphs
    assert graphs is not None
    assert graphs._row_sizes == sizes_of_rows(6 * (1 + DRAFTS))
    replayed = []

    def replayed_of(given: StepBatch) -> Any:
        found = DecodeGraphs.replayed(graphs, given)
        if found is not None and given.drafts is not None:
            replayed.append(len(given.tokens))
        return found

    monkeypatch.setattr(graphs, "replayed", replayed_of)
    drafts = right = 0
    for number in range(4):
        options = {"slots": (1, 3, 6, 6)[number], "budget": (16, 64)[number % 2], "seed": number}
        answers: list[tuple] = []
        for planted in (False, True):
            requests = wishes(random.Random(number), False)
            serving = Serving(executor, longest=LONGEST, **options)
            executor._graphs = graphs if planted else None
            executor.speculator.drafter = None
            if planted:
                quality = (0.5, 0.9, 1.0)[number % 3]
                executor.speculator.drafter = plant(serving, requests, answers, DRAFTS, VOCAB, quality)
            found = serving.run(requests)
            if planted:
                assert [one[0] for one in found] == [one[0] for one in answers]
                assert [one[2] for one in found] == [one[2] for one in answers]
                assert [len(one[1]) for one in found] == [len(one[1]) for one in answers]
                drafts, right = drafts + serving.drafts, right + serving.right
            answers = found
    assert 0 < right < drafts
    assert len(replayed) > 10
    assert len(set(replayed)) > 3, "steps of several sizes"
    executor.close()
