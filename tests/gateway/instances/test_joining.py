"""Who may join, from where, and how an instance proves that it is who registered."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from baton.gateway.errors import BadRequest
from baton.gateway.instances import client as cluster_client
from baton.gateway.instances import endpoints
from baton.gateway.instances.endpoints import check_endpoint
from baton.protocol.rules.proof import Prover, answer, claim
from tests.gateway.site import PATH, Site


def test_who_does_not_know_the_secret_gets_no_request(site: Site):
    """An engine of somebody else, at whose address a fake was registered; or somebody who took the
    address."""
    victim = site.engine("b")
    victim.secret = "known-to-its-own-server-only-and-long"
    assert site.put("b", secret="a-guess-of-at-least-32-characters").status_code == 200
    site.until(lambda: site.see("b")["state"] == "failed")
    assert "did not prove" in site.see("b")["failure"]
    for _ in range(8):
        site.server.openai().completions.create(model="tiny", prompt="x", max_tokens=1)
    assert not victim.submits
    refusal = site.put("b", secret="a-guess-of-at-least-32-characters")
    assert (refusal.status_code, "did not prove" in refusal.text) == (400, True)
    site.http.delete(f"{PATH}/b").raise_for_status()
    assert site.put("b", secret=victim.secret).status_code == 200
    site.until(lambda: site.see("b")["state"] == "ready")


def test_it_proves_itself_on_each_connection(site: Site):
    joined = site.join("b")
    joined.secret = "not-the-one-that-was-registered-any-more"
    hellos = joined.hellos

    async def breaks() -> None:
        site.server.client.instances["b"]._connection_broke()

    site.server.call(breaks())
    assert site.server.client.instances["b"]._channel is None, (
        "nothing goes there before it is known who listens"
    )
    site.until(lambda: site.see("b")["state"] == "failed")
    assert joined.hellos > hellos


def test_a_secret_is_needed_and_not_shown(site: Site):
    site.engine("b")
    for wrong in (None, "", "short", "x" * 129, "with spaces in it, of 32 characters"):
        refusal = site.put("b", secret=wrong)
        assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, "secret")
    site.join("b")
    assert site.joined["b"].secret not in site.http.get(PATH).text


def test_registrations_are_limited(site: Site, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cluster_client, "MAX_JOINED", 2)
    site.join("a")
    site.join("b")
    site.engine("c")
    refusal = site.put("c")
    assert (refusal.status_code, "retry-after" in refusal.headers) == (429, True)
    assert site.put("b").status_code == 200, "a renewal"
    site.http.delete(f"{PATH}/a").raise_for_status()
    site.join("c")


@pytest.mark.parametrize(
    ("endpoint", "from_here", "with_key", "from_elsewhere"),
    [
        ("tcp://127.0.0.1:5000", True, True, False),
        ("tcp://[::1]:5000", True, True, False),
        ("tcp://[::ffff:127.0.0.1]:5000", True, True, False),
        ("tcp://10.0.0.9:5000", True, True, True),
        ("tcp://10.0.0.8:5000", False, True, True),
        ("tcp://[2001:db8::7]:5000", False, True, True),
        ("tcp://169.254.169.254:80", False, False, False),
        ("tcp://[fe80::1]:80", False, False, False),
        ("tcp://0.0.0.0:80", False, False, False),
        ("tcp://224.0.0.1:80", False, False, False),
        ("tcp://10.0.0.9:0", False, False, False),
        ("tcp://10.0.0.9:65536", False, False, False),
        ("tcp://localhost:5000", False, False, False),
        ("tcp://metadata.internal:80", False, False, False),
        ("tcp://1.2.3:80", False, False, False),
        ("inproc://x", False, False, False),
        ("ws://10.0.0.9:80", False, False, False),
        ("tcp://10.0.0.9:80;10.0.0.1:90", False, False, False),
        ("", False, False, False),
        (None, False, False, False),
    ],
)
def test_addresses(
    endpoint: str | None,
    from_here: bool,
    with_key: bool,
    from_elsewhere: bool,
    monkeypatch: pytest.MonkeyPatch,
):
    """`from_here`: a peer on this machine, whose address 10.0.0.9 is; `with_key`: it sent an admin key."""
    monkeypatch.setattr(endpoints, "_is_mine", lambda address: address == "10.0.0.9")

    def taken(*, local: bool, proven: bool) -> bool:
        try:
            return check_endpoint(endpoint, local=local, proven=proven) == endpoint
        except BadRequest as error:
            return error.param != "endpoint"

    assert taken(local=True, proven=False) is from_here
    assert taken(local=True, proven=True) is with_key
    assert taken(local=False, proven=True) is from_elsewhere


def test_paths(tmp_path: Path):
    private, shared = tmp_path / "private", tmp_path / "shared"
    private.mkdir(mode=0o700)
    shared.mkdir()
    shared.chmod(0o777)
    listening = []
    for directory in (private, shared):
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(directory / "s"))
        listening.append(listener)
    (private / "file").write_text("")
    (private / "link").symlink_to(private / "s")
    good = f"ipc://{private}/s"
    assert check_endpoint(good, local=True, proven=False) == good
    for bad in (
        f"ipc://{shared}/s",
        f"ipc://{private}/file",
        f"ipc://{private}/link",
        f"ipc://{private}/none",
    ):
        with pytest.raises(BadRequest, match="endpoint"):
            check_endpoint(bad, local=True, proven=True)
    with pytest.raises(BadRequest, match="you are not"):
        check_endpoint(good, local=False, proven=True)
    for listener in listening:
        listener.close()


def test_proofs():
    known = "k" * 32
    prover = Prover(known, "a.1")
    right = claim(known, b"nonce", "gate", "a.1")
    assert not prover.knows(b"g")
    for claimed in (
        b"",
        right[:-1],
        answer(known, b"nonce", "gate", "a.1"),
        claim("x" * 32, b"nonce", "gate", "a.1"),
    ):
        assert not prover.admits(b"g", b"nonce", "gate", claimed)
    assert not prover.admits(b"g", b"other", "gate", right)
    assert not prover.admits(b"g", b"", "gate", claim(known, b"", "gate", "a.1"))
    assert not prover.knows(b"g")
    assert prover.admits(b"g", b"nonce", "gate", right)
    assert prover.knows(b"g")
    given = prover.answer(b"g")
    assert given == answer(known, b"nonce", "gate", "a.1")
    others = [("x" * 32, b"nonce", "gate", "a.1"), (known, b"other", "gate", "a.1")]
    others += [
        (known, b"nonce", "g", "ate.1"),
        (known, b"nonce", "gatea", ".1"),
        (known, b"nonceg", "ate", "a.1"),
    ]
    assert given not in [answer(*other) for other in others]
    assert prover.answer(b"h") == b""
    none = Prover("", "a.1")
    assert none.admits(b"g", b"", "gate", b""), "the socket of an instance of this server is private"
    assert none.knows(b"h")


def test_the_secret_is_in_no_argument():
    """Those of a process are readable for everybody on the machine; see `processes.starting`."""
    from baton.launch.instances.processes.instance import InstanceLaunch

    assert "secret" not in InstanceLaunch.__struct_fields__
