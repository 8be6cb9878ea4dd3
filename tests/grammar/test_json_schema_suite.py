"""The specification's own tests (`benchmarks/json_schema_suite.py`): nothing that is accepted is wrong."""

from __future__ import annotations

from benchmarks.json_schema_suite import run


def test_nothing_is_wrong():
    total, details, _ = run()
    assert [text for kind, text in details if kind == "wrong"] == []
    assert total["passed"] > 1750
    assert total["narrower"] <= 95
    assert total["refused"] <= 380
