from __future__ import annotations

import numpy as np

from baton.drafting.planted import PlantedDrafter
from baton.protocol.params.sampling import Sampling, Stopping

VOCAB = 50


def following(slot: int, tokens, count: int) -> list[int]:
    """Counts upwards."""
    return [(tokens[-1] + 1 + place) % VOCAB for place in range(count)]


def drafter(right: float, **options) -> PlantedDrafter:
    made = PlantedDrafter(following, most=4, right=right, vocab_size=VOCAB, **options)
    for slot in (2, 5):
        made.admit(slot, np.array([7, 8 + slot], np.int32), 1, Sampling(0, 0.0), Stopping(9))
    return made


def ints(*values: int):
    return np.array(values, np.int32)


def test_it_proposes_what_follows_what_the_steps_gave():
    made = drafter(1.0)
    assert {slot: drafts.tolist() for slot, drafts in made.propose(ints(2, 5)).items()} == {
        2: [11, 12, 13, 14],
        5: [14, 15, 16, 17],
    }
    made.after(ints(5, 2), ints(3, 1), ints(14, 15, 16, 30))
    assert {slot: drafts.tolist() for slot, drafts in made.propose(ints(2, 5)).items()} == {
        2: [31, 32, 33, 34],
        5: [17, 18, 19, 20],
    }
    made.release(5)
    assert list(made.propose(ints(2))) == [2]


def test_so_many_are_right():
    made = drafter(0.6)
    right = total = 0
    for _ in range(300):
        (drafts,) = made.propose(ints(2)).values()
        last = made._tokens[2][-1]
        truth = following(2, [last], 4)
        right += int((drafts == truth).sum())
        total += len(drafts)
        assert ((drafts >= 0) & (drafts < VOCAB)).all()
        made.after(ints(2), ints(1), ints(truth[0]))
    assert 0.5 < right / total < 0.7
    assert [d.tolist() for d in drafter(0.6).propose(ints(2, 5)).values()] == [
        d.tolist() for d in drafter(0.6).propose(ints(2, 5)).values()
    ]


def test_their_number_varies():
    made = drafter(1.0, varied=True)
    numbers = set()
    for _ in range(100):
        numbers.add(len(made.propose(ints(2)).get(2, ())))
        made.after(ints(2), ints(1), ints(3))
    assert numbers == {0, 1, 2, 3, 4}
