"""The commands and programs in README and docs/ do what they are shown for: they are run as they stand there.

What a reader has to fill in is filled in: MODEL and `./my-checkpoint` are the embedded model, DIR is an empty
directory, 10.0.0.1 is this machine, and other addresses are those of servers on free ports, which the tests
share.  Numbers that only say how much is to be done are smaller (`SMALLER`).  A command is either run here or
matches an entry of `NOT_RUN`, which says why not; `tests/test_documents.py` reads all of them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.model.checkpoint.hub import resolve_model
from baton.protocol.rules.cluster_secret import ClusterSecret
from tests.conftest import GENEROUS_S
from tests.e2e.server import Server
from tests.test_documents import COMMANDS, PAGES, SHOWN, Command, _blocks

pytestmark = pytest.mark.slow

NOT_RUN = {
    r"make |\.venv/bin/": "CI runs `make test`, whose parts these are; `make serve` is `baton serve`",
    r"(\S*/)?pip |python -m venv|git |twine ": "installs or publishes over the network",
    r"python (benchmarks|tools)/": "takes minutes; tests/bench has what they are made of",
    r"baton bench serve --base-url": "takes minutes at 4 requests a second; tests/e2e/test_bench.py has less",
    r"baton bench throughput \./ernie": "needs a checkpoint of 0.7 GB",
    r"baton serve Qwen/": "needs the model hub",
    r"baton serve (MODEL|--instance) .*--leader 10": "needs two hosts; tests/e2e/test_nodes.py",
    r"baton serve MODEL --mixed 0 ": "no instance that could answer; see tests/e2e/test_cluster.py",
    r"baton serve MODEL --ray ": "needs Ray; tests/deploy/test_ray.py",
    r"(kubectl|helm|docker) |(PREFILL|HOSTS)=": "needs a cluster or a daemon; see tests/deploy",
    r"export (ANTHROPIC|CLAUDE|OPENAI|QWEN)_": "a client's settings",
    r"(claude|qwen|aider)\b": "agents, which `make agents` installs and runs",
    r"baton scale ": "watches until Ctrl-C; tests/e2e/test_scale.py",
    r"baton simulate --explore all": "takes a minute; tests/simulation/test_explorer.py runs each scenario",
    r"baton simulate --(seeds (2000|0:10000)|scenario handover)": "takes minutes; tests/simulation has fewer",
}
"""By the beginning of a command, and why it is not run here."""
SMALLER = {"--seeds": "3"}
MODEL = str(resolve_model(None))
YAML = f"model: {MODEL}\nserved-model-name: [mine]\nmax-model-len: 1024\nhost: 127.0.0.1\n"

REQUEST = {
    "custom_id": "1",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8},
}
CLUSTER = ("--prefill", "1", "--decode", "2")
SHARED = {CLUSTER, ("--record", "DIR")}
"""Flags of servers that other commands need beside them."""


def why_not(command: Command) -> str | None:
    text = " ".join(command.words)
    return next((reason for start, reason in NOT_RUN.items() if re.match(start, text)), None)


POOLING = {"--runner", "pooling"}
VECTORS = ("--runner", "generate", "--convert", "embed")

WHOLE = {command.words: command for command in COMMANDS if command.whole}
RUN = [words for words, command in WHOLE.items() if why_not(command) is None]


def names(words: tuple[str, ...]) -> str:
    return " ".join(words)[:80]


def flags_of_serve(words: tuple[str, ...]) -> tuple[str, ...]:
    """Of `baton serve [MODEL] FLAGS`, without what is filled in."""
    given = list(words[2:])
    if given and not given[0].startswith("-"):
        del given[0]
    if "--port" in given:
        del given[given.index("--port") : given.index("--port") + 2]
    return tuple(given)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory of a reader who has what the documents speak of."""
    place = tmp_path_factory.mktemp("reader")
    (place / "my-checkpoint").symlink_to(MODEL)
    (place / "serve.yaml").write_text(YAML)
    (place / "DIR").mkdir()
    (place / "secret").touch(mode=0o600)
    (place / "secret").write_text(ClusterSecret.make(bytes(32)).file())
    (place / "requests.jsonl").write_text(json.dumps(REQUEST) + "\n")
    lines = [{"timestamp": 90 * n, "input_length": 400 + 40 * n, "output_length": 40} for n in range(60)]
    (place / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (place / "README.md").symlink_to(Path(__file__).parents[2] / "README.md")
    return place


@pytest.fixture(scope="module")
def recorded(place: Path) -> Iterator[Server]:
    """`baton serve --record DIR`, which is a plain server besides."""
    with Server("--record", str(place / "DIR")) as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="module")
def vectors() -> Iterator[Server]:
    with Server(*VECTORS) as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="module")
def cluster() -> Iterator[Server]:
    with Server(*CLUSTER, model=MODEL) as server:
        server.wait_ready()
        yield server


def filled_in(words: tuple[str, ...], place: Path) -> list[str]:
    given = [MODEL if word == "MODEL" else str(place / word) if word == "DIR" else word for word in words]
    if ">" in given:  # into a file
        del given[given.index(">") :]
    for flag, value in SMALLER.items():
        if flag in given:
            given[given.index(flag) + 1] = value
    return given


def run(words: list[str], place: Path, stdin: str = "") -> str:
    command = [sys.executable, "-m", "baton", *words[1:]] if words[0] == "baton" else words
    done = subprocess.run(
        command,
        input=stdin,
        capture_output=True,
        text=True,
        cwd=place,
        timeout=4 * GENEROUS_S,
        check=False,
        env={**os.environ, "COLUMNS": "160"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def answers(server: Server) -> None:
    server.wait_ready()
    (model,) = server.http.get("/v1/models").raise_for_status().json()["data"]
    if set(server.flags) >= POOLING:
        body = {"model": model["id"], "input": "Hello!"}
        answer = server.http.post("/v1/embeddings", json=body).raise_for_status().json()
        assert answer["data"][0]["embedding"]
        return
    body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}
    answer = server.http.post("/v1/chat/completions", json=body).raise_for_status().json()
    assert answer["choices"][0]["message"]["content"]


def instances(server: Server) -> dict[str, dict[str, object]]:
    listed = server.http.get("/cluster/instances").raise_for_status().json()["instances"]
    return {entry["name"]: entry for entry in listed}


def until_there(server: Server, name: str) -> None:
    end = time.monotonic() + 2 * GENEROUS_S
    while instances(server).get(name, {}).get("state") != "ready":
        assert time.monotonic() < end, (name, instances(server))
        time.sleep(0.05)


SERVE = [words for words in RUN if words[:2] == ("baton", "serve") and "--help" not in words]
ALONE = sorted({flags_of_serve(words): words for words in SERVE if "--instance" not in words}.items())


@pytest.mark.parametrize("words", [words for flags, words in ALONE if flags not in SHARED], ids=names)
def test_a_server_starts_and_answers(words, place, monkeypatch):
    monkeypatch.chdir(place)
    model = filled_in(words, place)[2] if words[2:] and not words[2].startswith("-") else None
    flags = ["127.0.0.1" if flag == "10.0.0.1" else flag for flag in flags_of_serve(words)]
    with Server(*flags, model=model) as server:
        answers(server)


JOIN = [words for words in SERVE if "--instance" in words]


@pytest.fixture(scope="module")
def joined(cluster: Server, place: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`baton serve MODEL --instance …` beside the cluster: the command that other commands speak of."""
    words = filled_in(next(words for words in JOIN if "extra" in words), place)
    words[words.index("--join") + 1] = cluster.url.removeprefix("http://")
    with (place / "joined.txt").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "baton", *words[1:]], stdout=log, stderr=log, cwd=place
        )
    try:
        until_there(cluster, "extra")
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


CURL = [words for words in RUN if words[0] == "curl"]


@pytest.mark.skipif(not shutil.which("curl"), reason="no curl")
@pytest.mark.parametrize("words", sorted(CURL, key=lambda words: "draining" in " ".join(words)), ids=names)
def test_curl(words, cluster, joined, place):
    """Everything is asked of one server: a cluster, and an instance that joined it."""
    address = cluster.url.removeprefix("http://")
    asked = [re.sub(r"127\.0\.0\.1:8000|HOST:PORT", address, word) for word in words]
    answer = json.loads(run([asked[0], "--fail-with-body", "-sS", *asked[1:]], place))
    path = next(word for word in words if re.search(r":(8000|PORT)/", word)).partition("/cluster/instances")
    if not path[1]:
        assert answer["choices"][0]["message"]["content"]
    elif not path[2]:
        assert {"prefill-0", "decode-0", "decode-1", "extra"} <= {one["name"] for one in answer["instances"]}
    else:
        wanted = json.loads(words[words.index("--json") + 1])
        assert answer["label"] == wanted.get("label", answer["label"])
        assert answer["draining"] is (wanted.get("state") == "draining")
        undone = {"label": "decode"} if "label" in wanted else {"state": "active"}
        cluster.http.post("/cluster/instances" + path[2], json=undone).raise_for_status()


def test_ctrl_c_drains_an_instance_that_joined(cluster, joined):
    joined.send_signal(signal.SIGINT)
    assert joined.wait(2 * GENEROUS_S) == 0
    assert "extra" not in instances(cluster)


FILES = [text for _, text in SHOWN]
PROGRAMS = [(page.name, text) for page in PAGES for text in _blocks(page, "python") if text not in FILES]


@pytest.mark.parametrize(("page", "text"), PROGRAMS, ids=[name for name, _ in PROGRAMS])
def test_a_program_runs(page, text, place, request):
    if "127.0.0.1:8000" in text:
        server = request.getfixturevalue("vectors" if "embeddings" in text else "recorded")
        text = text.replace('"MODEL"', '"baton-tiny"')
        text = text.replace("http://127.0.0.1:8000", server.url)
    (place / "program.py").write_text(text)
    assert run([sys.executable, "program.py"], place).strip()


TALK = [words for words in RUN if words[0] == "baton" and (words[1] != "serve" or "--help" in words)]


@pytest.mark.parametrize("words", sorted(TALK, key=lambda words: words[1] == "replay"), ids=names)
def test_a_command_ends_well(words, place, request):
    if words[1] == "replay":  # of what the server has recorded
        recorded = request.getfixturevalue("recorded")
        answers(recorded)
        assert recorded.stop() == 0
    said = run(filled_in(words, place), place, stdin="Hello! Who are you?\n/quit\n")
    if "-o" in words:
        said += (place / words[words.index("-o") + 1]).read_text()
    assert said.strip()


def test_every_command_is_run_or_says_why_not():
    tried = {*CURL, *JOIN, *SERVE, *TALK}
    assert set(RUN) <= tried, "teach these tests to run it, or say in NOT_RUN why not"
    unused = [start for start in NOT_RUN if not any(re.match(start, " ".join(words)) for words in WHOLE)]
    assert not unused
