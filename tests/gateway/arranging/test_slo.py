"""`--slo`, and bounds of the number of instances: what is read, and what is said of what is not."""

from __future__ import annotations

import math

import pytest

from baton.gateway.arranging.slo import Slo, read_bounds, read_slo


@pytest.mark.parametrize(
    ("text", "slo"),
    [
        ("ttft:500 itl:50", Slo(0.5, 0.05)),
        ("itl:50,ttft:500", Slo(0.5, 0.05)),
        ("ttft:2s", Slo(2.0, math.inf)),
        ("tpot:40ms", Slo(math.inf, 0.04)),
    ],
)
def test_what_is_promised(text, slo):
    assert read_slo(text) == slo
    assert read_slo(str(slo)) == slo


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        ("ttft=500", "'ttft=500' is no objective"),
        ("ttft:fast", "is no objective"),
        ("ttft:1.2.3", "is no number"),
        ("ttft:0", "more than 0"),
        ("itl:1e9", "at most an hour"),
        ("itl:5 tpot:5", "itl is there twice"),
    ],
)
def test_what_is_no_promise(text, said):
    with pytest.raises(ValueError, match=said):
        read_slo(text)


def test_bounds():
    assert read_bounds("2:8") == (2, 8)
    for text in ("8:2", "0:3", "2", "2-8", "a:b", ":"):
        with pytest.raises(ValueError, match="give"):
            read_bounds(text)
