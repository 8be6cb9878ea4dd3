from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch.distributed as dist

from baton.launch.instances.processes.environment import engine_environment, worker_environment
from baton.model.layers.meeting import MeetingStore
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


def test_ranks_of_nccl_ask_their_store_nothing_while_they_serve(monkeypatch: pytest.MonkeyPatch):
    """The one in which ranks on several hosts meet can be waited on for keys that somebody will say, and
    cannot be asked whether one is there, which a group of NCCL would do each second."""
    monkeypatch.delenv("TORCH_NCCL_DUMP_ON_TIMEOUT", raising=False)
    assert worker_environment()["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"
    here, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    store: Any = dist.PrefixStore("group", MeetingStore(here.detach(), 1.0))  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="check"):
        store.check(["key"])
