"""Who may ask for which route: keys, and without them where a request comes from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from baton.gateway.access import Access
from baton.gateway.errors import ApiError
from baton.gateway.http.rights import RIGHTS, Guard, is_local, key_id, right_of, without_right
from tests.gateway.conftest import END
from tests.gateway.harness import GatewayServer

LOCAL = ("127.0.0.1", 40_000)
FAR = ("10.1.2.3", 40_000)
JSON = {"content-type": "application/json"}


def ask(
    guard: Guard,
    path: str,
    method: str = "POST",
    *,
    client: tuple[str, int] | None = LOCAL,
    server: tuple[str, int | None] = ("127.0.0.1", 8000),
    key: str | None = None,
    **headers: str,
) -> int:
    """The status that a request gets from the guard; 200: it may pass."""
    given = {"host": "127.0.0.1:8000"} | {name.replace("_", "-"): value for name, value in headers.items()}
    if key is not None:
        given["authorization"] = f"Bearer {key}"
    scope: dict[str, Any] = {"path": path, "method": method, "client": client, "server": server}
    try:
        guard.check(scope, {name.encode(): value.encode() for name, value in given.items() if value})
    except ApiError as error:
        return error.status
    return 200


OPERATOR = [path.replace("{name}", "x") for path, right in RIGHTS.items() if right == "operator"]
USER = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/models/org/name"]


def test_every_route_has_a_right(server: GatewayServer):
    paths = [route.path for route in server.app.routes]
    assert without_right(paths) == [], "say in rights.RIGHTS who may use it"
    assert set(paths) == set(RIGHTS), "rights of routes that there are not"
    assert without_right(["/new"]) == ["/new"]


def test_a_route_without_a_right_is_never_reached(byte_level: Path, vocab: int):
    with GatewayServer(byte_level, eos=END, vocab=vocab) as server, server.http() as http:
        server.app.router.routes.append(Route("/new", lambda _: PlainTextResponse("reached")))
        assert http.get("/new").status_code == 404


@pytest.mark.parametrize("path", OPERATOR)
def test_with_an_admin_key_operators_send_it(path: str):
    guard = Guard(Access(("user",), ("admin", "other")))
    for client in (LOCAL, FAR):
        assert ask(guard, path, client=client) == 401
        assert ask(guard, path, client=client, key="wrong") == 401
        assert ask(guard, path, client=client, key="user") == 403
        assert ask(guard, path, client=client, key="other", host="any.example", origin="http://a.b") == 200
    open_to_users = Guard(Access(admin_keys=("admin",)))
    assert ask(open_to_users, path) == 401
    assert ask(open_to_users, "/v1/completions", client=FAR) == 200


@pytest.mark.parametrize("path", OPERATOR)
@pytest.mark.parametrize("keys", [(), ("user",)])
def test_without_an_admin_key_operators_are_on_this_machine(path: str, keys: tuple[str, ...]):
    guard = Guard(Access(keys, allowed_hosts=("Box.example",), allowed_origins=("http://ui.example", "*")))
    for client in (LOCAL, ("::1", 1), ("::ffff:127.0.0.1", 1), ("127.9.9.9", 1)):
        assert ask(guard, path, client=client) == 200
    assert ask(guard, path, client=None, server=("/run/baton.sock", None)) == 200
    for client in (FAR, ("fe80::1%eth0", 1), ("::ffff:10.0.0.1", 1), None):
        assert ask(guard, path, client=client) == 403
    for host in ("localhost:8000", "[::1]:8000", "192.168.0.9", "box.example:80", ""):
        assert ask(guard, path, host=host) == 200, host
    for host in ("evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example:8000", "[evil]:1"):
        assert ask(guard, path, host=host) == 403, host
    for origin in ("http://127.0.0.1:8000", "http://ui.example"):
        assert ask(guard, path, origin=origin) == 200, origin
    for origin in ("http://evil.example", "null", "http://127.0.0.1:3000", "http://[", "http://127.0.0.1"):
        assert ask(guard, path, origin=origin) == 403, origin
    for proxied in ("x_forwarded_for", "forwarded", "x_real_ip", "via"):
        assert ask(guard, path, **{proxied: "10.0.0.1"}) == 403, proxied
    if keys:
        assert ask(guard, path, key="user") == 403
        assert ask(guard, path, key="wrong") == 401
    else:
        assert ask(guard, path, key="whatever clients send") == 200


@pytest.mark.parametrize("path", USER)
def test_users(path: str):
    keyed = Guard(Access(("user",), ("admin",)))
    for key, status in (("user", 200), ("admin", 200), ("wrong", 401), (None, 401)):
        assert ask(keyed, path, key=key, client=FAR, host="any.example") == status
    free = Guard(Access(allowed_origins=("http://ui.example",), allowed_hosts=("api.example",)))
    assert ask(free, path, client=FAR, host="any.example") == 200, "a reachable server without keys is open"
    assert ask(free, path, host="api.example") == 200
    assert ask(free, path, host="any.example") == 403
    assert ask(free, path, origin="http://ui.example") == 200
    assert ask(free, path, origin="http://evil.example") == 403
    assert ask(Guard(Access(allowed_origins=("*",))), path, origin="http://evil.example") == 200


@pytest.mark.parametrize("path", [*USER, "/pause"])
def test_a_key_may_come_as_anthropics_clients_send_it(path: str):
    guard = Guard(Access(("user",), ("admin",)))
    right = 200 if path in USER else 403
    for key, status in (("admin", 200), ("user", right), ("wrong", 401)):
        assert ask(guard, path, x_api_key=key, client=FAR) == status
    assert ask(guard, path, x_api_key="admin", key="wrong") == 200
    assert ask(guard, path, x_api_key="wrong", key="admin") == 200
    assert ask(guard, path, x_api_key="", authorization="Basic admin") == 401
    # (Whose key is wrong is no neighbour.)
    assert ask(Guard(Access(("user",))), "/pause", x_api_key="wrong") == 401


def test_bodies_are_json():
    guard = Guard(Access())
    for path in ("/v1/completions", "/pause", "/cluster/instances/x"):
        assert ask(guard, path) == 200, "no body"
        assert ask(guard, path, content_length="0") == 200
        assert ask(guard, path, content_length="2", content_type="application/json; charset=utf-8") == 200
        assert ask(guard, path, content_length="2") == 415
        assert ask(guard, path, transfer_encoding="chunked") == 415
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            assert ask(guard, path, content_length="2", content_type=kind) == 415
            assert ask(guard, path, content_type=kind) == 415
        assert ask(guard, path, content_type="application/json", content_encoding="gzip") == 415
        assert ask(guard, path, content_type="application/json", content_encoding="identity") == 200


def test_what_is_open():
    guard = Guard(Access(("user",), ("admin",)))
    for path, right in RIGHTS.items():
        assert (ask(guard, path, "GET", client=FAR) == 200) is (right == "open")
    assert right_of("/health/../pause") is None
    assert ask(guard, "/nothing", key="user") == 404
    assert ask(guard, "/nothing") == 401


def test_a_lost_peer_is_not_local():
    """No address: the connection has ended; it need not have been a unix socket."""
    assert not is_local({"client": None, "server": ("127.0.0.1", 8000)})


def test_ids_of_keys():
    assert key_id("secret") == key_id("secret") != key_id("secret2")
    assert len(key_id("secret")) == 12
    assert "secret" not in key_id("secret")


@pytest.fixture(scope="module")
def keyed(byte_level: Path, vocab: int) -> Iterator[GatewayServer]:
    access = Access(("user", "other"), ("admin",), min_priority=-5)
    with GatewayServer(byte_level, eos=END, vocab=vocab, access=access) as server:
        yield server


def test_the_scope_says_whose_request_it_is(keyed: GatewayServer, monkeypatch: pytest.MonkeyPatch):
    seen: list[tuple[str, int | None]] = []
    gateway = keyed.app.state.gateway
    read = type(gateway).read_prompted

    async def spy(self: Any, request: Any, kind: Any) -> Any:
        seen.append((request.state.key_id, request.state.min_priority))
        return await read(self, request, kind)

    monkeypatch.setattr(type(gateway), "read_prompted", spy)
    for key in ("user", "other", "admin"):
        keyed.openai(api_key=key).completions.create(model="tiny", prompt="x", max_tokens=1)
    assert seen == [(key_id("user"), -5), (key_id("other"), -5), (key_id("admin"), None)]


def test_users_are_bounded_in_their_priority(keyed: GatewayServer):
    def status(key: str, priority: int) -> int:
        body = {"prompt": "x", "max_tokens": 1, "priority": priority}
        with keyed.http() as http:
            answer = http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
        return answer.status_code

    assert status("user", -5) == status("user", 7) == status("admin", -1000) == 200
    assert status("user", -6) == 400
    assert Guard(Access(("k",)))._min_priority == 0
    assert Guard(Access())._min_priority is None


def test_over_http(keyed: GatewayServer, server: GatewayServer):
    server.reset()
    with keyed.http() as http:
        answer = http.post("/pause", headers={"authorization": "Bearer user"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (403, "permission_error")
        assert "--admin-key" in answer.json()["error"]["message"]
        assert http.post("/pause", headers={"authorization": "Bearer admin"}).status_code == 200
        assert http.post("/resume", headers={"authorization": "Bearer admin"}).status_code == 200
    before = server.engine.queries.copy()
    with server.http() as http:
        page = {"content-type": "text/plain", "origin": "http://evil.example"}
        for path in (
            "/pause",
            "/update_weights",
            "/start_profile",
            "/cluster/instances/instance-0",
            "/v1/completions",
        ):
            assert http.post(path, content=b"{}", headers=page).status_code == 403
            assert http.post(path, content=b"{}", headers={"content-type": "text/plain"}).status_code == 415
            rebound = http.post(path, content=b"{}", headers={**JSON, "host": "evil.example"})
            assert rebound.status_code == 403
        assert server.engine.queries == before


def test_the_preflight_of_a_browser(byte_level: Path, vocab: int):
    access = Access(("user",), allowed_origins=("https://chat.example",))
    with GatewayServer(byte_level, eos=END, vocab=vocab, access=access) as server, server.http() as http:
        wanted = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        answer = http.options("/v1/completions", headers={"origin": "https://chat.example", **wanted})
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://chat.example"
        assert (
            http.options("/v1/completions", headers={"origin": "https://evil.example", **wanted}).status_code
            == 400
        )
        body = {"prompt": "x", "max_tokens": 2, "stream": True}
        headers = {"origin": "https://chat.example", "authorization": "Bearer user"}
        streamed: httpx.Response = http.post("/v1/completions", json=body, headers=headers)
        assert streamed.headers["access-control-allow-origin"] == "https://chat.example"
        assert streamed.text.endswith("data: [DONE]\n\n")
