"""The token loop, with an executor that is one step late and with one that is not: see `lateness`."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.worker.slots.composition import Composition

from .lateness import Script, simulated_engine


@pytest.mark.parametrize("late", [False, True])
@settings(max_examples=250, deadline=None)
@given(data=st.data(), budget=st.sampled_from([1, 3, 8, 64]), composed=st.booleans())
def test_whatever_crosses_every_epoch_gets_its_tokens_and_one_true_closing(late, data, budget, composed):
    Script(data, simulated_engine(late, budget, composition=Composition() if composed else None)).run()
