"""Answers with the drafters that users have are those without, bit for bit: n-grams of texts that repeat
themselves, what others were answered, and what grammars force."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from baton.drafting.making import make_drafter
from baton.executor.torch_executor import TorchExecutor
from baton.grammar.checking import Checker
from baton.grammar.description import Regex, Structure
from baton.grammar.vocabulary import Vocabulary
from baton.model.cpu.ngram import ngram_kernel
from baton.model.cpu.suffix import suffix_kernel
from baton.protocol.config import Speculation
from baton.protocol.params.sampling import Constraint, Sampling, Stopping
from tests.executor.serving import Request, Serving
from tests.executor.test_torch_parity import config_for
from tests.model.checkpoints import VOCAB, make_checkpoint

SPECIAL = {"</s>": 1}
SLOTS, LONGEST = 4, 160


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model")
    make_checkpoint(found, "llama3", num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1)
    tokens = [bytes([number]) for number in range(VOCAB)]
    (found / "vocabulary").write_bytes(Vocabulary(tokens, SPECIAL).encode())
    return found


def wishes(chance: random.Random) -> list[Request]:
    """Few distinct tokens, so that much stands twice; and answers that a grammar forces in large parts."""
    grammar = Checker(SPECIAL).check(Structure(Regex("(AB[0-3]{2}CDEF;){2,6}G")))
    made = []
    for number in range(chance.randrange(2, 7)):
        part = [chance.randrange(VOCAB) for _ in range(chance.randrange(2, 9))]
        prompt = part * chance.randrange(1, 7)
        extra: dict = {"temperature": chance.choice((0.0, 0.3, 1.0))}
        if chance.random() < 0.5:
            extra["constraint"] = Constraint(grammar)
        if chance.random() < 0.3:
            extra |= {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "logprobs": 2}
        stops = (1,) if "constraint" in extra else tuple(chance.sample(range(VOCAB), 2))
        stopping = Stopping(chance.randrange(1, 50), stop_token_ids=stops)
        made.append(Request(prompt, Sampling(seed=number, **extra), stopping))
    return made


@pytest.mark.parametrize("form", [("float32", None), ("bfloat16", None)], ids=lambda form: form[0])
def test_answers_are_those_without_drafts(directory: Path, form: tuple[str, str | None]) -> None:
    config = config_for(
        directory,
        dtype=form[0],
        max_num_seqs=SLOTS,
        vocabulary=str(directory / "vocabulary"),
        speculation=Speculation(method="auto", num_speculative_tokens=5),
    )
    executor = TorchExecutor.from_config(config, 0, "")
    assert executor.speculator is not None
    masks = executor._sampler._sampler._masks
    assert masks is not None
    counted = np.zeros(2, np.int64)
    again = np.zeros(2, np.int64)
    """Right drafts of the first time with `suffix`, and of the second."""
    try:
        for number in range(6):
            answers: list[tuple] = []
            for method in (None, "ngram", "auto", "suffix", "again"):
                requests = wishes(random.Random(number))
                serving = Serving(executor, slots=SLOTS, budget=64, longest=LONGEST, seed=number)
                drafter = None
                if method == "again":  # with what the first ones were answered
                    drafter = executor.speculator.drafter
                elif method is not None:
                    drafter = make_drafter(
                        Speculation(method=method, num_speculative_tokens=5),  # type: ignore[arg-type]
                        max_num_seqs=SLOTS,
                        vocab_size=VOCAB,
                        ngram=ngram_kernel(),
                        suffix=suffix_kernel,
                        forced=masks.forced,
                        constrained=lambda: masks.any,
                    )
                    if method == "auto":  # every guess, whatever this machine is busy with
                        drafter._cost = None
                executor.speculator.drafter = drafter
                found = serving.run(requests)
                if method is not None:
                    assert found == answers, (number, method)
                    counted += serving.drafts, serving.right
                if method in ("suffix", "again"):
                    again[int(method == "again")] += serving.right
                answers = found
    finally:
        executor.close()
    drafts, right = counted.tolist()
    assert 0 < right < drafts
    assert again[1] > again[0]
