"""Where and how a server listens: Unix sockets, HTTPS, behind a proxy; comments in silent streams."""

from __future__ import annotations

import logging
import socket
import ssl
import stat
import subprocess
from pathlib import Path

import httpx
import pytest

from baton.launch.http.listening import listen_unix
from baton.launch.http.tls import tls_context
from baton.launch.limits import OptionError
from baton.launch.options import HttpOptions
from tests.launch.http_site import Site

BODY = {"prompt": [5, 6], "max_tokens": 3}


def ask(site: Site) -> httpx.Client:
    return httpx.Client(base_url=f"http://127.0.0.1:{site.port}", timeout=60)


def test_a_unix_socket(byte_level: Path, tmp_path: Path):
    path = tmp_path / "baton.sock"
    with socket.socket(socket.AF_UNIX) as gone:  # of a server that was killed
        gone.bind(str(path))
    with Site(byte_level, uds=str(path)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost") as http:
            assert http.post("/v1/completions", json=BODY).status_code == 200
            assert http.get("/server_info").status_code == 200  # (who may connect is on this machine)
        with pytest.raises(OptionError, match="another server listens there"):
            listen_unix(str(path))
        assert path.exists()
    assert not path.exists()
    file, absent = tmp_path / "file", tmp_path / "absent" / "x"
    file.write_text("mine")
    for wrong, says in ((file, "another server listens"), (absent, "No such file"), ("x" * 200, "too long")):
        with pytest.raises(OptionError, match=f"--uds .*{says}"):
            listen_unix(str(wrong))
    assert file.read_text() == "mine"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """(certificate, key) for localhost."""
    place = tmp_path_factory.mktemp("tls")
    files = str(place / "cert.pem"), str(place / "key.pem")
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
        f"-subj /CN=localhost -addext subjectAltName=DNS:localhost -out {files[0]} -keyout {files[1]}"
    )
    try:
        subprocess.run(command.split(), check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl to make a certificate with")
    return files


def test_https(byte_level: Path, certificate: tuple[str, str]):
    with Site(byte_level, tls=tls_context(*certificate)) as site:
        trusting = ssl.create_default_context(cafile=certificate[0])
        with httpx.Client(verify=trusting, base_url=f"https://localhost:{site.port}", timeout=60) as http:
            assert http.post("/v1/completions", json=BODY).status_code == 200
            with http.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as answer:
                assert answer.read().endswith(b"data: [DONE]\n\n")
        with ask(site) as plain, pytest.raises(httpx.TransportError):
            plain.get("/health")
        with httpx.Client(verify=trusting, base_url=f"https://localhost:{site.port}", timeout=60) as http:
            assert http.get("/health").status_code == 200, "who spoke no TLS harmed nobody"


def test_certificates_that_are_none(tmp_path: Path, certificate: tuple[str, str]):
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("nothing")
    for files, says in (
        ((None, certificate[1]), "--ssl-keyfile .*: give the certificate too"),
        ((str(wrong), None), "--ssl-certfile .*wrong.pem"),
        ((certificate[0], str(tmp_path / "absent")), "--ssl-keyfile .*No such file"),
        ((certificate[0], None), "--ssl-certfile"),
    ):
        with pytest.raises(OptionError, match=says):
            tls_context(*files)
    assert tls_context(None, None) is None


def test_behind_a_proxy(byte_level: Path):
    with Site(byte_level, root_path="/llm") as site, ask(site) as http:
        for path in ("/health", "/llm/health", "/llm/health/", "/v1/models", "/llm/v1/models"):
            assert http.get(path).status_code == 200, path
        for path in ("/llmhealth", "/llm/llm/health", "/other/health"):
            assert http.get(path).status_code == 404, path
        assert http.post("/llm/v1/completions", json=BODY).status_code == 200
        assert http.get("/llm/openapi.json").json()["servers"] == [{"url": "/llm"}]


def test_a_silent_stream_is_kept_alive(byte_level: Path):
    """The engine says nothing after a token until comments have come."""
    with Site(byte_level, limits=HttpOptions(sse_keep_alive_interval=0.01)) as site, ask(site) as http:
        site.engine.behaviour.hold_after = 1
        with http.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as answer:
            lines = filter(None, answer.iter_lines())
            assert next(line for line in lines if line == ": keep-alive")
            assert next(lines) == ": keep-alive"
            site.engine.behaviour.hold_after = None
            rest = [line for line in lines if line != ": keep-alive"]
        assert rest[-1] == "data: [DONE]"
        assert all(line.startswith("data: ") for line in rest)


def test_requests_are_logged_without_their_texts(byte_level: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "baton.gateway")
    with Site(byte_level, log_requests=True) as site, ask(site) as http:
        body = BODY | {"prompt": ["a secret", "b"], "request_id": "mine", "temperature": 0.25}
        assert http.post("/v1/completions", json=body).status_code == 200
    (line,) = [record.getMessage() for record in caplog.records if "prompts of" in record.getMessage()]
    assert "mine" in line
    assert "temperature=0.25" in line
    assert "secret" not in line
