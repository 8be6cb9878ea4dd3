"""The job for Slurm, with stand-ins for Slurm's commands: what it starts where, as `baton` reads it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("helm_python", reason="`make deploy-check` installs it")
sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import check_deploy as deploy

JOB = Path(__file__).parents[2] / "deploy/slurm/baton.sbatch"
STAND_INS = {
    "scontrol": 'printf "n%s\\n" 1 2 3 4',
    "getent": 'echo "127.0.0.${2#n} STREAM"',
    "srun": """
while [ "$1" != baton ]; do [ "$1" = --nodelist ] && node=$2; shift; done
shift; echo "$node $*" >> "$CALLS"
# The job lasts as long as its gateway.
[[ "$*" == *--instance* ]] || until [ "$(grep -c -e --instance "$CALLS")" = 4 ]; do sleep 0.1; done
""",
}


def start(tmp_path: Path, *flags: str, **variables: str) -> tuple[dict[str, list[list[str]]], str]:
    """The arguments of each `baton` by node, and what the job said."""
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "secret").touch()
    calls = tmp_path / "calls"
    calls.touch()
    inside = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "SLURM_JOB_NODELIST": "n[1-4]",
        "BATON_CLUSTER_SECRET_FILE": str(tmp_path / "secret"),
        "CALLS": str(calls),
        **variables,
    }
    ended = subprocess.run(
        ["bash", str(JOB), *flags], env=inside, capture_output=True, text=True, timeout=60, check=False
    )
    found: dict[str, list[list[str]]] = {}
    for line in calls.read_text().splitlines():
        node, *words = line.split()
        found.setdefault(node, []).append(words)
    return found, ended.stdout + ended.stderr


def of(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_an_instance_a_node(tmp_path: Path) -> None:
    found, said = start(tmp_path, "--max-model-len", "1024", PREFILL="1")
    assert "Baton: http://127.0.0.1:8000" in said
    assert sorted(map(len, found.values())) == [1, 1, 1, 2], "the first node has the gateway, too"
    joined = {node: words for node, all in found.items() for words in all if "--instance" in words}
    assert {node: of(words, "--label") for node, words in joined.items()} == {
        "n1": "prefill",
        "n2": "decode",
        "n3": "decode",
        "n4": "decode",
    }
    for words in joined.values():
        assert of(words, "--join") == "127.0.0.1:8000"
        read_by_baton(words)


def test_an_instance_of_two_nodes(tmp_path: Path) -> None:
    flags = ("--tensor-parallel-size", "4", "--collective-encryption", "off")
    found, _ = start(tmp_path, *flags, PREFILL="1", HOSTS="2")
    joined = {node: words for node, all in found.items() for words in all if "--instance" in words}
    assert {node: of(words, "--leader") for node, words in joined.items()} == {
        "n1": "127.0.0.1:8009",
        "n2": "127.0.0.1:8009",
        "n3": "127.0.0.3:8009",
        "n4": "127.0.0.3:8009",
    }
    assert {node: of(words, "--label") for node, words in joined.items() if "--label" in words} == {
        "n1": "prefill",
        "n3": "decode",
    }
    for node, words in joined.items():
        leads = node in ("n1", "n3")
        assert ("--nodes" in words, "--node" in words) == (leads, not leads)
        read_by_baton(words)


def read_by_baton(words: list[str]) -> None:
    name = "demo-baton-x"
    container = {"name": name, "args": words, "env": []}
    deploy.check_command({"metadata": {"name": name}}, container)


def test_nodes_that_cannot_be_divided_are_refused(tmp_path: Path) -> None:
    found, said = start(tmp_path, HOSTS="3")
    assert "HOSTS=3: --nodes 4 is no multiple of it" in said
    assert found == {}
