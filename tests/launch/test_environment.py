from __future__ import annotations

import pytest

from baton.launch.instances.environment import engine_environment, worker_environment


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    environment = worker_environment()
    assert (environment["OMP_WAIT_POLICY"], environment["THP_MEM_ALLOC_ENABLE"]) == ("passive", "0")
    assert "OMP_WAIT_POLICY" not in engine_environment()
    assert environment["PATH"] == engine_environment()["PATH"]
