"""`--cluster-secret` and what refuses to listen without it."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from baton.launch.limits import OptionError
from baton.launch.options import ServeOptions
from baton.launch.options.sources import choose
from baton.launch.planning.cluster_secret import check_open, listens_openly, read_secrets, warn_if_open
from baton.protocol.rules.cluster_secret import ClusterSecret

A, B = (ClusterSecret.make(bytes([number] * 32)) for number in range(2))


def written(path: Path, secret: ClusterSecret, mode: int = 0o600) -> str:
    path.write_text(secret.file())
    path.chmod(mode)
    return str(path)


def test_the_command_makes_a_file_for_its_user_alone(tmp_path: Path):
    path = tmp_path / "secret"
    for _ in range(2):
        with path.open("wb") as file:
            subprocess.run(
                [sys.executable, "-m", "baton", "cluster", "secret"],
                stdout=file,
                check=True,
                umask=0o022,
            )
    assert path.stat().st_mode & 0o777 == 0o600
    (secret,) = read_secrets([str(path)]).accepted
    assert secret.file() == path.read_text()


def test_files_are_read_in_their_order(tmp_path: Path):
    a, b = written(tmp_path / "a", A), written(tmp_path / "b", B, 0o440)
    assert read_secrets([a, b]).accepted == (A, B)
    assert read_secrets([b, a]).first == B
    assert read_secrets([a, a]).accepted == (A,)
    assert not read_secrets([])
    with pytest.raises(OptionError, match="3 files; give one, or two"):
        read_secrets([a, b, a])
    variables = {"BATON_CLUSTER_SECRET_FILE": f"{a} {b}"}
    assert choose(ServeOptions, {}, environment=variables).options.cluster_secret == (a, b)


def test_what_cannot_be_used_says_why(tmp_path: Path):
    empty = tmp_path / "empty"
    empty.touch(0o600)
    with pytest.raises(OptionError, match=r"--cluster-secret .*/none: No such file or directory; `baton c"):
        read_secrets([str(tmp_path / "none")])
    with pytest.raises(OptionError, match=r"/empty: one line with a secret is expected"):
        read_secrets([str(empty)])
    for mode in (0o644, 0o602, 0o620):
        path = written(tmp_path / "open", A, mode)
        with pytest.raises(OptionError, match=r"other users may read or change it .*; chmod 600") as error:
            read_secrets([path])
        assert A.text not in str(error.value)


def options(**given: Any) -> ServeOptions:
    return ServeOptions(executor="simulated", **given)


JOIN: dict[str, Any] = {"instance": True, "join": "192.0.2.1:8000"}


@pytest.mark.parametrize(
    ("given", "open_at"),
    [
        ({}, []),
        ({"host": "0.0.0.0"}, []),
        ({"host": "0.0.0.0", "prefill": 1, "decode": 2}, []),
        ({"peer_host": "127.0.0.1", "transfer_host": "127.0.0.9"}, []),
        ({"peer_host": "192.0.2.7"}, ["--peer-host 192.0.2.7"]),
        ({"transfer_host": "192.0.2.7"}, ["--transfer-host 192.0.2.7"]),
        ({"mixed": 0}, []),
        ({"mixed": 0, "host": "0.0.0.0", "uds": "/run/x"}, []),
        ({"mixed": 0, "host": "0.0.0.0"}, ["--host 0.0.0.0"]),
        ({**JOIN}, []),
        ({**JOIN, "host": "192.0.2.7"}, ["--host 192.0.2.7"]),
        ({**JOIN, "peer_host": "192.0.2.7"}, ["--peer-host 192.0.2.7"]),
    ],
)
def test_what_listens_for_others_needs_a_secret(given: dict[str, Any], open_at: list[str]):
    assert listens_openly(options(**given)) == open_at
    check_open(options(**given, insecure_cluster=True))
    check_open(options(**given, cluster_secret=("file",)))
    if open_at:
        with pytest.raises(OptionError, match=f"^{open_at[0]}: .*baton cluster secret > FILE.*--insecure-cl"):
            check_open(options(**given))
    else:
        check_open(options(**given))


def test_a_secret_and_none_are_not_both():
    with pytest.raises(OptionError, match="--insecure-cluster: with --cluster-secret"):
        check_open(options(cluster_secret=("file",), insecure_cluster=True))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"cluster_secret": ("file",), "transfer": "nixl"}, "RDMA is not encrypted"),
        ({"cluster_secret": ("file",), "transfer_encryption": "off"}, "--transfer-encryption off"),
        ({"insecure_cluster": True}, "whoever reaches this machine may take part"),
        ({"cluster_secret": ("file",), "transfer": "tcp"}, ""),
        ({"transfer": "nixl"}, ""),
    ],
)
def test_what_is_not_encrypted_is_said_at_each_start(
    given: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING):
        warn_if_open(options(**given))
    assert words in caplog.text if words else not caplog.text
