"""What an instance makes of a server's answers.  (A real gateway answers in tests/e2e/test_cluster.py.)"""

import json

import pytest

from baton.launch.instances.joining.asking import Refused, Server, ServerAway
from baton.launch.instances.joining.registration import Registrar, Registration
from baton.launch.limits import OptionError
from baton.protocol.weights import Weights
from tests.launch.scripted import Scripted

ME = Registration("abc", "tcp://127.0.0.1:1", "decode", "tiny", process="p", checkpoint="c", dtype="float32")


@pytest.fixture
def scripted():
    server = Scripted()
    yield server
    server.go()


def refusal(message: str) -> bytes:
    return json.dumps({"error": {"message": message}}).encode()


async def test_a_redirect_is_not_followed(scripted):
    """The key is for the server that was named."""
    elsewhere = Scripted()
    try:
        scripted.redirect = f"http://127.0.0.1:{elsewhere.port}/"
        for status in (301, 302, 307, 308):
            scripted.answers = [(status, b"")]
            with pytest.raises(Refused, match="sends on to"):
                Server.parse(f"127.0.0.1:{scripted.port}", "secret").ask("GET", "/cluster/instances")
        assert not elsewhere.asked
    finally:
        elsewhere.go()


async def test_registering_says_who_and_where(scripted):
    registrar = Registrar(Server.parse(f"127.0.0.1:{scripted.port}", "secret"), "d-0", 9.0)
    assert await registrar.renew(ME) == 3.0
    assert registrar.registered
    body = {name: value for name, value in ME._asdict().items() if name != "salt"} | {"ttl_s": 9.0}
    assert scripted.asked == [("PUT", "/cluster/instances/d-0", body, "Bearer secret")]
    scripted.answers = [(200, b'{"drained": false}'), (200, b'{"drained": true}')]
    assert [await registrar.drained(), await registrar.drained()] == [False, True]
    await registrar.leave()
    assert scripted.asked[-1][:2] == ("DELETE", "/cluster/instances/d-0")
    await registrar.leave()
    assert len(scripted.asked) == 4, "it says goodbye once"


async def test_a_server_that_is_away_is_asked_again_with_growing_pauses(scripted, caplog):
    registrar = Registrar(Server.parse(f"http://127.0.0.1:{scripted.port}/", None), "d-0", 9.0)
    await registrar.renew(ME)
    scripted.go()
    pauses = [await registrar.renew(ME) for _ in range(6)]
    assert pauses == [0.25, 0.5, 1.0, 2.0, 3.0, 3.0]
    assert not registrar.registered
    scripted.come_back()
    assert await registrar.renew(ME) == 3.0
    assert registrar.registered
    assert len(caplog.messages) == 2, "one line when it goes, one when it is back"
    assert "does not answer" in caplog.messages[0]


async def test_the_server_says_which_weights_it_has_put_in_place(scripted):
    registrar = Registrar(Server.parse(f"127.0.0.1:{scripted.port}", None), "d-0", 9.0)
    scripted.answers = [
        (200, b'{"state": "ready", "decided_weights": {"generation": 0, "name": "", "path": ""}}'),
        (200, b'{"state": "ready", "decided_weights": {"generation": 3, "name": "c", "path": "/w"}}'),
    ]
    await registrar.renew(ME)
    assert registrar.weights == Weights()
    await registrar.renew(ME)
    assert registrar.weights == Weights(3, "c", "/w")


async def test_until_the_server_has_connected_it_is_asked_often(scripted):
    registrar = Registrar(Server.parse(f"127.0.0.1:{scripted.port}", None), "d-0", 9.0)
    scripted.answers = [(200, b'{"state": "starting"}')] * 2
    assert [await registrar.renew(ME) for _ in range(2)] == [0.25, 0.5]
    assert (registrar.registered, registrar.connected) == (True, False)
    assert await registrar.renew(ME) == 3.0
    assert registrar.connected


async def test_a_name_that_is_taken_is_known_before_anything_is_loaded(scripted):
    registrar = Registrar(Server.parse(f"127.0.0.1:{scripted.port}", None), "d-0", 9.0)
    entry = {"name": "d-0", "state": "ready"}
    scripted.answers = [(200, json.dumps({"instances": [entry]}).encode())]
    with pytest.raises(Refused, match=r"'d-0' is there already; give another --name"):
        await registrar.look()
    entry["state"] = "restarting"
    scripted.answers = [(200, json.dumps({"instances": [entry]}).encode())]
    await registrar.look()
    assert (registrar.weights, registrar.checkpoint) == (Weights(), "")
    scripted.answers = [
        (200, b'{"weights": {"generation": 3, "name": "c", "path": "/w"}, "checkpoint": "c"}')
    ]
    await registrar.look()
    assert (registrar.weights, registrar.checkpoint) == (Weights(3, "c", "/w"), "c")
    assert {method for method, *_ in scripted.asked} == {"GET"}


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 409])
async def test_a_refusal_is_final_and_says_what_the_server_said(scripted, status):
    registrar = Registrar(Server.parse(f"127.0.0.1:{scripted.port}", None), "d-0", 9.0)
    scripted.answers = [(status, refusal("another model is served here"))]
    with pytest.raises(Refused, match=r"^another model is served here$"):
        await registrar.renew(ME)


@pytest.mark.parametrize("status", [429, 500, 502, 503])
async def test_a_server_in_trouble_is_asked_again(scripted, status):
    registrar = Registrar(Server.parse(f"127.0.0.1:{scripted.port}", None), "d-0", 9.0)
    scripted.answers = [(status, b"<html>")]
    assert await registrar.renew(ME) == 0.25
    scripted.answers = [(status, refusal("later"))]
    with pytest.raises(ServerAway, match="later"):
        await registrar.drained()


async def test_another_kind_of_server_is_refused(scripted):
    registrar = Registrar(Server.parse(f"127.0.0.1:{scripted.port}", None), "d-0", 9.0)
    scripted.answers = [(200, b"<html>hello</html>")]
    with pytest.raises(Refused, match="is it a Baton"):
        await registrar.renew(ME)


async def test_no_proxy_stands_between(scripted, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    registrar = Registrar(Server.parse(f"127.0.0.1:{scripted.port}", None), "d-0", 9.0)
    assert await registrar.renew(ME) == 3.0


@pytest.mark.parametrize(
    "text", ["", "host", "host:port", "ftp://h:1", "http://h:1/path", "a b:1", "h:1234567"]
)
def test_an_address_that_is_none(text):
    with pytest.raises(OptionError, match="--join"):
        Server.parse(text, None)


def test_addresses():
    assert Server.parse("10.0.0.1:8000", None).url == "http://10.0.0.1:8000"
    assert Server.parse("[::1]:8000", None).url == "http://[::1]:8000"
    assert Server.parse("https://baton.example/", None).url == "https://baton.example"
