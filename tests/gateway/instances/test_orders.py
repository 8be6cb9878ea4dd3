"""New weights and profiles over HTTP: what is asked of the engine, and how its refusals look."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.gateway.access import Access
from baton.protocol.weights import Weights
from tests.gateway.harness import GatewayServer

END = 256


@pytest.fixture(autouse=True)
def clean(server: GatewayServer) -> Iterator[None]:
    """The server is shared by all modules."""
    server.reset()
    yield
    server.reset()


@pytest.mark.parametrize(("path", "field"), [("/update_weights", "path"), ("/start_profile", "directory")])
def test_orders_reach_the_engine_and_errors_name_the_field(
    server: GatewayServer, path: str, field: str, monkeypatch
):
    what = path[1:]
    told: list[Weights] = []
    monkeypatch.setattr(server.client, "on_weights", told.append)
    # What is asked first: new weights are checked before anything is decided.
    asked = "check_weights" if what == "update_weights" else what
    with server.http() as http:
        response = http.post(path, json={field: "/some/where"})
        assert response.status_code == 200
        assert response.json().items() >= {"what": what, "argument": "/some/where"}.items()
        assert [weights.path for weights in told] == (["/some/where"] if what == "update_weights" else [])
        for body in ({}, {field: ""}, {field: "/" + "x" * 5000}, {field: 7}):
            response = http.post(path, json=body)
            assert response.status_code == 400, body
            assert response.json()["error"]["param"] == field
        told.clear()
        for code, status in (("refused", 400), ("busy", 409), ("loading", 503), ("shutting_down", 503)):
            server.engine.behaviour.replies[asked] = {"error": "because of that", "code": code}
            response = http.post(path, json={field: "/some/where"})
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (status, code)
            assert "because of that" in error["message"]
            assert error["param"] == (field if code == "refused" else None)
        assert told == [], "nothing has changed"


def test_stop_profile_needs_nothing(server: GatewayServer):
    with server.http() as http:
        assert http.post("/stop_profile").json() == {"what": "stop_profile"}
        server.engine.behaviour.replies["stop_profile"] = {"error": "none runs", "code": "refused"}
        response = http.post("/stop_profile")
        assert (response.status_code, response.json()["error"]["message"]) == (400, "none runs")


def test_orders_need_the_key(byte_level: Path, vocab: int):
    with (
        GatewayServer(byte_level, eos=END, vocab=vocab, access=Access(("u",), ("k",))) as own,
        own.http() as http,
    ):
        for path in ("/update_weights", "/start_profile", "/stop_profile"):
            assert http.post(path, json={"path": "/a", "directory": "/a"}).status_code == 401
        assert not own.engine.queries
        response = http.post("/stop_profile", headers={"authorization": "Bearer k"})
        assert response.status_code == 200


def test_paths_lie_below_a_directory_that_a_flag_names(tmp_path: Path, byte_level: Path, vocab: int):
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    (inside / "step-1").mkdir(parents=True)
    outside.mkdir()
    (inside / "link").symlink_to(outside)
    access = Access(weights_dir=str(inside), profile_dir=str(inside))
    with GatewayServer(byte_level, eos=END, vocab=vocab, access=access) as own, own.http() as http:
        for path, field in (("/update_weights", "path"), ("/start_profile", "directory")):
            for good in (str(inside / "step-1"), "step-1", "step-1/../step-1", str(inside)):
                answer = http.post(path, json={field: good}).json()
                assert answer["argument"] == str(inside if good == str(inside) else inside / "step-1")
            own.engine.queries.clear()
            for bad in (
                str(outside),
                "..",
                "../outside",
                "link",
                "link/x",
                "/",
                "/etc",
                str(inside) + "-not",
            ):
                answer = http.post(path, json={field: bad})
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), bad
            assert not own.engine.queries


def test_without_the_flag_no_path_is_taken(byte_level: Path, vocab: int):
    with GatewayServer(byte_level, eos=END, vocab=vocab, access=Access()) as own, own.http() as http:
        for path, field, flag in (
            ("/update_weights", "path", "--weights-dir"),
            ("/start_profile", "directory", "--profile-dir"),
        ):
            answer = http.post(path, json={field: "/tmp"})
            assert answer.status_code == 403
            assert flag in answer.json()["error"]["message"]
        assert not own.engine.queries
