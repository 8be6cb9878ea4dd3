"""Members of the cluster over HTTP: signed requests, signed answers, who else may do what."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.gateway.access import Access
from baton.gateway.errors import ApiError
from baton.gateway.http.members import Unheard
from baton.gateway.http.rights import RIGHTS, Guard
from baton.launch.instances.joining.asking import Refused, Server, ServerAway
from baton.protocol.rules.cluster_secret import REGISTRATION, ClusterSecret, Secrets
from baton.protocol.rules.signing import ANSWER_HEADER, MAX_BODY, Question, check_answer, sign_request
from tests.gateway.conftest import END
from tests.gateway.harness import GatewayServer
from tests.gateway.site import PATH, Site

NEW, OLD, STRANGE = (ClusterSecret.make(bytes([number] * 32)) for number in range(3))
SALT = "5a" * 16
FAR = ("10.1.2.3", 40_000)
LOCAL = ("127.0.0.1", 40_000)


@pytest.fixture(scope="module")
def gateway(byte_level: Path, vocab: int) -> Iterator[GatewayServer]:
    access = Access(("user",), ("admin",), cluster_secrets=Secrets((NEW, OLD)))
    with GatewayServer(byte_level, eos=END, vocab=vocab, access=access) as server:
        yield server


@pytest.fixture
def site(gateway: GatewayServer) -> Iterator[Site]:
    made = Site(gateway)
    made.http.headers["authorization"] = "Bearer admin"
    yield made
    for name in made.joined:
        made.http.delete(f"{PATH}/{name}")
    made.close()


def member(site: Site, *accepted: ClusterSecret) -> Server:
    return Server(str(site.http.base_url).rstrip("/"), accepted=Secrets(accepted or (NEW,)))


def registration(site: Site, name: str, secret: ClusterSecret = NEW, **changes: Any) -> dict[str, Any]:
    engine = site.joined.get(name) or site.engine(name)
    engine.secret = secret.key(REGISTRATION, SALT).hex()
    body = {"incarnation": engine.incarnation, "endpoint": engine.endpoint, "label": "mixed", "ttl_s": 30}
    return {**body, "salt": SALT, **changes}


@pytest.mark.parametrize("accepted", [(NEW,), (OLD,), (OLD, STRANGE)])
def test_a_member_joins_is_used_and_leaves(site: Site, accepted: tuple[ClusterSecret, ...]):
    server = member(site, *accepted)
    body = registration(site, "far", accepted[0])
    assert server.ask("PUT", f"{PATH}/far", body)["name"] == "far"
    site.until(lambda: server.ask("GET", f"{PATH}/far")["state"] == "ready")
    assert server.ask("POST", f"{PATH}/far", {"state": "draining"})["draining"]
    assert server.ask("DELETE", f"{PATH}/far")["state"] == "gone"
    with pytest.raises(Refused, match="there is no instance 'far'"):
        server.ask("GET", f"{PATH}/far")


def test_the_engine_must_know_the_secret_as_well(site: Site):
    body = registration(site, "far", STRANGE)
    member(site).ask("PUT", f"{PATH}/far", body)
    site.until(lambda: site.see("far")["state"] == "failed")
    assert "did not prove" in site.see("far")["failure"]


def test_who_is_no_member_does_not_join(site: Site, caplog: pytest.LogCaptureFixture):
    """Not with an admin key either; and it is logged who tried."""
    body = registration(site, "far")
    before = [refusals(site, code) for code in ("another_secret", "member_required")]
    with caplog.at_level(logging.WARNING):
        for key in ({}, {"authorization": "Bearer admin"}, {"authorization": "Bearer user"}):
            answer = httpx.put(f"{site.http.base_url}{PATH}/far", json=body, headers=key)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "member_required")
            assert "--cluster-secret FILE" in answer.text
        with pytest.raises(Refused, match="is not signed with this cluster's secret"):
            member(site, STRANGE).ask("PUT", f"{PATH}/far", body)
    said = [one.getMessage() for one in caplog.records if "is refused" in one.getMessage()]
    assert len(said) == 4
    after = [refusals(site, code) for code in ("another_secret", "member_required")]
    assert [now - then for now, then in zip(after, before, strict=True)] == [1, 3]
    assert all(line.startswith(f"PUT of {PATH}/far by 127.0.0.1 is refused: ") for line in said)
    assert "far" not in [entry["name"] for entry in site.http.get(PATH).json()["instances"]]


class Wire:
    """Sends what a member has signed, or what somebody made of it."""

    def __init__(self, site: Site) -> None:
        self._site = site
        answer, question = self.send(self.question("GET", PATH, server=""))
        assert answer.json()["error"]["code"] == "other_server"
        reply = check_answer(question, answer.headers[ANSWER_HEADER], 401, answer.content)
        assert reply is not None
        self.server = reply.server

    def question(self, method: str, path: str, body: bytes = b"", **changes: Any) -> Any:
        now, server = changes.get("now", time.time()), changes.get("server", getattr(self, "server", ""))
        nonce = changes.get("nonce", time.monotonic_ns().to_bytes(16, "big"))
        signed = sign_request(changes.get("secret", NEW), server, now, nonce, method, path, body)
        return signed, method, path, body

    def send(self, question: Any, **changes: Any) -> tuple[httpx.Response, Question]:
        signed, method, path, body = question
        headers = {"authorization": signed.header, "content-type": "application/json"}
        url = f"{self._site.http.base_url}{changes.get('path', path)}"
        content = changes.get("body", body)
        return httpx.request(
            method, url, content=content, headers=headers if content else {"authorization": signed.header}
        ), signed


def refusals(site: Site, code: str) -> int:
    """As they are counted for Prometheus."""
    pattern = rf'^baton:member_refusals_total{{code="{code}",.*}} (\S+)$'
    return sum(int(float(found)) for found in re.findall(pattern, site.http.get("/metrics").text, re.M))


def test_a_request_counts_once(site: Site, caplog: pytest.LogCaptureFixture):
    wire = Wire(site)
    body = json.dumps(registration(site, "far")).encode()
    question = wire.question("PUT", f"{PATH}/far", body)
    answer, signed = wire.send(question)
    assert answer.status_code == 200
    assert check_answer(signed, answer.headers[ANSWER_HEADER], 200, answer.content)
    site.http.delete(f"{PATH}/far").raise_for_status()
    before = refusals(site, "replayed")
    with caplog.at_level(logging.WARNING):
        answer, signed = wire.send(question)
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "replayed")
    assert check_answer(signed, answer.headers[ANSWER_HEADER], 401, answer.content)
    assert "by 127.0.0.1 is refused: this request was made before" in caplog.text
    assert refusals(site, "replayed") == before + 1
    assert site.http.get(f"{PATH}/far").status_code == 404


def test_nothing_of_a_request_can_be_changed(site: Site):
    wire = Wire(site)
    site.engine("far")
    body = json.dumps(registration(site, "far")).encode()
    answer, signed = wire.send(
        wire.question("PUT", f"{PATH}/far", body), body=body.replace(b"mixed", b"decode")
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "another_body")
    assert check_answer(signed, answer.headers[ANSWER_HEADER], 400, answer.content)
    for path in (f"{PATH}/near", f"{PATH}/far?x=1"):
        answer, _ = wire.send(wire.question("PUT", f"{PATH}/far", body), path=path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "another_secret")
        assert ANSWER_HEADER not in answer.headers
    answer, _ = wire.send(wire.question("PUT", f"{PATH}/far", b" " * (MAX_BODY + 1)))
    assert answer.status_code == 413
    answer, _ = wire.send(wire.question("PUT", f"{PATH}/far", body, now=time.time() - 3600))
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "clocks_differ")
    assert "the instance's clock is 3600 s behind the server's" in answer.text
    assert site.http.get(f"{PATH}/far").status_code == 404


def test_a_signature_opens_nothing_else(site: Site):
    wire = Wire(site)
    for path in ("/pause", "/debug/ledger", "/v1/models"):
        assert wire.send(wire.question("GET", path))[0].status_code == 401
    assert wire.send(wire.question("GET", PATH))[0].status_code == 200


def test_a_server_without_a_secret_says_so(byte_level: Path, vocab: int):
    with GatewayServer(byte_level, eos=END, vocab=vocab) as plain:
        site = Site(plain)
        with pytest.raises(Refused, match="this server has no cluster secret, and the instance has one"):
            member(site).ask("GET", PATH)
        site.close()


def test_a_gateway_that_is_started_anew_is_recognized(site: Site, byte_level: Path, vocab: int):
    """The first request was signed for the old one, and is signed again."""
    server = member(site)
    server.ask("GET", PATH)
    access = Access(cluster_secrets=Secrets((NEW,)))
    with GatewayServer(byte_level, eos=END, vocab=vocab, access=access) as another:
        http = another.http()
        server.url = str(http.base_url).rstrip("/")
        assert server.ask("GET", PATH)["instances"]
        http.close()


def test_an_impostor_is_not_believed(site: Site, server: GatewayServer):
    """A server without the secret answers at the address: at first a person is told; later it is a server
    that is away, and not a reason to leave."""
    fake = server.http()
    url = str(fake.base_url).rstrip("/")
    fake.close()
    fresh = Server(url, accepted=Secrets((NEW,)))
    with pytest.raises(Refused):
        fresh.ask("GET", PATH)
    with pytest.raises(Refused, match="does not show that it knows the cluster's secret"):
        fresh.ask("GET", "/health")  # (which it answers to anybody)
    known = member(site)
    known.ask("GET", PATH)
    known.url = url
    for path in (PATH, "/health"):
        with pytest.raises(ServerAway, match="not signed with the cluster's secret"):
            known.ask("GET", path)


def test_both_ends_encrypt_or_none(site: Site):
    body = registration(site, "far", endpoint=f"tcp://127.0.0.1:5000?curve={'ab' * 32}")
    with pytest.raises(Refused, match="does encrypt its connections, and this server does not so"):
        member(site).ask("PUT", f"{PATH}/far", body)


# -- the table


def status(
    guard: Guard,
    method: str,
    client: tuple[str, int],
    authorization: str = "",
    path: str = f"{PATH}/x",
    **more: str,
) -> int:
    headers = {"host": "127.0.0.1", "authorization": authorization, **more}
    scope: dict[str, Any] = {"path": path, "method": method, "client": client, "server": ("", 1)}
    try:
        guard.check(scope, {name.encode(): value.encode() for name, value in headers.items() if value})
    except ApiError as error:
        return error.status
    return 200


def signed_for(guard: Guard, method: str, secret: ClusterSecret = NEW, path: str = f"{PATH}/x") -> str:
    server, nonce = guard.members._verifier.server, time.monotonic_ns().to_bytes(16, "big")
    return sign_request(secret, server, time.time(), nonce, method, path, b"").header


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE"])
def test_who_may_use_the_routes_of_members(method: str):
    assert [path for path, right in RIGHTS.items() if right == "member"] == [PATH, f"{PATH}/{{name}}"]
    joining = method == "PUT"
    secret = Guard(Access(("user",), ("admin",), cluster_secrets=Secrets((NEW,))))
    for client in (LOCAL, FAR):
        assert status(secret, method, client, signed_for(secret, method)) == 200
        assert status(secret, method, client, signed_for(secret, method, STRANGE)) == 401
        assert status(secret, method, client, "Bearer admin") == (403 if joining else 200)
        assert status(secret, method, client, "Bearer user") == 403
        assert status(secret, method, client) == (403 if joining else 401)
    used = signed_for(secret, method)
    assert status(secret, method, FAR, used) == 200
    with pytest.raises(Unheard, match="counts once"):
        status(secret, method, FAR, used)
    no_secret = Guard(Access(("user",), ("admin",)))
    assert status(no_secret, method, FAR, signed_for(no_secret, method)) == 403
    assert status(no_secret, method, FAR, "Bearer admin") == (403 if joining else 200)
    assert status(no_secret, method, LOCAL, "Bearer admin") == 200
    proxied = {"x-forwarded-for": "10.1.1.1"}
    assert status(no_secret, method, LOCAL, "Bearer admin", **proxied) == (403 if joining else 200)
    nothing = Guard(Access())
    assert status(nothing, method, LOCAL) == 200, "one machine needs no secret"
    assert status(nothing, method, FAR) == 403
    insecure = Guard(Access(("user",), ("admin",), insecure_cluster=True))
    assert status(insecure, method, FAR, "Bearer admin") == 200
    assert status(insecure, method, FAR, "Bearer user") == 403
    assert status(insecure, method, FAR) == 401


MAY: dict[str, dict[str, set[str]]] = {
    "open": {"all": {"nobody", "user", "operator", "member"}},
    "user": {"all": {"user", "operator"}},
    "operator": {"all": {"operator"}},
    "member": {"all": {"operator", "member"}, "PUT": {"member"}},
}
"""Right of a route → method → who may, of a server with keys and a secret, as `docs/security.md` has it."""


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE"])
@pytest.mark.parametrize("route", RIGHTS)
def test_who_may_do_what_of_all_routes(route: str, method: str):
    guard = Guard(Access(("user",), ("admin",), cluster_secrets=Secrets((NEW,))))
    path = route.replace("{name:path}", "x").replace("{name}", "x")
    for client in (LOCAL, FAR):
        shown = {
            "nobody": "",
            "user": "Bearer user",
            "operator": "Bearer admin",
            "member": signed_for(guard, method, path=path),
        }
        may = {who for who, header in shown.items() if status(guard, method, client, header, path) == 200}
        rights = MAY[RIGHTS[route]]
        assert may == rights.get(method, rights["all"]), (route, method, client)
