from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.protocol.params.repetition import RepetitionDetection


@given(
    tokens=st.lists(st.integers(0, 2), max_size=24),
    least=st.integers(0, 4),
    more=st.integers(0, 4),
    count=st.integers(2, 5),
)
def test_a_repetition_is_what_it_says(tokens: list[int], least: int, more: int, count: int) -> None:
    detection = RepetitionDetection(min_pattern_size=least, max_pattern_size=least + more, min_count=count)
    assert detection.problem() is None
    expected = any(
        len(tokens) >= size * count and tokens[-size * count :] == tokens[-size:] * count
        for size in range(max(1, least), least + more + 1)
    )
    assert detection.found(tokens) == expected
    assert detection.found(tokens[-detection.reach :]) == expected
