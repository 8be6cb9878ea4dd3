"""Rows of a step that have no mask: what they get in place of a token, on every rank."""

import numpy as np
import torch

from baton.executor.base import StepBatch, StepResult
from baton.executor.results.constraints import FAILED, LATE, ConstrainedSampler
from baton.grammar.masks import Ready
from baton.launch.planning.instance_config import instance_config
from baton.protocol.params.sampling import Constraint, Sampling, Stopping

VOCAB = 40


class Given:
    """Masks of which a test says who has one."""

    any = True

    def __init__(self, *found: Ready) -> None:
        self.found, self.told = list(found), []

    def begin(self, slots):
        pass

    def ready(self):
        return self.found.pop(0)

    def chosen(self, slots, tokens):
        self.told.append((slots.tolist(), tokens.tolist()))
        return {2: "not in its mask"} if 2 in slots else {}


def sampler_of(*found, slots=4):
    made = ConstrainedSampler(
        instance_config(model="", max_num_seqs=slots, max_model_len=64, block_size=4), VOCAB, 0
    )
    made._masks = None
    for slot in range(slots):
        sampling = Sampling(
            seed=slot, temperature=0.0, frequency_penalty=0.5, logprobs=1, constraint=Constraint("")
        )
        made.admit(slot, np.array([1, 2], np.int32), 2, sampling, Stopping(9))
    made._sampler.masks[:] = 0xFFFFFFFF
    made._masks = given = Given(*found)
    return made, given


def batch_of(slots):
    n = len(slots)
    one, numbers = np.ones(n, np.int32), np.array(slots, np.int32)
    return StepBatch(1, numbers, 2 * one, one, one, np.ones(n, bool), np.zeros((n, 1), np.int32), n)


def test_late_and_failed_rows_on_every_rank():
    logits = torch.zeros(4, VOCAB)
    logits[:, 7] = 0.3
    sampler, given = sampler_of(Ready({0: "it broke"}, [1]), Ready({}, []))
    result = StepResult(np.empty(0, np.int32))
    tokens = sampler.sample(result, logits, batch_of([0, 1, 2, 3]), None)
    assert tokens.tolist() == [FAILED, LATE, FAILED, 7]
    assert given.told == [([0, 2, 3], [7, 7, 7])]
    sampler.take(result, tokens, None)
    assert result.failed == {0: "it broke", 2: "not in its mask"}
    assert result.late == [1]
    assert 1 not in result.logprobs
    assert result.logprobs[3][0].token == 7
    follower = StepResult(np.empty(0, np.int32))
    sampler.take(follower, tokens, np.array([3, 5, 6, 8]))
    assert (sorted(follower.failed), follower.late) == ([3, 6], [5])
    # What was not chosen for the late row is in no penalty of it; of the others it is.
    again = sampler.sample(StepResult(np.empty(0, np.int32)), logits[:2], batch_of([1, 3]), None)
    assert again.tolist() == [7, 0]


def test_a_step_in_which_all_are_late():
    sampler, given = sampler_of(Ready({}, [0, 1]), slots=2)
    result = StepResult(np.empty(0, np.int32))
    tokens = sampler.sample(result, torch.zeros(2, VOCAB), batch_of([0, 1]), None)
    sampler.take(result, tokens, None)
    assert (result.late, result.failed, result.logprobs, given.told) == ([0, 1], {}, {}, [])
