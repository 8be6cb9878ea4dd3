"""Where an instance that joins a server listens: on one host for its own user alone."""

from __future__ import annotations

from typing import Any

import pytest

from baton.launch.instances.joining import joined
from baton.launch.instances.joining.joined import run_joined
from baton.launch.options import ServeOptions
from baton.launch.planning.cluster_options import is_loopback


@pytest.mark.parametrize(
    ("server", "peer_host", "private", "peers"),
    [
        ("127.0.0.1:8000", None, True, "ipc://*"),
        ("http://localhost:8000", None, True, "ipc://*"),
        ("127.0.0.1:8000", "127.0.0.1", True, "tcp://127.0.0.1:0"),
        ("192.0.2.1:8000", None, False, "tcp://127.0.0.1:0"),
    ],
)
def test_on_one_host_nothing_listens_for_others(
    monkeypatch: pytest.MonkeyPatch, server: str, peer_host: str | None, private: bool, peers: str
) -> None:
    made: list[tuple[Any, bool]] = []

    class Recorded:
        def __init__(self, plan: Any, options: Any, server: Any, accepted: Any, *, private: bool) -> None:
            made.append((plan, private))

        async def run(self) -> None: ...

    monkeypatch.setattr(joined, "_Joined", Recorded)
    monkeypatch.setattr(joined, "configure_logging", lambda level, who, form: None)
    run_joined(ServeOptions(executor="simulated", instance=True, peer_host=peer_host, join=(server,)))
    ((plan, was_private),) = made
    assert was_private == private
    assert plan.instance.peer_endpoint == peers


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("[::1]", True), ("192.0.2.1", False)],
)
def test_what_means_this_machine_alone(host: str, loopback: bool) -> None:
    assert is_loopback(host) == loopback
    assert not is_loopback("no such host")
