from __future__ import annotations

import os

import pytest

from baton.launch.instances.environment import engine_environment, worker_environment
from baton.protocol.rules.cluster_secret import SECRETS_VARIABLE, ClusterSecret, Secrets


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    environment = worker_environment()
    assert (environment["OMP_WAIT_POLICY"], environment["THP_MEM_ALLOC_ENABLE"]) == ("passive", "0")
    assert "OMP_WAIT_POLICY" not in engine_environment()
    assert environment["PATH"] == engine_environment()["PATH"]


def test_a_worker_is_given_the_secrets_and_its_children_are_not(monkeypatch: pytest.MonkeyPatch):
    secrets = Secrets((ClusterSecret.make(bytes(32)), ClusterSecret.make(bytes(31) + b"1")))
    monkeypatch.delenv(SECRETS_VARIABLE, raising=False)
    assert SECRETS_VARIABLE not in worker_environment()
    monkeypatch.setenv(SECRETS_VARIABLE, worker_environment(secrets)[SECRETS_VARIABLE])
    assert Secrets.taken_from(os.environ) == secrets
    assert SECRETS_VARIABLE not in os.environ
    assert not Secrets.taken_from(os.environ)
