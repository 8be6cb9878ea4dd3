"""Drafts of rank 0 reach the other rank: two processes give the answers of one without drafts."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

from baton.executor.loading import create_executor
from baton.protocol.config import Speculation
from baton.protocol.params.sampling import Sampling, Stopping
from tests.executor.rank_processes import told_by_ranks
from tests.executor.serving import Request, Serving
from tests.executor.test_torch_parity import config_for
from tests.model.checkpoints import make_checkpoint
from tests.model.mtp_checkpoints import make_agreeing

NGRAM = Speculation(method="ngram", num_speculative_tokens=4)


def speculation(method: str, directory: Path) -> Speculation:
    """The draft model is the model itself, which rank 0 has as a whole beside its half; the MTP layer is
    whole on rank 0 too, with an embedding and a head of its own."""
    if method == "ngram":
        return NGRAM
    if method == "mtp":
        return Speculation(method="mtp", num_speculative_tokens=4)
    return Speculation(method="draft", model=str(directory), num_speculative_tokens=4)


def play(executor) -> dict:
    """Prompts of few different tokens, which n-grams guess; preempted now and then."""
    chance = random.Random(5)
    requests = []
    for number in range(8):
        prompt = [chance.randrange(6) for _ in range(chance.randrange(2, 40))]
        penalty = chance.choice((0.0, 0.4))
        sampling = Sampling(number, chance.choice((0.0, 0.7)), frequency_penalty=penalty)
        requests.append(Request(prompt, sampling, Stopping(50, 0, (chance.randrange(197),))))
    serving = Serving(executor, slots=4, budget=40, longest=120, seed=5)
    serving.run(requests)
    tokens = [request.tokens for request in requests]
    return {"tokens": tokens, "drafts": serving.drafts, "right": serving.right}


def main() -> None:
    """One of two ranks, in a process of its own."""
    rank, place, method = sys.argv[1:]
    directory = Path(place)
    drafts = speculation(method, directory)
    config = config_for(directory, tensor_parallel_size=2, step_timeout_s=120.0, speculation=drafts)
    executor = create_executor(config, int(rank), str(directory / "meet"))
    print(json.dumps(play(executor)), flush=True)
    executor.close()


@pytest.mark.parametrize("method", ["ngram", "draft", "mtp"])
def test_ranks_give_the_answers_of_one_without_drafts(method: str, tmp_path: Path) -> None:
    if method == "mtp":
        make_agreeing(tmp_path)
    else:
        make_checkpoint(tmp_path, "qwen3", num_hidden_layers=2)
    alone = create_executor(config_for(tmp_path), 0, "")
    expected = play(alone)
    alone.close()
    module = "tests.executor.drafts.test_drafts_parallel"
    found = told_by_ranks(module, [[str(rank), str(tmp_path), method] for rank in range(2)], 300)
    assert found[0] == found[1]
    assert found[0]["tokens"] == expected["tokens"]
    assert 0 < found[0]["right"] < found[0]["drafts"]


if __name__ == "__main__":
    main()
